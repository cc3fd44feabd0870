"""A session of an NPU program: on a machine without the NPU, QNN's simulator runs the delegate."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.exporters.android_npu import qnn
from ondevice.exporters.executorch.session import ExecutorchSession

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest


class NpuSession(ExecutorchSession):
    """As any ExecuTorch session, with the simulator around it, and its chatter kept from the user.

    Raises:
        MissingPackageError: the simulator cannot be used here.
    """

    backend = qnn.BACKEND

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        qnn.load()
        with qnn.quiet():
            super().__init__(folder, manifest)

    def _run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        # ExecuTorch sends what its libraries print at their first use through Python's own streams.
        first = nullcontext() if name in self._methods else redirect_stderr(io.StringIO())
        with qnn.quiet(), first:
            return super()._run(name, *inputs)

    def close(self) -> None:
        """Release the program's methods; QNN says goodbye on standard output."""
        with qnn.quiet():
            super().close()
            del self.program
