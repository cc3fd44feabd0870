"""Train in eager PyTorch or MLX, or through an exported program."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.inputs import Rows, read_inputs
from ondevice.api.runfile import RunConfig
from ondevice.artifact.manifest import read_manifest
from ondevice.core.capabilities import DecidesFromMemory, OwnPrecision
from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError, Need
from ondevice.core.registry import naming_methods, target
from ondevice.models import read_dims
from ondevice.models.choice import trains
from ondevice.models.load import artifact_tokenizer
from ondevice.nn.adapters import has_adapter
from ondevice.planning.advice import measure
from ondevice.planning.artifacts import plan_artifact
from ondevice.planning.devices import place
from ondevice.planning.estimate import fits_here, plan_run
from ondevice.planning.fits import ensure_fits, memory_limit
from ondevice.planning.precision import with_precision
from ondevice.training import choices
from ondevice.training.callbacks import Callback
from ondevice.training.check import check_program_run, check_run
from ondevice.training.events import Sink
from ondevice.training.fit import Options, Trained, fit, read_rows_of, train_model
from ondevice.training.identity import (
    DATE,
    LENGTH,
    METHOD_NAME,
    date_of,
    iso,
    placement_of,
    recorded_decisions,
    with_decisions,
    with_placement,
)
from ondevice.training.length import with_length_of
from ondevice.training.notebook import NotebookSink, in_notebook
from ondevice.training.objective import SCORES
from ondevice.training.preferences import with_objective
from ondevice.training.progress import ProgressSink
from ondevice.training.trained import adapter_folder

if TYPE_CHECKING:
    from ondevice.api.inputs import Model, Run
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import Manifest
    from ondevice.core.method import Placement
    from ondevice.models import LoadedModel
    from ondevice.planning.estimate import Plan

log = logging.getLogger("ondevice.planning")
ADAPTER_TAKEN_OUT = (
    "the adapter of an earlier run is taken out of the model; adapter=RUN would go on from it"
)


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
    adapter, sinks, callbacks = _checked(adapter, sinks, callbacks)
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
    options = Options(
        resume=resume,
        overwrite=overwrite,
        adapter=adapter,
        sinks=sinks,
        callbacks=callbacks,
        rows=inputs.rows,
        eval_rows=inputs.eval_rows,
        loaded=inputs.loaded,
    )
    inputs.config.check_data(given=inputs.rows is not None, evaluates=inputs.eval_rows is not None)
    if in_notebook() and progress is not False:
        with NotebookSink() as cell:
            trained = _train(inputs.config, replace(options, sinks=(cell, *sinks)), force)
            cell.end(f"in {trained.adapter or trained.model or trained.out}")
        return trained
    with ProgressSink(silent=not progress) as shown:
        return _train(inputs.config, replace(options, sinks=(shown, *sinks)), force)


@dataclass(frozen=True)
class Decided:
    """A run with nothing left open: its settings, its place on this machine, its options and its plan.

    Attributes:
        recorded: what the run that is resumed decided; empty for a new one.
    """

    config: RunConfig
    placement: Placement
    options: Options
    plan: Plan
    recorded: dict[str, Any]


def _train(config: RunConfig, options: Options, force: bool) -> Trained:
    """Decide what a run leaves open, plan it, and train."""
    with naming_methods(partial(trains, config=config)):
        decided = _decide(config, options)
        ensure_fits(decided.plan, force)
        limit = decided.config.train.memory_limit_bytes
        with (
            nullcontext() if limit is None else memory_limit(limit, decided.plan),
            choices.threads(decided.placement, decided.recorded) as threads,
        ):
            options = replace(decided.options, decided=decided.options.decided | threads)
            return train_model(decided.config, decided.placement, options)


def check(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    adapter: str | Path | None = None,
) -> Decided:
    """Decide what a run leaves open and plan it; refuse what `train` would refuse, except a plan that does not fit.

    Nothing is written, and the model's weights are not loaded.

    Raises:
        OndeviceError: as `train`.
    """
    folder, _, _ = _checked(adapter, (), ())
    config.check_data()
    with naming_methods(partial(trains, config=config)):
        decided = _decide(config, Options(resume=resume, overwrite=overwrite, adapter=folder))
        check_run(decided.config, decided.placement, decided.options)
    return decided


def _decide(config: RunConfig, options: Options) -> Decided:
    """Decide what a run leaves open, and plan it."""
    train_rows, loaded = options.rows, options.loaded
    resumes = options.resume and not options.overwrite
    recorded = recorded_decisions(config.train.out) if resumes else {}
    decided: dict[str, Any] = {}
    if config.chosen:
        decided[METHOD_NAME] = config.method.name
    decided[DATE] = recorded.get(DATE) or iso(time.time())
    if recorded:
        config = with_decisions(config, choices.usable(recorded, config))
    config = config.for_training()
    size = train_rows and train_rows.batch_size
    if size and "batch_size" not in config.train.model_fields_set:
        loop = config.train.model_copy(update={"batch_size": size})
        config = config.model_copy(update={"train": loop})
    placement = place(config)
    decided |= choices.machine_choices(config, placement)
    _check_method(config, placement, loaded)
    config, said = with_objective(config, placement.backend, train_rows)
    if own := placement.spec.capability(OwnPrecision):
        config, messages = _with_precision(config, placement, own, decided)
    else:
        messages = placement.precision(config.model.dtype)
    notes: tuple[str, ...] = ()
    if config.data.max_length_tokens is None:
        dims = loaded and loaded.dims
        config, notes = with_length_of(
            config,
            train_rows,
            options.eval_rows,
            loaded,
            date_of(decided),
            partial(fits_here, placement=placement, dims=dims),
        )
        decided[LENGTH] = config.data.max_length_tokens
    messages = [*said, *messages]
    if config.chosen:
        messages = [config.chosen, *messages]
    if loaded is not None and has_adapter(loaded.model):
        messages = [*messages, ADAPTER_TAKEN_OUT]
    placed = with_placement(config, recorded) if recorded else None
    plan = _plan(config, placement, loaded and loaded.dims, placed)
    resolved = None
    if placement.spec.capability(DecidesFromMemory):
        resolved = plan.request.method
        messages += filter(None, [plan.request.why])
        decided |= placement_of(config, resolved)
    kernels = choices.kernels_of(config.method, placement, recorded)
    decided |= {choices.KERNELS: kernels} if kernels else {}
    options = replace(
        options,
        notes=notes,
        said=tuple(messages),
        resolved=resolved,
        kernels=kernels,
        decided=decided,
    )
    return Decided(config, placement, options, plan, recorded)


def _check_method(config: RunConfig, placement: Placement, loaded: LoadedModel | None) -> None:
    """Refuse what the run asks for and its method cannot do.

    Raises:
        ConfigError: a score without a zeroth-order method, a model in memory for a method that reads files, or packed
            rows that would not be kept apart.
    """
    spec = placement.spec
    objective = config.train.objective
    if objective in SCORES and spec.order != "zeroth":
        raise ConfigError(
            f"method {spec.name} needs a gradient, and a score has none",
            expected=f"a zeroth-order method for train.objective {objective}",
            received=f"method {spec.name}",
            hint="train.objective loss works with every method",
            needs=Need.ZEROTH_ORDER,
        )
    if loaded is not None and spec.reads_files(config.method, placement.backend):
        raise ConfigError(
            f"method {spec.name} reads the weights from files here, and the model is in memory",
            expected="--backend torch, method.weight_placement: resident",
            received=placement.backend,
            hint="save_pretrained it, and give the folder as model.source",
        )
    if not config.data.packing:
        return
    dims = loaded.dims if loaded else read_dims(config.model.source, config.model.revision)
    spec.check_packing(placement.backend, dims.whole)
    if dims.classes:
        raise ConfigError(
            "an encoder takes one row a sequence", received="data.packing", hint="leave it out"
        )


def _plan(
    config: RunConfig, placement: Placement, dims: ModelDims | None, placed: RunConfig | None
) -> Plan:
    """Plan a run; on a GPU, `auto` settings first need its rates, which takes some seconds.

    Args:
        placed: the same run with settings that were decided before, which hold if it still fits.
    """
    if placed is not None:
        plan = plan_run(placed, placement, dims)
        if plan.fits:
            return plan
        log.warning("the placement that this run began with no longer fits: it is decided again")
    plan = plan_run(config, placement, dims)
    decides = plan.request.method != config.method
    if decides and placement.device == "cuda" and placement.world == 1:
        plan = plan_run(config, placement, dims, measure(plan))
    return plan


def _with_precision(
    config: RunConfig, placement: Placement, own: OwnPrecision, decided: dict[str, Any]
) -> tuple[RunConfig, list[str]]:
    """Return the run file with its method's own precision, and messages; a choice is added to `decided`."""
    is_open = own.setting not in config.method.model_fields_set
    config, messages = with_precision(config, placement)
    if is_open:
        decided[f"method.{own.setting}"] = getattr(config.method, own.setting)
    return config, messages


def _checked(
    adapter: Any, sinks: Any, callbacks: Any
) -> tuple[Path | None, tuple[Sink, ...], tuple[Callback, ...]]:
    """Return what a run is given beside its settings; ConfigError for another type. A callback's is looked at later."""
    lists = {"sinks": sinks, "callbacks": callbacks}
    for name, value in lists.items():
        if not isinstance(value, Iterable) or isinstance(value, str):
            raise ConfigError(
                f"{name} are of the wrong type",
                expected="a list of them",
                received=type(value).__name__,
            )
        lists[name] = tuple(value)
    for sink in lists["sinks"]:
        if not callable(sink):
            received = type(sink).__name__
            raise ConfigError(
                "a sink is of the wrong type", expected="a function of an event", received=received
            )
    return (
        None if adapter is None else adapter_folder(adapter),
        lists["sinks"],
        lists["callbacks"],
    )


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
    adapter, sinks, callbacks = _checked(adapter, sinks, callbacks)
    config.check_data()
    manifest = read_manifest(folder)
    limit = config.train.memory_limit_bytes
    recorded = recorded_decisions(config.train.out) if resume and not overwrite else {}
    decided = {DATE: recorded.get(DATE) or iso(time.time())}
    options = Options(resume, overwrite, adapter, sinks, callbacks, decided=decided)
    if limit is None:
        return _run_manifest(folder, manifest, config, options)
    estimate = plan_artifact(folder, manifest, limit)
    ensure_fits(estimate)
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
    start, _, _ = _checked(adapter, (), ())
    config.check_data()
    manifest = read_manifest(folder)
    check_program_run(
        config, manifest, artifact_tokenizer(folder), Options(resume, overwrite, start)
    )
    return plan_artifact(folder, manifest, config.train.memory_limit_bytes)


def _run_manifest(folder: Path, manifest: Manifest, config: RunConfig, options: Options) -> Trained:
    """Run `run_artifact`'s program, once the plan is known to fit."""
    session = target(manifest.target).open(folder, manifest)
    tokenizer = artifact_tokenizer(folder)
    length = max(manifest.lengths_tokens)
    vocabulary = manifest.model.dims.get("vocab")
    rows = read_rows_of(
        config.data,
        tokenizer,
        length,
        config.train.seed,
        task=manifest.task,
        options=options,
        vocabulary=vocabulary,
    )
    identity = {
        "artifact": manifest.files[manifest.program],
        "learning_rate": config.method.learning_rate,
    }
    return fit(
        session, rows, config, options, identity, manifest.model, seed=manifest.generator.seed
    )
