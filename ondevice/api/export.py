"""Export a training program, and hold an exported one against eager PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.runfile import RunConfig, read_yaml
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig
from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.core.registry import method, method_config, methods, spec_of, target, targets
from ondevice.data import encode
from ondevice.data.examples import refuse_preferences
from ondevice.data.tasks.record import label_tokens_of_rows, label_tokens_of_task
from ondevice.data.tasks.task import is_template
from ondevice.data.tasks.trained import TASK_NAME, known_task, read_trained_task, trained_task
from ondevice.exporters.base import ExportJob, ExportReport
from ondevice.models import load_tokenizer, read_dims
from ondevice.planning.estimate import plan
from ondevice.planning.fits import does_not_fit
from ondevice.training.objective import check_exported
from ondevice.training.rows import OpenedRows

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.target import TargetSpec
    from ondevice.data.examples import Dataset
    from ondevice.data.tasks.trained import TrainedTask

MOST_WAYS = 3
"""Exports that a refusal recommends."""


def export_jobs(config: RunConfig, *, overwrite: bool = False) -> list[ExportJob]:
    """List the jobs that `config` asks an exporter for: one, or one for each chip of an NPU target.

    Raises:
        ConfigError: the program does not have the run's objective.
    """
    spec = target(config.export.target)
    sections = [config.export]
    settings = config.method
    check_exported(config.train, settings, config.export)
    if spec.perturbation_scale is not None and "perturbation_scale" in type(settings).model_fields:
        if "perturbation_scale" not in settings.model_fields_set:
            settings = settings.model_copy(update={"perturbation_scale": spec.perturbation_scale})
    if (
        spec.kind == "torch"
    ):  # it trains as eager PyTorch does, with the same choices if a setting is `auto`
        settings = spec_of(settings).for_training(settings)
    tokenizer, dataset = _rows(config)
    rows = dataset if _takes_rows(config) else None
    trained = _trained(config, tokenizer, dataset)
    if not getattr(settings, "answers", ()):
        settings = settings.with_answers(lambda: _answers(config, rows))
    if socs := spec.socs:
        chosen = (
            list(socs) if config.export.soc == ("all",) else list(dict.fromkeys(config.export.soc))
        )
        sections = [config.export.model_copy(update={"soc": (soc,)}) for soc in chosen]
    return [
        ExportJob(
            model=config.model,
            method=settings,
            export=section,
            seed=config.train.seed,
            # The manifest names tasks that every host knows; a template of one's own is in the record.
            task=None if is_template(config.data.task) else config.data.task,
            overwrite=overwrite,
            memory_limit_bytes=config.train.memory_limit_bytes,
            rows=rows,
            trained=trained,
        )
        for section in sections
    ]


def _takes_rows(config: RunConfig) -> bool:
    """Return True if the method's program begins from the run's rows or their answers, or if its
    levels are chosen on them."""
    program = spec_of(config.method).program(target(config.export.target).kind)
    calibrates = getattr(program, "calibrate", None) is not None
    chooses = config.export.rounding == "rows"
    return calibrates or chooses or "answers" in type(config.method).model_fields


def _rows(config: RunConfig) -> tuple[Any, Dataset | None]:
    """Return the tokenizer and the rows that the run names, of a streamed file the first; else None."""
    if config.data.path is None:
        return None, None
    tokenizer = load_tokenizer(config.model.source, revision=config.model.revision)
    rows = OpenedRows(config.data).texts()
    refuse_preferences(rows)
    dataset = encode(
        rows,
        tokenizer,
        max_length_tokens=max(config.export.lengths_tokens),
        strict_columns=config.data.strict_columns,
    )
    return tokenizer, dataset


def _trained(config: RunConfig, tokenizer: Any, rows: Dataset | None) -> TrainedTask | None:
    """Describe how hosts ask; None if the run names neither rows nor a task."""
    if rows is not None:
        return trained_task(config.data, rows, tokenizer)
    if config.data.task is None:
        return None
    return known_task(config.data, max(config.export.lengths_tokens))


def _answers(config: RunConfig, rows: Dataset | None) -> tuple[tuple[int, ...], str]:
    """Find the answers of the run's rows, or of its task if no rows are named."""
    if rows is not None:
        return label_tokens_of_rows(rows)
    if config.data.task is None:
        return (), "neither data.task nor data.path is given"
    tokenizer = load_tokenizer(config.model.source, revision=config.model.revision)
    return label_tokens_of_task(config.data.task, tokenizer)


def problems_of(jobs: list[ExportJob]) -> list[str]:
    """Return what stands against exports, each reason once."""
    found = [problem for job in jobs for problem in target(job.export.target).check(job)]
    return list(dict.fromkeys(found))


def refusal(job: ExportJob, problems: list[str]) -> ConfigError:
    """Build the error of an export that is refused; its hint is an export that is not, with defaults.

    Raises:
        ModelError: the model does not exist.
    """
    read_dims(job.model.source, job.model.revision)
    hint = "`ondevice train` trains this model on this machine"
    if _can(job, target(job.export.target), job.method.name):
        hint = "leave out the settings that are named, or change them as it says"
    elif ways := _ways(job):
        hint = f"{' or '.join(ways)} can be exported"
    return ConfigError("cannot export: " + "; ".join(problems), hint=hint)


def _ways(job: ExportJob) -> list[str]:
    """Return flags with which the model can be exported: another method, else another target, else both."""
    own = target(job.export.target)
    others = [spec for spec in targets() if spec.name != own.name]
    names = [job.method.name]
    names += [spec.name for spec in methods() if spec.name != job.method.name]
    for places in ([own], others):
        found = [
            f"--target {place.name} --method {name}"
            for place in places
            for name in names
            if _can(job, place, name)
        ]
        if found:
            return found[:MOST_WAYS]
    return []


def _can(job: ExportJob, place: TargetSpec, name: str) -> bool:
    """Return True if a method's program is exported to a target, all settings being defaults."""
    if place.kind not in method(name).programs:
        return False
    section = ExportConfig(target=place.name)
    settings = method_config(name)
    tried = replace(job, method=settings, export=section, rows=None)
    try:
        return not place.check(tried)
    except OndeviceError:
        return False


def export_each(config: RunConfig, out: Path, *, overwrite: bool = False) -> list[ExportReport]:
    """Export the run's training step; several chips give one artifact each, in folders of `out` named after them.

    Args:
        config: model, method, `export` section, seed and task.
        out: the artifact's folder.
        overwrite: replace existing files.
    """
    jobs = export_jobs(config, overwrite=overwrite)
    places = [Path(out)] if len(jobs) == 1 else [Path(out) / job.export.soc[0] for job in jobs]
    spec = target(config.export.target)
    if problems := problems_of(jobs):
        raise refusal(jobs[0], problems)
    if config.train.memory_limit_bytes is not None:
        _ensure_fits(config.model_copy(update={"method": jobs[0].method}))
    return [spec.export(job, place) for job, place in zip(jobs, places)]


def _ensure_fits(config: RunConfig) -> None:
    """Refuse an artifact whose runs would not fit the memory limit."""
    export = config.export
    limit = config.train.memory_limit_bytes
    spec = target(export.target)
    estimate = plan(
        config.model.source,
        config.method,
        batch_size=export.batch_size,
        length_tokens=max(export.lengths_tokens),
        dtype=spec.dtype(config.model),
        export=export,
        runtime=spec.runtime,
        device="this-cpu",
        memory_limit_bytes=limit,
    )
    if not estimate.fits:
        raise does_not_fit(estimate)


def export(config: RunConfig, out: Path, *, overwrite: bool = False) -> ExportReport:
    """Run `export_each` for one artifact.

    Raises:
        ConfigError: the run asks for several chips.
    """
    if len(jobs := export_jobs(config)) != 1:
        raise ConfigError(
            "one artifact is asked for and several chips are named",
            expected="one soc",
            received=", ".join(job.export.soc[0] for job in jobs),
            hint="use export_each",
        )
    return export_each(config, out, overwrite=overwrite)[0]


def run_config(
    folder: Path, path: Path | None = None, overrides: dict[str, Any] | None = None
) -> RunConfig:
    """Build the run file of an artifact: model, method and seed are the program's, the rest `path`'s and `overrides`'.

    Of the method only the learning rate can be chosen: it is an input of the program.

    Raises:
        ArtifactError: if `folder` is no whole artifact.
        ConfigError: for an unknown key, a wrong value, or an override of what the program fixes.
    """
    manifest = read_manifest(folder)
    settings = dict(overrides or {})
    rate = settings.pop("method.learning_rate", None)
    for key in settings:
        if key.split(".")[0] in ("model", "method", "export") or key in (
            "train.seed",
            "train.batch_size",
        ):
            raise ConfigError(
                f"'{key}' is fixed in the artifact",
                expected="data.*, train.* or method.learning_rate",
                hint="export the model again with this setting",
            )
    if (
        rate is None
        and path is not None
        and isinstance(section := read_yaml(path).get("method"), dict)
    ):
        rate = section.get("learning_rate")
    fixed = {
        "model.source": manifest.model.source,
        "method": dict(manifest.method),
        "train.seed": manifest.generator.seed,
        "train.batch_size": manifest.batch_size,
        "method.learning_rate": rate,
    }
    config = RunConfig.load(path, {**settings, **fixed}).scheduled()
    return _as_recorded(config, folder)


def _as_recorded(config: RunConfig, folder: Path) -> RunConfig:
    """Return a run that reads rows as the artifact's record says, where the run file does not."""
    record = read_trained_task(folder)
    if record is None or config.data.task is not None:
        return config
    task = record.task
    if record.template is not None:
        task = str(folder / TASK_NAME)
    columns = {**record.columns, **config.data.columns}
    data = config.data.model_copy(update={"task": task, "columns": columns})
    return config.model_copy(update={"data": data})
