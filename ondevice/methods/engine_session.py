"""Base of the sessions of methods that offload: an engine that steps, and a whole model as the
result."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ondevice.core.errors import CheckpointError
from ondevice.core.session import OPTIMIZER_STEP, Session, StepResult
from ondevice.models.save import save_weights
from ondevice.nn.memory import memory_errors
from ondevice.offload.units import Joined

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from ondevice.models import LoadedModel
    from ondevice.offload.messages import Arrays


class EngineSession(Session):
    """AdamW over all parameters of a model by an engine that keeps optimizer states on the host;
    see `Session`."""

    step_hint: ClassVar[str]
    """Hint for a step that does not fit into the accelerator's memory."""

    def __init__(self, loaded: LoadedModel, config: Any, engine: Any) -> None:
        self.loaded = loaded
        self.config = config
        self.engine = engine
        self.ranks = engine.ranks
        self.backend = f"torch-{engine.where.type}"
        self.steps_done = 0
        self.arrays: dict[str, torch.Tensor] = {}  # of the last `state`, if they are views

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one AdamW step; its last updates run on while the next step begins."""
        with memory_errors(
            f"a step of {ids.shape[0]} rows of {ids.shape[1]} tokens", self.step_hint
        ):
            loss = self.engine.step(ids, labels, self.steps_done, learning_rate)
        self.steps_done += 1
        return StepResult(loss, (loss,), overlap=self.report())

    def report(self) -> dict[str, Any] | None:
        """Return the overlap report of the step before the last; None before the second."""
        overlap = self.engine.overlap
        return None if overlap is None else overlap.to_dict()

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        return self.engine.evaluate(ids, labels)

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Load the `state` of any number of ranks; rank 0 serves the others."""
        self.engine.flush()
        problem: Exception | None = None
        with self.ranks.lent(Joined(state or {})) as arrays:
            try:
                done = steps_of(arrays.get(OPTIMIZER_STEP))
                self._load(arrays)
                self.steps_done = done
            except CheckpointError as error:
                problem = error
        self.ranks.agree(problem)
        self._after_load()

    @abstractmethod
    def _load(self, arrays: Arrays) -> None:
        """Load the engine's arrays.

        Raises:
            CheckpointError: naming the first array that is missing or of another size or type.
        """

    @abstractmethod
    def _after_load(self) -> None:
        """Give the accelerator the loaded state, on all ranks together."""

    @abstractmethod
    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, on the host."""

    def save_model(self, folder: Path) -> None:
        """Write the trained model as transformers loads it, with its tokenizer."""
        save_weights(folder, self.weights(), self.loaded)

    def make_model(self, folder: Path) -> None:
        """Make the model's folder before any rank writes into it, on rank 0; here it is all that is
        written."""
        save_weights(folder, self.weights(), self.loaded)

    def write_model(self, folder: Path, arrays: dict[str, torch.Tensor] | None) -> None:
        """Write this rank's share of the weights, as they are now or as `arrays` of a state have
        them."""

    def hold(self) -> None:
        """Do nothing: `state` gives copies, unless a subclass says otherwise (`HoldsState`)."""

    def written(self, name: str | None) -> None:
        """Do nothing; see `hold`."""

    def close(self) -> None:
        """End the engine's threads; host memory is unlocked."""
        self.engine.close()


def steps_of(value: np.ndarray | None) -> int:
    """Return steps that a checkpoint's `optimizer_step` tells.

    Raises:
        CheckpointError: the checkpoint lacks it.
    """
    if value is None:
        raise CheckpointError(
            "the checkpoint lacks optimizer_step", hint="resume from an older checkpoint"
        )
    return int(value[:1].item())


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the same memory; bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
