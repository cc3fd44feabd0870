"""What every runtime offers: one step, one evaluation, the adapter in and out, and its whole state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from ondevice.artifact.adapter import Adapter


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step tells.

    Attributes:
        loss: mean loss of the step over all perturbed copies, nats a labelled token.
        losses: the loss of each forward copy; one entry for first-order methods.
        projected_gradients: one scalar a query (empty for first-order methods); with the seed they are the
            whole run (P-RGE section 3; the update is learning_rate / q * sum of g_i z_i).
        overlap: what ran beside what in the step before, seconds and bytes (`ondevice.offload.report.Overlap`), for
            methods that offload.
    """

    loss: float
    losses: tuple[float, ...]
    projected_gradients: tuple[float, ...] = ()
    overlap: dict[str, Any] | None = field(default=None, compare=False)


class Evaluator(Protocol):
    """What an evaluation needs of a model."""

    eval_batch_size: int | None
    """Rows an evaluation takes; None where any number will do."""

    lengths_tokens: tuple[int, ...] | None
    """The sequence lengths (buckets) the program takes, ascending; None where any will do."""

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's negative log likelihood over labelled tokens, float32 [rows], and their count, int64 [rows]."""
        ...


class Session(Evaluator, Protocol):
    """A training program that is open and holds state. Batches are int64 [batch_size, length_tokens]."""

    backend: str
    """`torch-cpu`, `torch-cuda` or `executorch`."""

    batch_size: int | None
    """Rows a training step takes; None where any number will do."""

    generator_backend: str
    """Which form of the generator makes the noise; `none` for first-order methods."""

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """Run optimizer step number `step` (from 0; it keys the noise)."""
        ...

    def state(self) -> dict[str, np.ndarray]:
        """Everything a resume needs to give the bits of an uninterrupted run."""
        ...

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave.

        Raises:
            CheckpointError: if names, shapes or dtypes are not this session's.
        """
        ...

    def adapter(self) -> Adapter | None:
        """The trained adapter, or None for a full-parameter method."""
        ...

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`."""
        ...

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """Apply a logged step without its forward passes (zeroth-order methods; `ondevice replay`)."""
        ...

    def close(self) -> None:
        """Release the program."""
        ...
