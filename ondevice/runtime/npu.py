"""A session of an NPU program: on a machine without the NPU, QNN's simulator runs the delegate."""

from __future__ import annotations

import io
from contextlib import nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.session import StepResult
from ondevice.runtime import qnn
from ondevice.runtime.executorch import ExecutorchSession

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest


class NpuSession(ExecutorchSession):
    """Runs a program whose one method trains, and evaluates with perturbation scale 0.

    `train_step` takes copies * batch rows: training repeats the batch for every copy, evaluation hands in as many
    different rows.

    Raises:
        MissingPackageError: the simulator cannot be used here.
    """

    backend = qnn.BACKEND

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        qnn.load()
        with qnn.quiet():
            super().__init__(folder, manifest)
        method = PrgeConfig.parse(manifest.method, "manifest.json: method")
        self.copies, self.perturbation_scale = method.copies, method.perturbation_scale

    def _run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        # ExecuTorch sends what its libraries print at their first use through Python's own streams.
        first = nullcontext() if name in self._methods else redirect_stderr(io.StringIO())
        with qnn.quiet(), first:
            return super()._run(name, *inputs)

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One whole training step inside the program; see `Session.step`."""
        name = self._method("train_step", self.batch_size, ids)
        repeated = np.tile(ids, (self.copies, 1)), np.tile(labels, (self.copies, 1))
        scale = np.array([self.perturbation_scale], dtype=np.float32)
        inputs = (*repeated, self._adapter, *self._scalars(step, learning_rate), scale)
        losses, gradients, self._adapter, _, _ = self._run(name, *inputs)
        return StepResult(float(losses.mean()), tuple(losses.tolist()), tuple(gradients.tolist()))

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        name = self._method("train_step", self.eval_batch_size, ids)
        unmoved = np.zeros(1, dtype=np.float32)
        _, _, _, nll, tokens = self._run(name, ids, labels, self._adapter, *self._scalars(0, 0.0), unmoved)
        return nll, tokens.astype(np.int64)

    def close(self) -> None:
        """Release the program's methods; QNN says goodbye on standard output."""
        with qnn.quiet():
            super().close()
            del self.program
