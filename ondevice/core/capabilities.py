"""What a training method can do that not every method can: one small class for each ability.

A method lists its capabilities in `MethodSpec.capabilities`; `spec.capability(Packs)` returns its `Packs` or None. A
new capability is a new class here, or in the package that asks for it: no other method changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.session import Evaluator

C = TypeVar("C")
"""A method's settings."""


class Capability:
    """Base of all capabilities."""


@dataclass(frozen=True)
class Packs(Capability):
    """Its sessions in `backends` are `Packing`: one sequence may hold several rows."""

    backends: tuple[str, ...]


@dataclass(frozen=True)
class AnyDecoder(Capability):
    """It takes decoders with unknown blocks, because it computes no block itself.

    Attributes:
        tries: it does run their blocks one by one, and learns when it opens whether it can.
    """

    tries: bool = False


@dataclass(frozen=True)
class KnowsBlocks(Capability):
    """Its passes know only some models' blocks; only the choice of a default method asks."""

    knows: Callable[[ModelDims], bool]


@dataclass(frozen=True)
class Classifies(Capability):
    """It trains an encoder with a classification head (`ModelDims.classes`)."""


@dataclass(frozen=True)
class Ranked(Capability):
    """Several processes can train together, under `torchrun`: `Leading` and `Following` sessions."""


@dataclass(frozen=True)
class LearnsPreferences(Capability):
    """Its sessions are `Weighing` or, of zeroth order, `Scoring`: they learn from pairs and rated answers.

    Attributes:
        backends: of sessions over a model.
        programs: kinds of targets whose programs do, too.
    """

    backends: tuple[str, ...]
    programs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Writes(Capability):
    """Its sessions are `Writing` or `Answering`: they learn from rewards of their own answers.

    Attributes:
        backends: of sessions over a model.
        programs: kinds of targets whose programs do, if they are exported to answer.
    """

    backends: tuple[str, ...] = ("torch",)
    programs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replays(Capability):
    """A run can be rebuilt from its log, the seed and one number a query: `Replaying` sessions."""


@dataclass(frozen=True)
class OwnPrecision(Capability):
    """A setting of the method, not `model.dtype`, says in which numbers it computes."""

    setting: str


@dataclass(frozen=True)
class HalfOnGpu(Capability):
    """On a GPU it takes a model in bfloat16 unless `model.dtype` is named."""


@dataclass(frozen=True)
class Quantises(Capability, Generic[C]):
    """It packs the model's weights itself, so that they are loaded on the host, `when` its settings say so."""

    when: Callable[[C], bool]


@dataclass(frozen=True)
class ReadsFiles(Capability, Generic[C]):
    """A torch session reads the weights from their files itself, `when` its settings say so."""

    when: Callable[[C], bool]


@dataclass(frozen=True)
class TrainingDefaults(Capability, Generic[C]):
    """Defaults that depend on other settings.

    Attributes:
        settings: its settings for training in eager PyTorch, with `auto` decided.
        schedule: the learning-rate schedule of a run that names none; None for the loop's own.
    """

    settings: Callable[[C], C]
    schedule: Callable[[C], str | None]


@dataclass(frozen=True)
class Asked(Generic[C]):
    """What a run asks of its method, known before a weight is loaded.

    Attributes:
        config: the method's settings.
        model: its source, for messages.
        dtype: `model.dtype`.
        rows: of a step.
    """

    config: C
    dims: ModelDims
    model: str
    dtype: str
    backend: str
    device: str
    rows: int


@dataclass(frozen=True)
class Refuses(Capability, Generic[C]):
    """Its sessions refuse some models or settings; `check` raises the same without the model's weights."""

    check: Callable[[Asked[C]], None]


@dataclass(frozen=True)
class OpenedNetwork:
    """A network that transformers cannot open by itself, opened by the method that trained it.

    Attributes:
        session: evaluates rows.
        loaded: the ordinary model around it, with its tokenizer.
        write: (token ids, max_new_tokens) to greedy text.
    """

    session: Evaluator
    loaded: Any
    write: Callable[[Sequence[int], int], str]


@dataclass(frozen=True)
class OpensNetwork(Capability):
    """Transformers cannot open the model it trains; `open(folder, device)` does.

    The folder's config.json has the method's name as its `model_type`.
    """

    open: Callable[[Path, str], OpenedNetwork]


@dataclass(frozen=True)
class Offloads(Capability):
    """It keeps the model in host memory and brings parts of it to the device that computes.

    Attributes:
        lanes: (request, rates, rows, flops) to the seconds that each lane of a step takes; `request` and `rates` are
            those of `planning.advice`.
        step_s: (request, rates or None) to the seconds of a step on an accelerator, and the lane that bounds it; None:
            the plan's own estimate does.
    """

    lanes: Callable[[Any, Any, int, float], dict[str, float]]
    step_s: Callable[[Any, Any], tuple[float, str]] | None = None


@dataclass(frozen=True)
class DrivesLoops(Capability):
    """Its engine serves a training loop of one's own.

    Attributes:
        opener: returns what takes (model, config, device, names of undecayed parameters) to the engine.
    """

    opener: Callable[[], Callable[..., Any]]


@dataclass(frozen=True)
class Advises(Capability):
    """It recommends settings: (plan, rates, plan_of); see `planning.advice`."""

    recommend: Callable[[Any, Any, Callable[[Any], Any]], dict[str, Any]]


@dataclass(frozen=True)
class DecidesFromMemory(Capability):
    """It decides settings that are `auto` from the device's memory and rates. Results do not depend on them.

    Attributes:
        resolve: (request, measured rates or None, usable bytes of the host or None) to the settings, and the reason
            in a sentence.
    """

    resolve: Callable[[Any, Any, int | None], tuple[Any, str]]
