"""The exporter's contract: list every problem first, then write the whole artifact or nothing; open
it; verify it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.core.manifest import Counter, Manifest, ModelInfo, ProgramSpec, Share, StateTensor
from ondevice.core.process import own_version
from ondevice.core.registry import spec_of
from ondevice.core.session import IGNORE, MOMENTS, OPTIMIZER_STEP
from ondevice.core.target import TargetSpec
from ondevice.data.tasks.record import BaseModel
from ondevice.data.tasks.trained import TASK_NAME, for_hosts, to_text

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.program import Agreement, Batch
    from ondevice.core.session import ProgramSession, Session
    from ondevice.data.examples import Dataset
    from ondevice.data.tasks.trained import TrainedTask
    from ondevice.models import LoadedModel, ModelFiles

DEFAULT_STEPS = 20
"""Training steps that `ondevice verify` compares."""
TEXT = """The harbour was quiet when the first boats came in. Rain had fallen all night, and the stones along the quay \
were dark and slippery. A woman in a yellow coat counted crates of fish while her son held the lamp. "Forty-two," she \
said, "and one for the cat." He laughed, wrote the number into a wet notebook, and looked at the sky: by noon the wind \
would turn to the north. Nobody in the town trusted the forecast on the radio. They trusted the gulls, the colour of \
the water behind the pier, and old Mr. Brandt, who had been wrong only twice in thirty years. At 7:15 the bell of the \
school rang; the boy left the lamp on a barrel, ran up the hill, and was late as always. His mother sold half of the \
catch before breakfast, kept the best of it for the inn, and spent the rest of the morning mending a net that was \
older than both of them. What she thought about, while her hands worked, she never said."""
"""The text that programs are compared on unless a user gives rows, in a model's own tokens."""


@dataclass(frozen=True)
class ExportJob:
    """All that an export needs to know."""

    model: ModelConfig
    method: Any
    export: ExportConfig
    seed: int = 0
    task: str | None = None
    overwrite: bool = False
    memory_limit_bytes: int | None = None
    rows: Dataset | None = None
    """Rows that a method may begin from."""
    trained: TrainedTask | None = None
    """How a host turns rows into prompts; None if the run names neither a task nor rows."""


@dataclass(frozen=True)
class ExportReport:
    """Facts of a written artifact, and what the check against eager measured."""

    path: Path
    target: str
    program_bytes: int
    lowering_s: float
    planned_bytes: dict[str, int]
    custom_ops: tuple[str, ...]
    check: dict[str, Any]
    warnings: tuple[str, ...]
    partition: dict[str, tuple[Share, ...]]


@dataclass(frozen=True)
class VerifyRequest:
    """Arguments of a verification.

    Attributes:
        steps: training steps to compare; `DEFAULT_STEPS` unless given.
        directions: projected gradients to compare at least, for targets that are checked by
            directions.
        perturbation_scales: scales to compare at, for the same targets.
        model: where the model is now, if not where the manifest says.
        rows: (session, tokenizer, steps) to batches of a user's rows; None: a text of ours.
    """

    steps: int | None = None
    directions: int | None = None
    perturbation_scales: tuple[float, ...] = ()
    model: str | None = None
    rows: Callable[[ProgramSession, Any, int], Iterable[Batch]] | None = None

    def batches(self, session: ProgramSession, tokenizer: Any, steps: int) -> Iterable[Batch]:
        """Return so many batches of the user's rows, or of our text."""
        if self.rows is not None:
            return self.rows(session, tokenizer, steps)
        return text_batches(session, tokenizer, steps)

    def refuse_directions(self, target: str) -> None:
        """Refuse what only a program with an NPU part is compared by."""
        if self.directions is not None or self.perturbation_scales:
            raise ConfigError(
                "directions and perturbation scales are for an NPU's program",
                expected="steps",
                received=target,
            )


class Exporter(ABC):
    """The code of a target; `TargetSpec` calls it."""

    def __init__(self, spec: TargetSpec) -> None:
        self.spec = spec

    @abstractmethod
    def check(self, job: ExportJob) -> list[str]:
        """Return every reason why `job` cannot be exported, found without loading weights; empty if
        it can."""

    @abstractmethod
    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Write the artifact to `out`, atomically.

        Raises:
            VerificationError: if the program does not do what eager does; nothing is written then.
        """

    @abstractmethod
    def open(self, folder: Path, manifest: Manifest) -> ProgramSession:
        """Return a session that runs the artifact here."""

    @abstractmethod
    def verify(self, folder: Path, manifest: Manifest, request: VerifyRequest) -> dict[str, Any]:
        """Run training steps of the artifact and of eager, and compare; `ok` by the tolerances of
        the export.

        Raises:
            ArtifactError: if the model is not the one that was exported.
            ConfigError: an argument that does not go with the target.
        """

    def program(self, method: Any) -> Any:
        """Return a method's step for this kind of target, from its settings; None if it has
        none."""
        return spec_of(method).program(self.spec.kind)

    def no_program(self, method: Any) -> str:
        """Return the reason why a method without a step for this kind of target is refused."""
        return f"method {method.name} does not export to {self.spec.name}"


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse a place that cannot be written before minutes are spent on a program."""
    if out.exists() and not out.is_dir():
        raise ArtifactError(
            f"{out} is a file", expected="a folder or a free name", hint="choose another name"
        )
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ArtifactError(
            f"{out} is not empty", hint="choose another folder, or pass --overwrite"
        )
    if not (out / MANIFEST_NAME).is_file():
        raise ArtifactError(
            f"{out} is not an artifact and is not replaced",
            expected=MANIFEST_NAME,
            received=min(p.name for p in out.iterdir()),
            hint="choose another folder, or empty this one yourself",
        )


def size_problems(job: ExportJob, dims: ModelDims) -> list[str]:
    """Return settings that the model's dimensions stand against, for any target.

    Raises:
        OndeviceError: a linear layer that the model does not have.
    """
    problems = []
    longest = max(job.export.lengths_tokens)
    top_layers = getattr(job.method, "top_layers", None)
    if top_layers is not None and top_layers > dims.layers:
        problems.append(f"top_layers is {top_layers} and the model has {dims.layers} layers")
    if longest > dims.max_positions:
        problems.append(
            f"lengths_tokens {longest} exceeds the model's {dims.max_positions} positions"
        )
    return problems


def step_bytes(
    dims: ModelDims, method: Any, batch_size: int, length_tokens: int, activation_bytes: int
) -> int:
    """Return bytes of a step in addition to weights and adapter."""
    parts = spec_of(method).memory().step(dims, method, batch_size, length_tokens, activation_bytes)
    return sum(size for part, size in parts.items() if part not in ("adapter", "optimizer"))


def name_state(spec: ProgramSpec, session: Session, first: str | None = None) -> ProgramSpec:
    """Return `spec` with the state tensors and the counter of a session that has made a step.

    Args:
        first: the safetensors file of the artifact that holds the adapter's first value; None if
            the session draws it from the seed.
    """
    arrays = session.state()
    vectors = {name: array for name, array in arrays.items() if array.dtype == np.float32}
    optimizer = {name for name in vectors if name.partition("/")[0] in MOMENTS}
    state = []
    for name, array in vectors.items():
        values: dict[str, Any] = {"role": "adapter", "first": first}
        if name in optimizer:
            values = {"role": "optimizer"}
        state.append(StateTensor(name=name, dtype="float32", shape=array.shape, **values))
    counters = ()
    if OPTIMIZER_STEP in arrays:
        counters = (Counter(name=OPTIMIZER_STEP, counts="updates"),)
    size = sum(array.size for name, array in vectors.items() if name not in optimizer)
    return spec.model_copy(
        update={"state": tuple(state), "counters": counters, "adapter_size": size}
    )


def describe(
    spec: TargetSpec, job: ExportJob, model: LoadedModel | ModelFiles, runtime: str, **fields: Any
) -> Manifest:
    """Return a manifest without its check and its files' hashes.

    Args:
        runtime: name of the package that runs it.
        fields: of `Manifest`, those that are the target's own.
    """
    template = getattr(model.tokenizer, "chat_template", None)
    backend: Any = getattr(model.tokenizer, "backend_tokenizer").to_str()  # noqa: B009 - not in its base class
    values = {
        "ondevice_version": own_version(),
        "runtime": f"{runtime} {version(runtime)}",
        "target": spec.name,
        "method": job.method.model_dump(mode="json"),
        "model": ModelInfo(
            source=job.model.source,
            revision=job.model.revision,
            sha256=model.source.sha256,
            dims=asdict(model.dims),
        ),
        "quantize": job.export.quantize,
        "lengths_tokens": tuple(sorted(job.export.lengths_tokens)),
        "batch_size": job.export.batch_size,
        "eval_batch_size": job.export.eval_batch_size,
        "tokenizer_sha256": sha256(backend.encode()).hexdigest(),
        "chat_template_sha256": sha256(template.encode()).hexdigest() if template else None,
        "task": job.task,
    }
    return Manifest(**(values | fields))


def write_task(job: ExportJob, model: LoadedModel | ModelFiles, folder: Path) -> None:
    """Write the record of the job's task, by which a host asks as the run's file says."""
    if job.trained is None:
        return
    base = BaseModel(
        source=job.model.source, revision=job.model.revision, sha256=model.source.sha256
    )
    record = for_hosts(job.trained).model_copy(update={"base_model": base})
    (folder / TASK_NAME).write_text(to_text(record), encoding="utf-8")


def random_batches(session: ProgramSession, vocabulary: int, steps: int) -> Iterator[Batch]:
    """Yield random token ids in every bucket, with some labels masked."""
    random = np.random.default_rng(0)
    answers = np.array(session.manifest.method.get("answers") or (), np.int64)
    limit = 1 if answers.size else session.manifest.method.get("labelled_tokens")
    for step in range(steps):
        length = session.lengths_tokens[step % len(session.lengths_tokens)]
        ids = random.integers(0, vocabulary, (session.batch_size, length))
        labels = np.where(random.random(ids.shape) < 0.5, ids, IGNORE)
        labels[:, -1] = ids[:, -1]
        if limit is not None:  # the last so many of a row
            labels[np.cumsum((labels != IGNORE)[:, ::-1], 1)[:, ::-1] > limit] = IGNORE
        if answers.size:  # no other label has a loss
            labels = np.where(labels == IGNORE, IGNORE, random.choice(answers, ids.shape))
        yield ids, labels


def text_batches(session: ProgramSession, tokenizer: Any, steps: int) -> Iterator[Batch]:
    """Yield rows of `TEXT` in every bucket, each from another place, with some labels masked.

    A model that was trained on text is far from its data with random tokens, and float32's own
    rounding is in the way there: on SmolLM2, random tokens moved autograd's gradients by 4e-3 of
    float64's, these rows by 1e-5.
    """
    vocabulary = session.manifest.model.dims["vocab"]
    tokens = np.array(tokenizer(TEXT)["input_ids"], np.int64)
    if (
        tokens.size == 0 or tokens.max() >= vocabulary
    ):  # a tokenizer of another model, as a test's may be
        yield from random_batches(session, vocabulary, steps)
        return
    for step, (ids, labels) in enumerate(random_batches(session, vocabulary, steps)):
        rows = np.arange(ids.shape[0])[:, None] * 37 + np.arange(ids.shape[1]) + step * 11
        text = tokens[rows % tokens.size]
        answered = bool(session.manifest.method.get("answers"))
        yield text, np.where(labels == IGNORE, IGNORE, labels if answered else text)


def beyond(
    agreement: Agreement, largest: Mapping[str, float], least: Mapping[str, float] | None = None
) -> list[Any]:
    """Return (expected, received) of every tolerance that is not kept, in words; NaN keeps none.

    Args:
        largest: by kind of error; a kind that has none is not judged.
        least: of `agreement.shares`.
    """
    wanted = [
        (f"{kind} error", value, largest[kind])
        for kind, value in agreement.errors.items()
        if kind in largest
    ]
    violations = [
        (f"{what} <= {limit:g}", f"{value:.3g}")
        for what, value, limit in wanted
        if not value <= limit
    ]
    for kind, limit in (least or {}).items():
        if not (value := agreement.shares[kind]) >= limit:
            violations.append((f"{kind} >= {limit:g}", f"{value:.3g}"))
    return violations


def check_model(model: LoadedModel | ModelFiles, source: str, manifest: Manifest) -> None:
    """Refuse a model that is not the one that was exported."""
    if model.source.sha256 != manifest.model.sha256:
        raise ArtifactError(
            f"{source} is not the model that was exported",
            expected=manifest.model.sha256,
            received=model.source.sha256,
            hint="--model says where the exported model is",
        )
