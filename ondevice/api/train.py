"""Train in eager PyTorch or MLX, or through an exported program."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.inputs import Rows, read_inputs
from ondevice.api.resolve import options_of, run
from ondevice.api.runfile import RunConfig
from ondevice.artifact.files import atomic_write
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError
from ondevice.core.registry import target
from ondevice.core.session import Seeing, require
from ondevice.data.examples import refuse_preferences
from ondevice.models.load import artifact_tokenizer
from ondevice.planning.artifacts import plan_artifact
from ondevice.planning.fits import does_not_fit, memory_limit
from ondevice.training.check import check_program_run
from ondevice.training.events import Sink
from ondevice.training.fit import Trained, fit, program_identity, rows_of_program
from ondevice.training.identity import DATE, iso, recorded_decisions
from ondevice.training.notebook import NotebookSink
from ondevice.training.objective import with_objective
from ondevice.training.options import Callback, Options
from ondevice.training.progress import ProgressSink, in_notebook
from ondevice.training.rows import OpenedRows

if TYPE_CHECKING:
    from ondevice.api.inputs import Model, Run
    from ondevice.core.manifest import Manifest
    from ondevice.planning.estimate import Plan


def train(
    config: Model | Run | None = None,
    rows: Rows | None = None,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
    method: str | StrictConfig | None = None,
    rank: int | None = None,
    task: str | Path | None = None,
    out: str | Path | None = None,
    eval_rows: Rows | None = None,
    model: Model | None = None,
    tokenizer: Any = None,
    resume: bool = False,
    overwrite: bool = False,
    force: bool = False,
    adapter: str | Path | None = None,
    sinks: Iterable[Sink] = (),
    callbacks: Iterable[Callback] = (),
    progress: bool | None = None,
    **settings: Any,
) -> Trained:
    """Fine-tune a model on rows: `train(model, rows, steps=60)`, or a run: `train("run.yaml")`.

    It computes in eager PyTorch, or in MLX if `train.backend` says so.

    Args:
        config: a model of transformers or of `load_model`, or its source; or a run, its file, or
            settings by dotted key: `{"train.steps": 60}`. After the run a model in memory computes
            with what was trained; the next run takes its adapter out again.
        rows: dictionaries or texts, a `datasets.Dataset`, a DataFrame or a DataLoader, in place of
            `data.path`; or the path of a file.
        steps, epochs, learning_rate, batch_size, method, rank, task, out: settings of every day.
            Without `out` a model's run gets a new folder, `runs/NAME-1`; `Trained.out` names it.
        eval_rows: held-out rows, likewise, in place of `data.eval_path`.
        model: the model, if `config` is a run.
        tokenizer: of a model of transformers; by default the one of the model's `name_or_path`.
        resume: go on from the newest checkpoint in `out`.
        overwrite: replace the run that is there.
        force: run even if the plan says that it does not fit.
        adapter: start from this adapter, or from that of a run.
        sinks: called with every event.
        callbacks: called as the run goes, and may stop it. One that raises ends the run like
            Ctrl-C, and its error is raised here.
        progress: show the run: in the cell's output in a notebook, on stderr elsewhere. None shows
            it only in a notebook.
        settings: any other setting by its plain name (`max_length`, `seed`, `target_modules`) or
            its dotted key (`**{"train.eval_rows": 50}`).

    Raises:
        ConfigError: a setting, the model or a callback is wrong.
        DataError: no row can be used.
        DoesNotFitError: the plan needs more memory than there is.

    Under `torchrun` every process calls this with the same arguments, and returns the same.
    """
    everyday = {
        "steps": steps,
        "epochs": epochs,
        "learning_rate": learning_rate,
        "batch_size": batch_size,
        "method": method,
        "rank": rank,
        "task": task,
        "out": out,
    }
    if steps is not None and epochs is not None:
        raise ConfigError(
            "steps and epochs are both given",
            expected="one of them: how long the run is",
            received=f"steps={steps}, epochs={epochs}",
        )
    inputs = read_inputs(
        config,
        rows,
        {**everyday, **settings},
        eval_rows=eval_rows,
        model=model,
        tokenizer=tokenizer,
        resume=resume,
    )
    options = options_of(
        adapter,
        sinks,
        callbacks,
        resume=resume,
        overwrite=overwrite,
        rows=OpenedRows(inputs.config.data, inputs.rows, inputs.eval_rows),
        loaded=inputs.loaded,
    )
    inputs.config.check_data(given=inputs.rows is not None, evaluates=inputs.eval_rows is not None)
    if in_notebook() and progress is not False:
        with NotebookSink() as cell:
            trained = run(inputs.config, replace(options, sinks=(cell, *options.sinks)), force)
            cell.end(f"in {trained.adapter or trained.model or trained.out}")
        return trained
    with ProgressSink(silent=not progress) as shown:
        return run(inputs.config, replace(options, sinks=(shown, *options.sinks)), force)


def run_artifact(
    folder: Path,
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    adapter: Path | None = None,
    sinks: Iterable[Sink] = (),
    callbacks: Iterable[Callback] = (),
) -> Trained:
    """Fine-tune with an artifact in its runtime; model and method are the artifact's, the rest is `config`'s."""
    config.check_data()
    manifest = read_manifest(folder)
    opened = OpenedRows(config.data, task=manifest.task)
    settings, said = with_objective(config.train, config.method, manifest, opened)
    config = config.model_copy(update={"train": settings})
    limit = config.train.memory_limit_bytes
    recorded = recorded_decisions(config.train.out) if resume and not overwrite else {}
    decided = {DATE: recorded.get(DATE) or iso(time.time())}
    options = options_of(
        adapter,
        sinks,
        callbacks,
        resume=resume,
        overwrite=overwrite,
        rows=opened,
        said=said,
        decided=decided,
    )
    if limit is None:
        return _run_manifest(folder, manifest, config, options)
    estimate = plan_artifact(folder, manifest, limit)
    if not estimate.fits:
        raise does_not_fit(estimate)
    with memory_limit(limit, estimate):
        return _run_manifest(folder, manifest, config, options)


def check_artifact(
    folder: Path,
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    adapter: Path | None = None,
) -> Plan:
    """Plan a run of an artifact, and refuse what `run_artifact` would refuse before its program is opened.

    Raises:
        OndeviceError: as `run_artifact`, except a plan that does not fit.
    """
    config.check_data()
    manifest = read_manifest(folder)
    opened = OpenedRows(config.data, task=manifest.task)
    options = options_of(adapter, resume=resume, overwrite=overwrite, rows=opened)
    settings, _ = with_objective(config.train, config.method, manifest, opened)
    config = config.model_copy(update={"train": settings})
    check_program_run(config, manifest, _tokenizer(folder, manifest, config), options)
    return plan_artifact(folder, manifest, config.train.memory_limit_bytes)


def write_tokens(folder: Path, config: RunConfig, path: Path) -> int:
    """Write the rows of a run of an artifact as token ids, for a host without a tokenizer.

    Returns:
        Sequences written.

    Raises:
        DataError: no row can be used, or the rows are preferences.
        StorageError: the file cannot be written.
    """
    config.check_data()
    manifest = read_manifest(folder)
    opened = OpenedRows(config.data, task=manifest.task)
    refuse_preferences(opened.texts())
    options = Options(rows=opened, decided={DATE: iso(time.time())})
    rows = rows_of_program(config, manifest, artifact_tokenizer(folder), options)
    lines = [
        json.dumps({"input_ids": item.example.ids, "labels": item.example.labels}) + "\n"
        for item in rows.train.items
    ]
    atomic_write(path, "".join(lines))
    return len(lines)


def _tokenizer(folder: Path, manifest: Manifest, config: RunConfig) -> Any:
    """Load an artifact's tokenizer; blocks of a checkpoint's language model take images, too."""
    takes = manifest.program_spec.is_tower and config.train.objective == "loss"
    return artifact_tokenizer(folder, manifest.model if takes else None)


def _run_manifest(folder: Path, manifest: Manifest, config: RunConfig, options: Options) -> Trained:
    """Run `run_artifact`'s program, once the plan is known to fit."""
    session = target(manifest.target).open(folder, manifest)
    tokenizer = _tokenizer(folder, manifest, config)
    if pictures := getattr(tokenizer, "pictures", None):
        require(session, Seeing).take_pictures(pictures)
    rows = rows_of_program(config, manifest, tokenizer, options)
    identity = program_identity(manifest, config)
    return fit(
        session, rows, config, options, identity, manifest.model, seed=manifest.generator.seed
    )
