"""Exported programs that compute in PyTorch: what is written, what a host does and what the
functions compute are those of a program that is lowered, and lowering takes no time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ondevice.exporters.android_cpu.target import AndroidCpu
from ondevice.exporters.executorch import session

if TYPE_CHECKING:
    from ondevice.core.manifest import TensorPort
    from ondevice.core.program import ProgramModule
    from ondevice.exporters.executorch.lower import Lowered


class EagerProgram:
    """A program's functions before they are lowered, in the place of the runtime and its file."""

    def __init__(self) -> None:
        self.modules: dict[str, ProgramModule] = {}

    def lower(self, _target: Any, _job: Any, built: Any, _folder: Path) -> tuple[Any, Lowered]:
        """Keep the functions; see `ExecutorchTarget.lower`."""
        from ondevice.exporters.executorch.lower import Lowered

        self.modules = {one.name: one for one in built.modules}
        numbers = dict.fromkeys(self.modules, 0)
        ops = {name: list[str]() for name in self.modules}
        return built, Lowered(
            b"", numbers, ops, numbers, 0.0, dict.fromkeys(self.modules, ()), numbers
        )

    def load_program(self, _path: str) -> EagerProgram:
        """Stand for the runtime's program."""
        return self

    def load_method(self, name: str) -> Any:
        """Stand for the runtime's method, which takes and gives exactly what its ports say."""
        method = self.modules[name]

        def execute(inputs: list[Any]) -> tuple[Any, ...]:
            fits(name, method.inputs, inputs)
            with torch.no_grad():
                outputs = method.module(*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            fits(name, method.outputs, outputs)
            return outputs

        def called(inputs: list[Any], clone_outputs: bool) -> tuple[Any, ...]:
            assert not clone_outputs
            return execute(inputs)

        return SimpleNamespace(execute=execute, _method=called)


def fits(name: str, ports: Sequence[TensorPort], tensors: Sequence[torch.Tensor]) -> None:
    """Hold tensors against the ports of a function."""
    for port, tensor in zip(ports, tensors, strict=True):
        received = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        assert received == (tuple(port.shape), port.dtype), f"{name}: {port.name}"


@contextmanager
def computing_in_pytorch(checked: bool = False) -> Iterator[None]:
    """Let one export, and sessions over it, compute in PyTorch.

    Args:
        checked: the export compares the program with the method in eager, as every export does.
    """
    program = EagerProgram()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AndroidCpu, "lower", lambda *given: program.lower(*given))
        if not checked:
            patch.setattr(AndroidCpu, "check_program", lambda *_: ({}, []))
        patch.setattr(session, "load_runtime", lambda: program)
        patch.setattr(session, "_check_kernels", lambda *_: None)
        yield
