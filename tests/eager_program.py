"""Exported programs that compute in PyTorch: what is written, what a host does and what the
functions compute are those of a program that is lowered, and lowering takes no time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ondevice.exporters.android_cpu.target import AndroidCpu
from ondevice.exporters.executorch import session

if TYPE_CHECKING:
    from ondevice.exporters.executorch.lower import Lowered


class EagerProgram:
    """A program's functions before they are lowered, in the place of the runtime and its file."""

    def __init__(self) -> None:
        self.modules: dict[str, Any] = {}

    def lower(self, _target: Any, _job: Any, built: Any, _folder: Path) -> tuple[Any, Lowered]:
        """Keep the functions; see `ExecutorchTarget.lower`."""
        from ondevice.exporters.executorch.lower import Lowered

        self.modules = {one.name: one.module for one in built.modules}
        numbers = dict.fromkeys(self.modules, 0)
        ops = {name: list[str]() for name in self.modules}
        return built, Lowered(
            b"", numbers, ops, numbers, 0.0, dict.fromkeys(self.modules, ()), numbers
        )

    def load_program(self, _path: str) -> EagerProgram:
        """Stand for the runtime's program."""
        return self

    def load_method(self, name: str) -> Any:
        """Stand for the runtime's method."""

        def execute(inputs: list[Any]) -> tuple[Any, ...]:
            with torch.no_grad():
                outputs = self.modules[name](*inputs)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        return SimpleNamespace(execute=execute)


@contextmanager
def computing_in_pytorch() -> Iterator[None]:
    """Let one export, and sessions over it, compute in PyTorch; it is not compared with eager."""
    program = EagerProgram()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AndroidCpu, "lower", lambda *given: program.lower(*given))
        patch.setattr(AndroidCpu, "check_program", lambda *_: ({}, []))
        patch.setattr(session, "load_runtime", lambda: program)
        patch.setattr(session, "_check_kernels", lambda *_: None)
        yield
