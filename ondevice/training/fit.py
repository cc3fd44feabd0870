"""One run from its parts: load the model, read the rows, open the session, step through the loop, save the result.

`train_model` does all of it in eager PyTorch or MLX, `fit` the part that an artifact's program has in common with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ondevice.artifact.adapter import (
    MLX_LM_WEIGHTS_NAME,
    WEIGHTS_NAME,
    Adapter,
    is_mlx_lm,
    load_adapter,
    save_adapter,
)
from ondevice.artifact.adapter_fit import check_base_weights
from ondevice.artifact.files import atomic_directory, sha256_file
from ondevice.core.capabilities import Asked
from ondevice.core.errors import ConfigError
from ondevice.core.session import Following, HasOrdinary, Leading, Scoring, require
from ondevice.data.tasks.record import BaseModel, refuse_other_labels
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask, to_text
from ondevice.models import load_model, open_model
from ondevice.models.save import add_ends
from ondevice.models.sources.resolve import PACKAGE_PREFIX, is_in_memory
from ondevice.nn.adapters import apply_adapter, take_out
from ondevice.training import events
from ondevice.training.checkpoint import read_state
from ondevice.training.evaluate import EvalResult, evaluate_dataset
from ondevice.training.identity import (
    ENCODED,
    data_identity,
    date_of,
    environment,
)
from ondevice.training.loggers import open_reports
from ondevice.training.loop import Run, StopRequest
from ondevice.training.metrics import RunResult
from ondevice.training.objective import (
    check_pictures,
    check_rows,
    objective_of,
    texts_of_row,
)
from ondevice.training.options import Options
from ondevice.training.ordinary import compare, save_ordinary
from ondevice.training.policy import GRPO_SETTINGS, Policy, PromptBatches
from ondevice.training.preferences import PreferenceBatches, Preferences
from ondevice.training.result import Trained
from ondevice.training.rewards import records_of
from ondevice.training.rows import OpenedRows, RunRows, read_rows_of, vocabulary_of
from ondevice.training.schedule import WarmupDecay
from ondevice.training.scores import Score
from ondevice.training.trained import (
    ADAPTER,
    BEST_ADAPTER,
    MODEL,
    check_base,
    notes_of_labels,
    remember_task,
    task_of_adapter,
)
from ondevice.training.usage import README_NAME, Kind, readme

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import DataConfig, TrainConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import Manifest
    from ondevice.core.method import Placement
    from ondevice.core.session import Session
    from ondevice.data import Batches
    from ondevice.models import LoadedModel

ORDINARY = "model-ordinary"
"""A run's folder for its weights in the ordinary architecture."""
WINDOWS_FILE = "stream.json"
"""File of a run for the counts of a streamed file's windows."""


def train_model(config: RunConfig, placement: Placement, options: Options) -> Trained:
    """Fine-tune in eager PyTorch or MLX, once it is known that it fits.

    Under `torchrun` rank 0 reads the data and writes; the others compute with it, and return the same.
    """
    source = config.model
    spec = placement.spec
    wanted: dict[str, Any] = {"revision": source.revision, "dtype": source.dtype}
    if options.loaded is not None:
        loaded = options.loaded
    elif spec.reads_files(config.method, placement.backend):
        loaded = open_model(source.source, **wanted, packed=placement.backend == "mlx")
    else:
        where = spec.load_device(config.method, placement.device)
        loaded = load_model(source.source, **wanted, device=where, classes=source.classes)

    def open_session(method: Any) -> Session:
        if options.kernels is not None:
            method = method.model_copy(update={"kernels": options.kernels})
        return spec.open_session(
            loaded, method, config.train.seed, placement.device, placement.backend
        )

    if placement.rank:
        session = open_session(options.resolved or config.method)
        with StopRequest():  # a signal is for rank 0, which ends the running step and saves
            return require(session, Following).follow()
    # The rows come before the session: a mistake in them is reported before memory is taken.
    config, rows = with_rows(
        config, placement, options, loaded.tokenizer, loaded.dims, vocabulary_of(loaded)
    )
    if rows.stream is not None:
        rows.stream.label_tokens = frozenset(getattr(config.method, "answers", ()))
    if options.loaded is not None:
        take_out(options.loaded.model)
    session = open_session(options.resolved or config.method)
    identity = {"method": config.method.model_dump(mode="json"), "dtype": source.dtype}
    with _giving_back(session, options.loaded):
        trained = fit(session, rows, config, options, identity, loaded.source, saves_model=True)
    if placement.world > 1:
        require(session, Leading).finish(trained)
    return trained


def with_rows(
    config: RunConfig,
    placement: Placement,
    options: Options,
    tokenizer: Any,
    dims: ModelDims,
    vocabulary: int,
) -> tuple[RunConfig, RunRows]:
    """Read and encode the rows of a run; return the run with their answers, and the rows.

    Args:
        vocabulary: rows of the model's embedding.

    Raises:
        OndeviceError: the objective cannot use the rows, or the method refuses the run.
    """
    length = config.data.max_length_tokens
    assert length is not None  # noqa: S101  `api.resolve` has taken it from the data
    rows = read_rows_of(
        options.rows or OpenedRows(config.data),
        tokenizer,
        length,
        config.train.seed,
        when=date_of(options.decided),
        classes=dims.classes,
        vocabulary=vocabulary,
        preferences=True,
    )
    check_rows(config.train, rows, dims.max_positions)
    check_pictures(config.train.objective, placement, rows.tokenizer)
    method = with_answers(config.train, config.method, rows)
    asked: Asked[Any] = Asked(
        method,
        dims,
        config.model.source,
        config.model.dtype,
        placement.backend,
        placement.device,
        config.train.batch_size,
    )
    placement.spec.check_run(asked)
    return config.model_copy(update={"method": method}), rows


def rows_of_program(
    config: RunConfig, manifest: Manifest, tokenizer: Any, options: Options
) -> RunRows:
    """Read and encode the rows of an exported program's run; errors are those of `with_rows`."""
    rows = read_rows_of(
        options.rows or OpenedRows(config.data, task=manifest.task),
        tokenizer,
        max(manifest.lengths_tokens),
        config.train.seed,
        when=date_of(options.decided),
        vocabulary=manifest.model.dims.get("vocab"),
        preferences=True,
    )
    check_rows(config.train, rows, manifest.written_tokens or max(manifest.lengths_tokens))
    answers = tuple(manifest.method.get("answers") or ())
    if rows.stream is not None:
        rows.stream.label_tokens = frozenset(answers)
    refuse_other_labels(rows.train, answers)
    refuse_other_labels(rows.evaluation, answers)
    return rows


@contextmanager
def _giving_back(session: Session, loaded: LoadedModel | None) -> Iterator[None]:
    """Give a model in memory its own layers back if the block fails."""
    try:
        yield
    except BaseException:
        if loaded is not None and session.adapter() is not None:
            session.release_model()
        raise


def with_answers(train: TrainConfig, method: Any, rows: RunRows) -> Any:
    """Return the method's settings with the answers of its rows, if its loss is over them."""
    # Likelihoods of preferences and answers are over the whole vocabulary.
    if objective_of(train) is not None or train.objective == "grpo":
        return method
    method = method.with_answers(rows.label_tokens)
    if answers := getattr(method, "answers", ()):
        refuse_other_labels(rows.evaluation, answers)
    return method


def run_identity(
    data: DataConfig, settings: TrainConfig, rows: RunRows, options: Options
) -> dict[str, Any]:
    """Return what a resumed run must have in common with the run, in addition to its method and model."""
    identity: dict[str, Any] = {
        "data": data_identity(data, settings.batch_size, rows.sha256),
        ENCODED: rows.encoded,
        **adapter_identity(options.adapter),
    }
    if settings.objective != "loss":
        identity["objective"] = settings.objective
        identity["objective_command"] = settings.objective_command
    if settings.objective == "grpo":
        identity |= {name: getattr(settings, name) for name in GRPO_SETTINGS}
    made = objective_of(settings)
    if made is not None:
        identity |= asdict(made)
    return identity


def fit(
    session: Session,
    rows: RunRows,
    config: RunConfig,
    options: Options,
    identity: dict[str, Any],
    model: Any,
    *,
    seed: int | None = None,
    saves_model: bool = False,
) -> Trained:
    """Train an open session on `rows`, and save the adapter or the model.

    Args:
        identity: what identifies this run, in addition to data and adapter; a resume must have the same.
        model: names the base model, by `source` and `sha256`.
        seed: of the log's head; the run file's unless given.
        saves_model: a model was loaded whole, so a method that trains all of it can write it.
    """
    made = objective_of(config.train)
    size = session.batch_size
    if size is not None:
        size //= texts_of_row(config.train)
    batches = rows.batches(config.train, config.data, size, session.lengths_tokens)
    settings = in_steps(config.train, batches.steps_per_epoch)
    config = config.model_copy(update={"train": settings})
    before = model_before(model, identity, options.adapter)
    identity = identity | run_identity(config.data, settings, rows, options)
    # The head of the log names all that a resume must have in common with the run.
    if options.adapter is not None:
        before_it = task_of_adapter(options.adapter)
        check_base(before_it, model, options.adapter)
        start_from = load_adapter(options.adapter)
        check_base_weights(start_from, config.method)
        session.load_adapter(start_from)
    figures = {"train": rows.figures()}
    figures["train"]["notes"] += options.notes
    if options.adapter is not None:
        figures["train"]["notes"] += notes_of_labels(before_it, rows.train.labels.values())
    if rows.evaluation is not None:
        figures["evaluation"] = rows.evaluation.figures()
    start = events.Start(
        config=config.model_dump(mode="json"),
        identity=identity,
        seed=settings.seed if seed is None else seed,
        backend=session.backend,
        generator_backend=session.generator_backend,
        model_source=model.source,
        model_sha256=model.sha256,
        said=list(options.said),
        decided=options.decided,
        environment=environment(),
        data=figures,
    )
    if rows.stream is not None:
        windows = {**start.identity["data"], **rows.encoded}
        rows.stream.keep(settings.out / WINDOWS_FILE, windows, recall=options.resume)
    evaluated = rows.evaluation or rows.train
    preferences = None
    if settings.objective == "grpo":
        given = options.rows or OpenedRows(config.data)
        records = others = records_of(given.rows, config.data.path)
        if not config.data.validation_split:
            others = records_of(given.eval_rows, config.data.eval_path)
        parts = (records, others)
        preferences = Policy(settings, rows.train, rows.evaluation, rows.pad, parts, rows.tokenizer)
        batches = PromptBatches(preferences, cast("Batches", batches))
    if made is not None:
        preferences = Preferences(made, rows.train, rows.evaluation, rows.pad, before)
        batches = PreferenceBatches(preferences, cast("Batches", batches))

    reports = None
    if settings.report_to:
        reports = open_reports(settings.report_to, settings.out, start.config)

    def evaluate_now(should_stop: Callable[[], bool]) -> EvalResult | None:
        if preferences is not None:
            return preferences.evaluate(session, settings.eval_rows, should_stop)
        return evaluate_dataset(
            session, evaluated, rows.pad, rows=settings.eval_rows, should_stop=should_stop
        )

    score = None
    if settings.objective != "loss" and preferences is None:
        require(session, Scoring)
        score = Score(settings, session, rows.train, rows.pad)
    rate_at = WarmupDecay(
        settings.schedule, config.method.learning_rate, settings.steps, settings.warmup_steps
    )
    if reports is not None:
        options = replace(options, sinks=(*options.sinks, reports))
    run = Run(session, settings, start, rate_at, options, preferences=preferences)
    if rows.evaluation is not None:
        run.evaluate_fn = evaluate_now
    if score is not None:
        run.score = lambda step: score(cast("Batches", batches).rows_at(step))
    result = run.train(batches)
    if rows.stream is not None:
        figures["train"] = rows.figures()
        figures["train"]["notes"] += options.notes
    if options.adapter is not None:
        figures["train"]["notes"] += notes_of_labels(before_it, rows.train.labels.values())
    restored = False
    if (
        settings.restore_best
        and not result.interrupted
        and result.best_checkpoint not in (None, result.checkpoint)
    ):
        session.load_state(read_state(result.best_checkpoint))
        best_figures = result.best_evaluation or evaluate_now(lambda: False)
        result = replace(result, evaluation=best_figures)
        restored = True
    texts = {}
    if rows.task is not None:
        texts = _texts(rows.task, model, result, "adapter")
    # An adapter is saved even if the run was interrupted, a whole model (gigabytes) only if it has finished.
    adapter = best = folder = ordinary = None
    if (trained := session.adapter()) is not None:
        adapter = settings.out / ADAPTER
        save_adapter(loadable(trained, model), adapter, texts)
        best = None if restored else _save_best(session, result, settings.out, model, texts)
    elif saves_model and not result.interrupted:
        network = None
        if isinstance(session, HasOrdinary):  # evaluated before anything is written
            network = session.ordinary_session
            ordinary = compare(session, network, evaluated, rows.pad, settings.out / ORDINARY)
        folder = settings.out / MODEL
        with atomic_directory(folder) as temporary:
            session.save_model(temporary)
            if rows.task is not None:
                texts = _texts(rows.task, model, result, "model")
                add_ends(temporary, rows.task.trained_ends(rows.tokenizer))
            for name, text in texts.items():
                (temporary / name).write_text(text, encoding="utf-8")
        if network is not None:
            save_ordinary(network, settings.out / ORDINARY)
    if options.loaded is not None:
        session.release_model()
        if trained is not None:
            apply_adapter(options.loaded, trained)
        if rows.task is not None:
            remember_task(options.loaded.model, rows.task)
    session.close()
    if result.raised is not None:
        saved = result.checkpoint or "there was none"
        result.raised.add_note(
            f"The run ended after step {result.steps}; its checkpoint: {saved}. `resume` goes on."
        )
        raise result.raised
    return Trained(
        result,
        adapter,
        best,
        folder,
        tuple(rows.train.problems),
        ordinary,
        figures,
        settings.out,
        config.method.name,
        run.history,
    )


def program_identity(manifest: Manifest, config: RunConfig) -> dict[str, Any]:
    """Return what identifies a run of a program; see `fit`."""
    return {
        "artifact": manifest.files[manifest.program],
        "learning_rate": config.method.learning_rate,
    }


def model_before(model: Any, identity: dict[str, Any], adapter: Path | None) -> dict[str, str]:
    """Return what identifies the model before the first step; see `fit`."""
    run = json.dumps([identity, adapter_identity(adapter)], sort_keys=True)
    return {"model": model.sha256, "run": hashlib.sha256(run.encode()).hexdigest()}


def in_steps(settings: TrainConfig, steps_per_epoch: float) -> TrainConfig:
    """Return the settings with steps in place of epochs: how many, and after how many an evaluation is due.

    Raises:
        ConfigError: the run shall stop early and is never evaluated on the way.
    """
    if settings.epochs is not None:
        steps = max(1, math.ceil(settings.epochs * steps_per_epoch - 1e-9))
        every = settings.eval_every or max(1, math.ceil(steps_per_epoch - 1e-9))
        settings = settings.model_copy(update={"steps": steps, "eval_every": every})
    if settings.patience is not None and not settings.eval_every:
        raise ConfigError(
            "train.patience counts evaluations, and there is one, at the end",
            expected="train.eval_every, or train.epochs",
            hint="--eval-every 50 evaluates every 50 steps",
        )
    return settings


def adapter_identity(adapter: Path | None) -> dict[str, Any]:
    """Name the adapter that a run started from by its hash; empty if it started from none."""
    if adapter is None:
        return {}
    name = MLX_LM_WEIGHTS_NAME if is_mlx_lm(Path(adapter)) else WEIGHTS_NAME
    return {"adapter": sha256_file(Path(adapter) / name)}


def loadable(adapter: Adapter, model: Any) -> Adapter:
    """Name the base model so that PEFT's AutoPeftModel finds it: a package by the folder that it was converted into."""
    path = getattr(model, "path", None)
    if path is None or not adapter.base_model.startswith(PACKAGE_PREFIX):
        return adapter
    return replace(adapter, base_model=str(path))


def _texts(task: TrainedTask, model: Any, result: RunResult, kind: Kind) -> dict[str, str]:
    """Return the files that tell how an adapter or a model is used, by name."""
    digest = None
    if not is_in_memory(model):  # a model that is loaded from files later has another digest
        digest = model.sha256
    revision = getattr(model, "revision", None)
    base = BaseModel(source=model.source, revision=revision, sha256=digest)
    figures = result.evaluation.figures() if result.evaluation else None
    task = task.model_copy(update={"base_model": base, "evaluation": figures})
    return {TASK_NAME: to_text(task), README_NAME: readme(task, kind)}


def _save_best(
    session: Session, result: RunResult, out: Path, model: Any, texts: dict[str, str]
) -> Path | None:
    """Save the adapter of the best evaluation, if that is not the last checkpoint."""
    if result.best_checkpoint is None or result.best_checkpoint == result.checkpoint:
        return None
    session.load_state(read_state(result.best_checkpoint))
    adapter = session.adapter()
    if adapter is None:
        return None
    save_adapter(loadable(adapter, model), out / BEST_ADAPTER, texts)
    return out / BEST_ADAPTER
