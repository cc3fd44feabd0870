"""The interface of every runtime: one step, one evaluation, the adapter in and out, and the whole state."""

# ruff: noqa: B027  what a session need not do is empty here, on purpose
from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from ondevice.core.errors import ConfigError, VerificationError
from ondevice.core.traits import is_expert_parameter

if TYPE_CHECKING:
    import numpy as np

    from ondevice.core.manifest import Manifest


T = TypeVar("T")
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
IGNORE = -100
"""Label of a token that is not trained on."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's two moments in a first-order session's state, by torch.optim's names: `exp_avg/<parameter>`."""

OPTIMIZER_STEP = "optimizer_step"
"""The optimizer's count of its own updates in a session's state, int64 [1]."""


Weigh = Callable[["np.ndarray"], "tuple[float, np.ndarray]"]
"""Negative log likelihoods of a step's rows, float64 [rows], to its loss and each row's weight, float64 [rows]."""


@dataclass(frozen=True)
class StepResult:
    """Losses of one optimizer step, and the scalars that replay it.

    Attributes:
        loss: mean loss of the step over all perturbed copies, nats a labelled token.
        losses: the loss of each forward copy; one entry for first-order methods.
        projected_gradients: one scalar a query (empty for first-order methods); with the seed they are the
            whole run (P-RGE section 3; the update is learning_rate / q * sum of g_i z_i).
        overlap: what overlapped in the step before, seconds and bytes (`ondevice.offload.device.Overlap`), for
            methods that offload.
        experts: of a mixture whose experts are read as tokens need them: how many of `all` were `read`, their
            `bytes`, and the `bytes_per_token` of the batch.
    """

    loss: float
    losses: tuple[float, ...]
    projected_gradients: tuple[float, ...] = ()
    overlap: dict[str, Any] | None = field(default=None, compare=False)
    experts: dict[str, float] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: each named linear layer W becomes W + (alpha / rank) B A.

    Attributes:
        tensors: float32 `<linear>.lora_A.weight` [rank, inputs] and `<linear>.lora_B.weight` [outputs, rank],
            `<linear>` being the module's full name: `model.layers.0.self_attn.q_proj`. Of experts' parameters see
            `ondevice.artifact.expert_pairs`.
        rank: of every pair.
        alpha: numerator of the scale.
        target_modules: last part of the names, sorted: `("q_proj", "v_proj")`.
        base_model: the source string of the model it was trained on; may be empty.
        base_weights: how that model's weights were rounded, such as `q4_0`; may be empty.
    """

    tensors: dict[str, np.ndarray]
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    base_model: str
    base_weights: str = ""

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of the linear layers that it changes, in order of the layers."""
        suffix = ".lora_A.weight"
        names = {name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix)}
        return tuple(sorted(names, key=lambda name: (layer_of(name), name)))

    @property
    def expert_parameters(self) -> tuple[str, ...]:
        """Those of `linears` that are parameters with a matrix for each expert."""
        return tuple(filter(is_expert_parameter, self.linears))

    @property
    def changes_nothing(self) -> bool:
        """True when every product B A is zero because A or B is."""
        pairs = (self.pair(name) for name in self.linears)
        return not any(a.any() and b.any() for a, b in pairs)

    def check_changes(self, folder: str | Path) -> None:
        """Refuse an adapter that changes nothing, as one that was never trained; `folder` names it.

        Raises:
            VerificationError: it `changes_nothing`.
        """
        if self.changes_nothing:
            raise VerificationError(
                f"the adapter in {folder} changes nothing: every product B A is zero",
                expected="at least one A and B that are both not zero",
                received=f"{len(self.linears)} pairs, each with a zero side",
                hint="train it for at least one step, or use the base model",
            )

    def pair(self, linear: str) -> tuple[np.ndarray, np.ndarray]:
        """Return A float32 [rank, inputs] and B float32 [outputs, rank] of one linear layer."""
        return self.tensors[f"{linear}.lora_A.weight"], self.tensors[f"{linear}.lora_B.weight"]


def layer_of(linear: str) -> int:
    match = _LAYER.search(linear)
    if match:
        return int(match[1])
    return -1


class Evaluator(Protocol):
    """A model as an evaluation needs it."""

    eval_batch_size: int | None
    """Rows an evaluation takes; None if any number will do."""

    lengths_tokens: tuple[int, ...] | None
    """The sequence lengths (buckets) the program takes, ascending; None if any will do."""

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

    The same for every method and runtime. What only some sessions can do is a protocol below: callers ask with
    `isinstance(session, Replaying)`.
    """

    config: Any
    """The method's settings; `name` says which method."""

    backend: str
    """`torch-cpu`, `torch-cuda`, `mlx-cpu`, `mlx-gpu` or `executorch`."""

    batch_size: int | None = None
    """Rows a training step takes; None if any number will do."""

    eval_batch_size: int | None = None
    lengths_tokens: tuple[int, ...] | None = None

    # In the head of the log: two forms may differ in a Gaussian's last bits, and a replay in another one warns.
    generator_backend: str = "none"
    """Which form of the generator makes the noise; `none` for first-order methods."""

    @abstractmethod
    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run optimizer step number `step` (from 0; it keys the noise)."""

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

    def save_model(self, folder: Path) -> None:
        """Write the trained model into an empty folder, as transformers loads it; for methods that train all of it."""
        raise ConfigError(f"method {self.config.name} trains an adapter and saves no model")

    def release_model(self) -> None:
        """Give a model that outlives the session its own layers back, with the trained weights.

        An adapter is in none of its layers from then on. A second call does nothing.
        """

    def close(self) -> None:
        """Release the program."""


@runtime_checkable
class Packing(Protocol):
    """A session that keeps the rows of one sequence apart."""

    def packed_step(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run optimizer step number `step` on sequences of several rows, as if each row had its own sequence.

        Args:
            position_ids: int64 [sequences, tokens], each token's index in its row; a row begins at 0, and the label
                there is -100.
        """
        ...


@runtime_checkable
class Weighing(Protocol):
    """A session that trains on any function of its rows' log likelihoods."""

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run optimizer step number `step` on the sum of each row's weight times its negative log likelihood.

        The weights are constants, so this is the gradient of every loss L with dL / d(nll) as weights.

        Args:
            weigh: called once, with the rows' negative log likelihoods, summed over their labelled tokens. Its loss
                is the step's.
        """
        ...


@runtime_checkable
class Branching(Protocol):
    """A session that evaluates continuations of one prompt in one sequence."""

    def takes_branches(self, length_tokens: int) -> bool:
        """Return whether sequences of so many tokens can branch: the model has no state that is carried from token to
        token, and no window of attention that is shorter."""
        ...

    def evaluate_branches(
        self,
        ids: np.ndarray,
        position_ids: np.ndarray,
        branches: np.ndarray,
        sources: np.ndarray,
        labels: np.ndarray,
    ) -> np.ndarray:
        """Return the negative log likelihood of each label, float32 [labels].

        Args:
            ids: int64 [rows, tokens]; a prompt, then its continuations one after the other, then padding.
            position_ids: int64 [rows, tokens]; a continuation's positions go on from the prompt's.
            branches: int64 [rows, tokens]: 0 for the prompt, another number for each continuation. A token sees the
                prompt and its own continuation, up to itself.
            sources: int64 [labels]: row * tokens + place of the token that predicts the label.
            labels: int64 [labels].
        """
        ...


@runtime_checkable
class Replaying(Protocol):
    """A session of a zeroth-order method, whose logged steps can be applied again."""

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply a logged step without its forward passes (`ondevice replay`)."""
        ...


@runtime_checkable
class Scoring(Protocol):
    """A session that can train on a score instead of the loss."""

    def score_step(self, score: Callable[[], float], step: int, learning_rate: float) -> StepResult:
        """Run step number `step` towards better scores; a loss is 1 less the score.

        Args:
            score: of the session's weights as they are while it is called; 1 is best.
        """
        ...

    def whole_model(self) -> Any:
        """Return the `LoadedModel` as it is now, with what was trained in place, to generate text with."""
        ...


@runtime_checkable
class Writing(Protocol):
    """A session whose model generates text between steps."""

    def writing(self) -> AbstractContextManager[Any]:
        """Give the `LoadedModel` as it is now, with what was trained in place, for a block without steps."""
        ...


@runtime_checkable
class Answering(Protocol):
    """A session that generates text between steps in a runtime of its own."""

    def answer_prompt(
        self, prompt: Sequence[int], samplers: Sequence[Any], most_tokens: int
    ) -> list[list[int]]:
        """Return the tokens of each sampler's answer to one prompt.

        Args:
            samplers: each with `next(logits)`, float32 [vocab], to a token with `id` and `ends`.
        """
        ...


@runtime_checkable
class Preparing(Protocol):
    """A session that now and then prepares a step with more rows than a step has."""

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Prepare step number `step`.

        Args:
            batch_at: the batch of a step, with `ids` and `labels`; this step's and later ones may be read.
            folder: of the run.

        Returns:
            a file in `folder` that a replay needs from this step on; None if nothing was written.
        """
        ...

    def before_replay(self, step: int, folder: Path) -> None:
        """Load what `before_step` wrote before `step`, if it did.

        Raises:
            CheckpointError: the file is missing, or of another run.
        """
        ...


@runtime_checkable
class AddsToCheckpoint(Protocol):
    """A session that writes its own files next to a checkpoint's state."""

    def save_beside(self, folder: Path) -> Callable[[], dict[str, str]] | None:
        """Write into a checkpoint's folder.

        Returns:
            If other processes write their part of the state there: what waits for them, and gives the SHA-256 of
            their files by name.
        """
        ...


class HoldsState(ABC):
    """A session whose `state` gives views of memory that later steps change.

    A checkpoint is then written during the next steps: `hold` is called before them, and `written` as each array has
    been read.
    """

    @abstractmethod
    def hold(self) -> None:
        """Change nothing of the last `state` before `written` has named it."""

    @abstractmethod
    def written(self, name: str | None) -> None:
        """Release the array `name` of `state`, which has been read; None: nothing of it will be read any more."""


@runtime_checkable
class Leading(Protocol):
    """Rank 0's session of several processes."""

    def finish(self, result: Any) -> None:
        """Broadcast the run's result to the other ranks, whose `follow` returns it."""
        ...


@runtime_checkable
class Following(Protocol):
    """Another rank's session."""

    def follow(self) -> Any:
        """Compute with rank 0 until it ends, and return the value that it passed to `finish`."""
        ...


@runtime_checkable
class HasOrdinary(Protocol):
    """A session that trains another architecture than the model's, and may be able to go back."""

    @property
    def ordinary_session(self) -> OrdinaryModel | None:
        """The same weights in the ordinary architecture; None if these settings cannot go back."""
        ...


def require(session: Any, kind: type[T]) -> T:
    """Return `session` as one of a kind that not every session is.

    Raises:
        ConfigError: it is not of that kind.
    """
    if isinstance(session, kind):
        return session
    raise ConfigError(
        f"method {session.config.name} cannot do this in {session.backend}",
        expected=(kind.__doc__ or kind.__name__).partition(".")[0].lower(),
        received=f"method {session.config.name}",
    )


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


@runtime_checkable
class Seeing(Protocol):
    """A session of an artifact that takes rows with images."""

    def take_pictures(self, pictures: Any) -> None:
        """Take a run's `data.pictures.Pictures`; the exported checkpoint reads them."""
        ...


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
        """Run the same step on sequences of several rows; see `Packing.packed_step`."""
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
