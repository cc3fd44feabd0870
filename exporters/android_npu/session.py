"""Sessions of NPU programs: on a machine without the NPU, QNN's simulator runs the delegates."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.exporters.android_npu import qnn
from ondevice.exporters.executorch.blocks import BlocksSession
from ondevice.exporters.executorch.session import ExecutorchSession

if TYPE_CHECKING:
    from ondevice.core.manifest import Manifest


class _Simulated(ExecutorchSession):
    """The simulator around a session, and its chatter kept from the user.

    Raises:
        MissingPackageError: the simulator cannot be used here.
    """

    backend = qnn.BACKEND

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        qnn.load()
        with qnn.quiet():
            super().__init__(folder, manifest)

    def close(self) -> None:
        """Release the program's methods; QNN says goodbye on standard output."""
        with qnn.quiet():
            super().close()
            del self.program


class NpuSession(_Simulated):
    """Runs a whole step; see `ExecutorchSession`."""

    def _run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        with _first_words(name in self._methods):
            return super()._run(name, *inputs)


class NpuBlocksSession(_Simulated, BlocksSession):
    """Runs functions of one block; see `BlocksSession`. Each layer's stay loaded: their weights are
    in the NPU's form and to load them takes as long as to run them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._of_layers: dict[tuple[str, int], Any] = {}
        super().__init__(folder, manifest)

    def _call_block(
        self, name: str, given: dict[str, Any], layer: int = 0, first: int = 0, expert: int = 0
    ) -> dict[str, Any]:
        with _first_words((name, layer) in self._of_layers):
            return super()._call_block(name, given, layer, first, expert)

    def _method(self, name: str, layer: int) -> Any:
        if self.spec.methods[name].program is None:
            return super()._method(name, layer)
        if (name, layer) not in self._of_layers:
            self._of_layers[name, layer] = super()._method(name, layer)
        return self._of_layers[name, layer]

    def close(self) -> None:
        """Release the program's methods."""
        with qnn.quiet():
            self._of_layers.clear()
        super().close()


@contextmanager
def _first_words(loaded: bool) -> Iterator[None]:
    """Within the block nothing is printed; ExecuTorch sends what its libraries print at their first
    use through Python's own streams."""
    with qnn.quiet(), nullcontext() if loaded else redirect_stderr(io.StringIO()):
        yield
