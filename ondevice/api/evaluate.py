"""Evaluate a model or an artifact, and rebuild a run's adapter from its log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.open import open_artifact
from ondevice.api.runfile import RunConfig
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.files import atomic_write
from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.core.capabilities import OpensNetwork
from ondevice.core.config import path_of
from ondevice.core.errors import ArtifactError, ConfigError, DataError
from ondevice.core.registry import method, method_names, open_session
from ondevice.core.session import Evaluator
from ondevice.core.untrusted import read_json
from ondevice.data import encode, length_of, pad_id_of, read_rows
from ondevice.data.examples import refuse_preferences
from ondevice.data.readers.files import read_records
from ondevice.data.tasks.scoring import softmax
from ondevice.data.tasks.trained import label_texts
from ondevice.generation.generator import continue_ids
from ondevice.models import load_model
from ondevice.models.load import artifact_tokenizer
from ondevice.nn.adapters import apply_adapter
from ondevice.planning.devices import resolve_device
from ondevice.training.evaluate import EvalResult, evaluate_dataset
from ondevice.training.fit import adapter_identity
from ondevice.training.replay import read_run
from ondevice.training.replay import replay as replay_log
from ondevice.training.trained import adapter_folder, check_base, find_trained, task_of_adapter

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.core.method import MethodSpec
    from ondevice.data.rows import Rows
    from ondevice.data.tasks.trained import TrainedTask
    from ondevice.models import LoadedModel

ANSWER_TOKENS = 50
"""Longest generated answer of question answering (MeZO's setting)."""


def evaluate(
    source: str | Path,
    data: Path,
    *,
    task: str | None = None,
    adapter: Path | None = None,
    rows: int | None = None,
    columns: Mapping[str, str] | None = None,
    max_length_tokens: int | None = None,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "auto",
    strict_columns: bool = False,
    predictions: Path | None = None,
) -> EvalResult:
    """Evaluate a model, or an artifact in its runtime, with or without an adapter.

    An adapter or a model that records its task is evaluated with it: `task` replaces it, and `columns` only renames.
    Question answering is scored by the F1 of generated answers, which an artifact's program does not make. Rows are not
    cut unless `max_length_tokens` or the training's record says so, or the model takes no more. `predictions` is a file
    to write, a JSON line for each row.
    """
    data = path_of(data, "the data")
    opened = open_source(source, adapter, dtype, device, revision)
    if (
        opened.loaded is None
    ):  # an artifact: its buckets are fixed, and it names the task it was exported for
        task = task or (None if opened.record else opened.artifact_task)
        max_length_tokens = max(opened.session.lengths_tokens or (2,))
    record = None
    if task is None and opened.record is not None:
        record = opened.record
        if columns:
            record = record.model_copy(update={"columns": {**record.columns, **columns}})
    tokenizer = opened.tokenizer
    if record is None:
        read = read_rows(data, task=task, columns=columns)
    else:
        tokenizer = record.with_template(tokenizer)
        read = record.labelled_rows(read_records(data), str(data))
        max_length_tokens = max_length_tokens or record.max_length_tokens or None
    refuse_preferences(read)
    if opened.loaded is not None and max_length_tokens is None:
        most = opened.loaded.dims.max_positions
        max_length_tokens = length_of(read, tokenizer, percentile=100, most_tokens=most).tokens
    assert max_length_tokens is not None  # noqa: S101 - an artifact's is its buckets', a model's the rows'
    classes = 0
    if opened.loaded is not None:
        classes = opened.loaded.dims.classes
    dataset = encode(
        read,
        tokenizer,
        max_length_tokens=max_length_tokens,
        classes=classes,
        strict_columns=strict_columns,
    )
    generate = opened.write and partial(opened.write, max_new_tokens=ANSWER_TOKENS)
    result = evaluate_dataset(
        opened.session, dataset, pad_id_of(opened.tokenizer), rows=rows, generate=generate
    )
    if result is None:
        raise DataError("the evaluation was stopped")
    if predictions is not None:
        _write_predictions(predictions, result, read)
    return result


def _write_predictions(path: Path, result: EvalResult, rows: Rows) -> None:
    """Write a JSON line for each evaluated row: its label and the model's, or the generated text."""
    texts = {row.line: label_texts(row) for row in rows.items}
    lines = []
    for row in result.predictions:
        values: dict[str, Any] = {"line": row.line, "loss": row.loss}
        if row.gold is not None and row.predicted is not None:
            labels = texts[row.line]
            shares = softmax(row.scores)
            values |= {"label": labels[row.gold], "prediction": labels[row.predicted]}
            values["probability"] = shares[row.predicted]
            values["probabilities"] = dict(zip(labels, shares, strict=True))
        elif row.text is not None:
            values |= {"prediction": row.text, "f1": row.f1, "exact_match": row.exact_match}
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    atomic_write(path, "".join(lines))


@dataclass(frozen=True)
class Opened:
    """An opened source: a model or an artifact that evaluates.

    Attributes:
        session: scores labelled rows.
        tokenizer: of the model.
        loaded: the model; None for an artifact.
        write: token ids and `max_new_tokens` to greedy text; None for an artifact, whose program generates none.
        artifact_task: the task that an artifact was made for; None for other sources and without a task.
        is_network: the model has a method's own architecture, and only `write` generates.
        record: what the adapter or the model was trained to do, if that was recorded.
        adapter_sha256: of the adapter's file; None without an adapter.
    """

    session: Evaluator
    tokenizer: Any
    loaded: LoadedModel | None = None
    write: Callable[..., str] | None = None
    artifact_task: str | None = None
    is_network: bool = False
    record: TrainedTask | None = None
    adapter_sha256: str | None = None


def open_source(
    source: str | Path, adapter: Path | None, dtype: str, device: str, revision: str | None = None
) -> Opened:
    """Open a model, a network of a method's own architecture, or an artifact, and apply the adapter.

    A run's folder or an adapter opens its base model with the adapter.

    Raises:
        ConfigError: an adapter for a network that takes none, or an unknown device.
        ArtifactError, ModelError: the source or the adapter cannot be read, or they do not fit.
    """
    folder = path_of(source, "the model")
    record = digest = None
    if adapter is not None:
        adapter = adapter_folder(adapter)
        record = task_of_adapter(adapter)
    if folder.is_dir():
        trained = find_trained(source)
        if adapter is None:
            adapter = trained.adapter
            record = trained.task
        source, revision = trained.model, revision or trained.revision
        folder = Path(source)
    if adapter is not None:
        digest = adapter_identity(adapter)["adapter"]
    if (folder / MANIFEST_NAME).is_file():
        program = open_artifact(folder)
        if adapter is not None:
            check_base(record, program.manifest.model, adapter)
            program.load_adapter(load_adapter(adapter))
        named = program.manifest.task
        tokenizer = artifact_tokenizer(folder)
        return Opened(program, tokenizer, artifact_task=named, record=record, adapter_sha256=digest)
    if (trained_by := network_method(folder)) is not None:
        if adapter is not None:
            raise ConfigError(f"a network that method {trained_by.name} trained takes no adapter")
        network = trained_by.open_network(folder, resolve_device(device))
        return Opened(
            network.session,
            network.loaded.tokenizer,
            network.loaded,
            network.write,
            is_network=True,
            record=record,
        )
    loaded = load_model(str(source), revision=revision, dtype=dtype, device=resolve_device(device))
    if adapter is not None:
        check_base(record, loaded.source, adapter)
        apply_adapter(loaded, load_adapter(adapter))
    return replace(open_loaded(loaded), record=record, adapter_sha256=digest)


def open_loaded(loaded: LoadedModel) -> Opened:
    """Return a loaded model as a source; adapters that are applied to it take part."""
    # Imported here, as an artifact's runtime may do without torch and transformers.
    from ondevice.methods.model_loss import ModelSession

    session = ModelSession(loaded)
    return Opened(session, loaded.tokenizer, loaded, partial(continue_ids, loaded))


def replay(
    log: Path,
    *,
    steps: int | None = None,
    artifact: Path | None = None,
    adapter: Path | None = None,
    warn: Callable[[str], None] = lambda message: None,
) -> Adapter | None:
    """Rebuild the adapter of a zeroth-order run from its log: seed and one scalar a query.

    Args:
        log: a run's folder or its `events.jsonl`.
        steps: only the first so many.
        artifact: the program, for a run of `run_artifact`.
        adapter: the adapter that the run started from, if it did.
        warn: called with each reason why the bits may differ from the run's.
    """
    run = read_run(Path(log))
    if adapter is not None:
        adapter = adapter_folder(adapter)
    _check_start(run.header.identity.get("adapter"), adapter)
    if "artifact" in run.header.identity:
        if artifact is None:
            raise ConfigError(
                "the run was made by an exported program",
                expected="--artifact DIR",
                received="no artifact",
            )
        session = open_artifact(artifact)
        if session.manifest.files[session.manifest.program] != run.header.identity.get("artifact"):
            raise ConfigError(
                "the artifact is not the one that made this run",
                hint="use the artifact that was run",
            )
    else:
        # The head of the log has the whole run file; the device too is the run's, for the same bits.
        config = RunConfig.parse(run.header.config, f"{log}: start event")
        device = "cuda" if run.header.backend == "torch-cuda" else "cpu"
        loaded = load_model(
            config.model.source,
            revision=config.model.revision,
            dtype=config.model.dtype,
            device=resolve_device(device),
        )
        session = open_session(loaded, config.method, config.train.seed)
    if adapter is not None:
        session.load_adapter(load_adapter(adapter))
    if run.header.generator_backend not in ("", session.generator_backend):
        warn(
            f"the noise was made by {run.header.generator_backend}, here it is by {session.generator_backend}"
        )
    return replay_log(run, session, steps=steps, warn=warn)


def _check_start(recorded: str | None, adapter: Path | None) -> None:
    """Refuse a replay that does not start where the run started: its adapter would be another one."""
    if recorded is None and adapter is not None:
        raise ConfigError("the run started from no adapter", received=f"--adapter {adapter}")
    if recorded is not None and adapter is None:
        raise ConfigError(
            "the run started from an adapter",
            expected="--adapter DIR, the adapter that it started from",
        )
    if recorded is not None and adapter_identity(adapter)["adapter"] != recorded:
        raise ArtifactError(
            f"{adapter} is not the adapter that the run started from",
            expected=f"SHA-256 {recorded}",
        )


def network_method(folder: Path) -> MethodSpec | None:
    """Find the method whose own architecture a folder's network has, by the `model_type` of its config.json."""
    # Asked of any source that the user names: whatever is not a folder of ours is simply not one.
    try:
        name = read_json(folder / "config.json").get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(name, str) or name not in method_names():
        return None
    spec = method(name)
    return spec if spec.capability(OpensNetwork) else None
