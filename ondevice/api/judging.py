"""Evaluate a model or an artifact, and rebuild a run's adapter from its log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.opening import artifact_tokenizer, open_artifact, read_dataset, resolve_device
from ondevice.api.training import adapter_identity
from ondevice.artifact.adapter import load_adapter
from ondevice.data import pad_id_of
from ondevice.errors import ArtifactError, ConfigError, DataError
from ondevice.methods.registry import open_session
from ondevice.methods.revffn.opening import continue_reversible, is_reversible, open_reversible
from ondevice.methods.session import Evaluator
from ondevice.train.evaluate import EvalResult, evaluate_dataset
from ondevice.train.replay import read_run
from ondevice.train.replay import replay as replay_log

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
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
    max_length_tokens: int = 128,
    dtype: str = "float32",
    device: str = "auto",
) -> EvalResult:
    """Evaluate a model, or an artifact in its runtime, with or without an adapter.

    Question answering is scored by the F1 of generated answers, which an artifact's program does not make.
    """
    opened = open_judged(source, adapter, dtype, device)
    if opened.loaded is None:
        task, max_length_tokens = task or opened.artifact_task, max(opened.session.lengths_tokens or (2,))
    dataset = read_dataset(data, opened.tokenizer, task=task, max_length_tokens=max_length_tokens)
    generate = None if opened.write is None else partial(opened.write, max_new_tokens=ANSWER_TOKENS)
    result = evaluate_dataset(opened.session, dataset, pad_id_of(opened.tokenizer), rows=rows, generate=generate)
    if result is None:
        raise DataError("the evaluation was stopped")
    return result


@dataclass(frozen=True)
class Judged:
    """What is judged, opened.

    Attributes:
        session: scores labelled rows.
        tokenizer: of the model.
        loaded: the model; None for an artifact.
        write: ids and `max_new_tokens` to greedy text; None for an artifact, whose program generates none.
        artifact_task: the task that an artifact was made for; None for other sources and without a task.
    """

    session: Evaluator
    tokenizer: Any
    loaded: LoadedModel | None = None
    write: Callable[..., str] | None = None
    artifact_task: str | None = None


def open_judged(source: str | Path, adapter: Path | None, dtype: str, device: str) -> Judged:
    """A model, a network that RevFFN trained, or an artifact, with the adapter applied."""
    folder = Path(source)
    if (folder / "manifest.json").is_file():
        program = open_artifact(folder)
        if adapter is not None:
            program.load_adapter(load_adapter(adapter))
        return Judged(program, artifact_tokenizer(folder), artifact_task=program.manifest.task)
    if is_reversible(folder):
        if adapter is not None:
            raise ConfigError("a network that RevFFN trained takes no adapter")
        opened = open_reversible(folder, resolve_device(device))
        return Judged(opened, opened.loaded.tokenizer, opened.loaded, partial(continue_reversible, opened))
    from ondevice.methods.whole_model import ModelSession
    from ondevice.models import load_model
    from ondevice.models.generate import continue_ids
    from ondevice.train.fuse import apply_adapter

    loaded = load_model(str(source), dtype=dtype, device=resolve_device(device))
    if adapter is not None:
        apply_adapter(loaded, load_adapter(adapter))
    return Judged(ModelSession(loaded), loaded.tokenizer, loaded, partial(continue_ids, loaded))


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
        warn: told of what may make bits differ.
    """
    run = read_run(Path(log))
    _check_start(run.header.identity.get("adapter"), adapter)
    if "artifact" in run.header.identity:
        if artifact is None:
            raise ConfigError(
                "the run was made by an exported program", expected="--artifact DIR", received="no artifact"
            )
        session = open_artifact(artifact)
        if session.manifest.files[session.manifest.program] != run.header.identity.get("artifact"):
            raise ConfigError("the artifact is not the one that made this run", hint="use the artifact that was run")
    else:
        from ondevice.api.runfile import RunConfig
        from ondevice.models import load_model

        config = RunConfig.parse(run.header.config, f"{log}: start event")
        device = "cuda" if run.header.backend == "torch-cuda" else "cpu"
        loaded = load_model(
            config.model.source, revision=config.model.revision, dtype=config.model.dtype, device=resolve_device(device)
        )
        session = open_session(loaded, config.method, config.train.seed)
    if adapter is not None:
        session.load_adapter(load_adapter(adapter))
    if run.header.generator_backend not in ("", session.generator_backend):
        warn(f"the noise was made by {run.header.generator_backend}, here it is by {session.generator_backend}")
    return replay_log(run, session, steps=steps, warn=warn)


def _check_start(recorded: str | None, adapter: Path | None) -> None:
    """A replay must start where the run started."""
    if recorded is None and adapter is not None:
        raise ConfigError("the run started from no adapter", received=f"--adapter {adapter}")
    if recorded is not None and adapter is None:
        raise ConfigError("the run started from an adapter", expected="--adapter DIR, the adapter that it started from")
    if recorded is not None and adapter_identity(adapter)["adapter"] != recorded:
        raise ArtifactError(f"{adapter} is not the adapter that the run started from", expected=f"SHA-256 {recorded}")
