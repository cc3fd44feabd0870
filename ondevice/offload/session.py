"""The base of the sessions of the offload engine."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ondevice.core.errors import CheckpointError
from ondevice.core.session import OPTIMIZER_STEP, Session, StepResult, Weigh
from ondevice.models.save import save_weights
from ondevice.nn.cross_entropy import WeighedRows
from ondevice.offload.device import memory_errors
from ondevice.offload.units import SINGLE, Joined, Ranks

if TYPE_CHECKING:
    from ondevice.models import LoadedModel
    from ondevice.offload.units import Arrays


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
        return self._train(ids, labels, learning_rate, None)

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one AdamW step on weighted rows; see `Weighing`."""
        return self._train(ids, labels, learning_rate, WeighedRows(weigh))

    def _train(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        learning_rate: float,
        weighed: WeighedRows | None,
    ) -> StepResult:
        with memory_errors(
            f"a step of {ids.shape[0]} rows of {ids.shape[1]} tokens", self.step_hint
        ):
            loss = self.engine.step(ids, labels, self.steps_done, learning_rate, weighed)
        self.steps_done += 1
        return StepResult(loss, (loss,), overlap=self.report())

    def report(self) -> dict[str, Any] | None:
        """Return the overlap report of the step before the last; None before the second."""
        overlap = self.engine.overlap
        if overlap is None:
            return None
        return overlap.to_dict()

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        return self.engine.evaluate(ids, labels)

    def takes_branches(self, length_tokens: int) -> bool:
        """Return whether the model's sequences can branch; see `Branching.takes_branches`."""
        return self.loaded.family.takes_branches(length_tokens)

    def evaluate_branches(self, *tree: np.ndarray) -> np.ndarray:
        """Compute the labels' losses; see `Branching.evaluate_branches`."""
        return self.engine.evaluate_branches(*tree)

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

    def release_model(self) -> None:
        """Give the model its weights back; of several ranks, none has them all."""
        if not self.ranks.single:
            return
        weights = self.weights()
        for name, parameter in self.loaded.model.named_parameters():
            parameter.data = weights[name].to(self.engine.dtypes[name], copy=True)

    @abstractmethod
    def weight_parts(
        self, arrays: dict[str, torch.Tensor] | None
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield what this rank writes of the parameters, out of the `arrays` of a state or as they
        are now: name, first element, and elements, flat."""

    @property
    @abstractmethod
    def saved_dtype(self) -> torch.dtype:
        """Type of the weights that several ranks write together."""

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


def join(device: str, timeout_s: float) -> tuple[Ranks, str]:
    """Return the ranks of this run and this one's device; see `ranks.join_processes`."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return SINGLE, device
    from ondevice.offload.ranks import join_processes  # starts torch.distributed

    return join_processes(device, timeout_s)
