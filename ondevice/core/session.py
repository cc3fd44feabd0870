"""The interface of every runtime: one step, one evaluation, the adapter in and out, and the whole state."""

# ruff: noqa: B027  what a session need not do is empty here, on purpose
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

    from ondevice.artifact.adapter import Adapter
    from ondevice.artifact.manifest import Manifest
    from ondevice.models import LoadedModel


IGNORE = -100
"""Label of a token that is not trained on."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments in a first-order session's state, by torch.optim's names: `exp_avg/<parameter>`."""

OPTIMIZER_STEP = "optimizer_step"
"""The optimizer's count of its own updates in a session's state, int64 [1]."""


@dataclass(frozen=True)
class StepResult:
    """Losses of one optimizer step, and the scalars that replay it.

    Attributes:
        loss: mean loss of the step over all perturbed copies, nats a labelled token.
        losses: the loss of each forward copy; one entry for first-order methods.
        projected_gradients: one scalar a query (empty for first-order methods); with the seed they are the
            whole run (P-RGE section 3; the update is learning_rate / q * sum of g_i z_i).
        overlap: what ran beside what in the step before, seconds and bytes (`ondevice.offload.device.Overlap`), for
            methods that offload.
    """

    loss: float
    losses: tuple[float, ...]
    projected_gradients: tuple[float, ...] = ()
    overlap: dict[str, Any] | None = field(default=None, compare=False)


class Evaluator(Protocol):
    """A model as an evaluation needs it."""

    eval_batch_size: int | None
    """Rows an evaluation takes; None where any number will do."""

    lengths_tokens: tuple[int, ...] | None
    """The sequence lengths (buckets) the program takes, ascending; None where any will do."""

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood over labelled tokens, float32 [rows], and their count,
        int64 [rows]; `ids` and `labels` are int64 [rows, tokens]."""
        ...


class OrdinaryModel(Evaluator, Protocol):
    """Trained weights in the ordinary architecture: evaluates, and saves itself as transformers loads it."""

    def save_model(self, folder: Path) -> None:
        """Write the model with its tokenizer into an empty folder."""
        ...


class Session(ABC):
    """A training program that is open and holds state. Batches are int64 [batch_size, length_tokens].

    The same for every method and runtime. What a subclass does not override is what a session of a whole model does:
    it has no adapter, and nothing to replay.
    """

    config: Any
    """The method's settings; `name` says which method."""

    backend: str
    """`torch-cpu`, `torch-cuda`, `mlx-cpu`, `mlx-gpu` or `executorch`."""

    batch_size: int | None = None
    """Rows a training step takes; None where any number will do."""

    eval_batch_size: int | None = None
    lengths_tokens: tuple[int, ...] | None = None

    # In the head of the log: two forms may differ in a Gaussian's last bits, and a replay in another one warns.
    generator_backend: str = "none"
    """Which form of the generator makes the noise; `none` for first-order methods."""

    saves_beside: bool = False
    """`state` gives views of memory that later steps change: a checkpoint is written beside the next steps, `hold` is
    called before them, and `written` as each array has been read."""

    @abstractmethod
    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run optimizer step number `step` (from 0; it keys the noise)."""

    def packed_step(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run optimizer step number `step` on sequences of several rows, as if each row were alone.

        Args:
            position_ids: int64 [sequences, tokens], each token's place in its row; a row begins at 0, and the label
                there is -100.

        Raises:
            ConfigError: this session does not keep rows of a sequence apart (`Packs`).
        """
        raise ConfigError(f"this form of method {self.config.name} computes one row a sequence")

    @abstractmethod
    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood over labelled tokens, float32 [rows], and their count,
        int64 [rows]; `ids` and `labels` are int64 [rows, tokens]."""

    @abstractmethod
    def state(self) -> dict[str, np.ndarray]:
        """Return all that a resume needs to give the bits of an uninterrupted run, by name."""

    @abstractmethod
    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore the arrays that `state` returned.

        Raises:
            CheckpointError: if names, shapes or dtypes are not this session's.
        """

    def adapter(self) -> Adapter | None:
        """Return the trained adapter, or None for a full-parameter method."""
        return None

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`.

        Raises:
            ArtifactError: it does not fit.
            ConfigError: the method trains the whole model.
        """
        raise ConfigError(f"method {self.config.name} trains the whole model and takes no adapter")

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply a logged step without its forward passes (zeroth-order methods; `ondevice replay`).

        Raises:
            ConfigError: the method is a first-order one.
        """
        raise ConfigError(
            "a first-order run has no projected gradients to replay",
            hint="resume from its checkpoint",
        )

    def save_model(self, folder: Path) -> None:
        """Write the trained model into an empty folder, as transformers loads it; for methods that train all of it."""
        raise ConfigError(f"method {self.config.name} trains an adapter and saves no model")

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Prepare step number `step`: what a method does now and then with more rows than a step has.

        Args:
            batch_at: the batch of a step, with `ids` and `labels`; this step's and later ones may be looked at.
            folder: of the run.

        Returns:
            a file in `folder` that a replay needs from this step on; None where nothing was written.
        """
        return None

    def before_replay(self, step: int, folder: Path) -> None:
        """Take back what `before_step` wrote before `step`, if it did.

        Raises:
            CheckpointError: the file is not there, or of another run.
        """

    def score_step(self, score: Callable[[], float], step: int, learning_rate: float) -> StepResult:
        """Run step number `step` towards better scores; a loss is 1 less the score.

        Args:
            score: of the session's weights as they are while it is called; 1 is best.

        Raises:
            ConfigError: the method is a first-order one.
        """
        raise ConfigError(
            f"method {self.config.name} needs a gradient, and a score has none",
            expected="a zeroth-order method",
            received=f"method {self.config.name}",
            hint="train.objective loss, or another method",
        )

    def whole_model(self) -> LoadedModel:
        """Return the model as it is now, with what was trained in place, to generate text with."""
        raise ConfigError(f"method {self.config.name} gives no model to generate with")

    @property
    def ordinary_session(self) -> OrdinaryModel | None:
        """The same weights in the ordinary architecture, for a method that trains another one and can go back."""
        return None

    def hold(self) -> None:
        """Change nothing of the last `state` before `written` has named it; only where `saves_beside`."""

    def written(self, name: str | None) -> None:
        """Release the array `name` of `state`, which has been read; None: nothing of it will be read any more."""

    def save_beside(self, folder: Path) -> Callable[[], dict[str, str]] | None:
        """Write what belongs beside the state into a checkpoint's folder.

        Returns:
            Where other processes write their part of the state there: what waits for them, and gives the SHA-256 of
            their files by name.
        """
        return None

    def follow(self) -> Any:
        """Compute with rank 0 until it ends, and return what it passed to `finish`; for methods that train in ranks."""
        raise ConfigError(f"method {self.config.name} trains in one process")

    def finish(self, result: Any) -> None:
        """Broadcast the run's result to the other ranks, whose `follow` returns it."""

    def close(self) -> None:
        """Release the program."""


class ProgramSession(Session):
    """A session of an artifact: shapes are fixed.

    Attributes:
        constants: by name, what a graph takes as an input that no step changes, such as the scale of a perturbation.
    """

    manifest: Manifest
    batch_size: int
    eval_batch_size: int
    lengths_tokens: tuple[int, ...]
    seed: int
    constants: dict[str, float]

    def score_step(self, score: Callable[[], float], step: int, learning_rate: float) -> StepResult:
        """Refuse: a program computes its losses and its step in one; see `Session.score_step`."""
        raise ConfigError(
            "an exported program's step is on the loss: losses and update are computed in one",
            expected="train.objective loss",
            received="a step on a score",
            hint="train on a score in PyTorch, with `ondevice train`",
        )


@dataclass(frozen=True)
class OpenedNetwork:
    """A network that transformers alone cannot open, opened by the method that trained it.

    Attributes:
        session: evaluates rows.
        loaded: the ordinary model around it, with its tokenizer.
        write: (token ids, max_new_tokens) to greedy text.
    """

    session: Evaluator
    loaded: LoadedModel
    write: Callable[[Sequence[int], int], str]


class PackingSession(Session):
    """A session that keeps rows of one sequence apart, so that one step serves both forms of a batch."""

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run a step on one row a sequence; see `Session.step`."""
        return self.step_placed(ids, labels, None, step, learning_rate)

    def packed_step(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run the same step on sequences of several rows; see `Session.packed_step`."""
        return self.step_placed(ids, labels, position_ids, step, learning_rate)

    @abstractmethod
    def step_placed(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run optimizer step number `step`; without `position_ids` a sequence is a row."""
