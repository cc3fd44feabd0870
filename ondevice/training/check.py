"""What a run refuses after its plan, found without the model's weights and without writing anything."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.adapter_fit import check_base_weights, check_scale
from ondevice.core.errors import ConfigError
from ondevice.models import load_model, load_tokenizer, read_dims
from ondevice.models.load import check_head
from ondevice.models.open import check_has_files
from ondevice.models.sources.resolve import TINY_PREFIX, SourceInfo, config_of, resolve
from ondevice.training import events
from ondevice.training.checkpoint import CheckpointStore, RunLock
from ondevice.training.fit import (
    Options,
    in_steps,
    model_before,
    program_identity,
    rows_of_program,
    run_identity,
    with_rows,
)
from ondevice.training.loggers import check_installed
from ondevice.training.loop import check_no_run
from ondevice.training.objective import objective_of
from ondevice.training.preferences import check_reference, reference_identity
from ondevice.training.resume import check_resume
from ondevice.training.trained import check_base, task_of_adapter

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import ModelConfig, TrainConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import Manifest
    from ondevice.core.method import Placement
    from ondevice.training.rows import RunRows


def check_run(config: RunConfig, placement: Placement, options: Options) -> None:
    """Refuse what `train_model` would refuse, in its order.

    The model's configuration and tokenizer are read, and the rows are encoded. Only faults of the weights' files
    are not found.

    Raises:
        OndeviceError: as `train_model`.
    """
    source = config.model
    dims = read_dims(source.source, source.revision)
    if placement.spec.reads_files(config.method, placement.backend):
        check_has_files(source.source)
    else:
        dims = replace(dims, classes=_check_head(source, dims))
    tokenizer = load_tokenizer(source.source, source.revision)
    config, rows = with_rows(config, placement, options, tokenizer, dims, dims.vocab)
    settings = in_steps(config.train, rows.batches(config.train, config.data).steps_per_epoch)
    config = config.model_copy(update={"train": settings})
    if options.adapter is not None:
        _check_adapter(config, placement, options.adapter)
    store = _check_place(settings, options)
    if options.resume and not options.overwrite:
        model = _source_info(config.model)
        identity = {"method": config.method.model_dump(mode="json"), "dtype": config.model.dtype}
        _check_reference(settings, model_before(model, identity, options.adapter), rows)
        check_resume(store, _start(config, rows, options, model, identity), settings)


def check_program_run(
    config: RunConfig, manifest: Manifest, tokenizer: Any, options: Options
) -> None:
    """Refuse what a run of an exported program would refuse before the program is opened.

    Raises:
        OndeviceError: as `api.train.run_artifact`.
    """
    rows = rows_of_program(config, manifest, tokenizer, options)
    if options.adapter is not None:
        check_base(task_of_adapter(options.adapter), manifest.model, options.adapter)
    _check_place(config.train, options)
    if options.resume and not options.overwrite:
        identity = program_identity(manifest, config)
        before = model_before(manifest.model, identity, options.adapter)
        _check_reference(config.train, before, rows)


def _check_reference(settings: TrainConfig, before: dict[str, str], rows: RunRows) -> None:
    """Refuse likelihoods before training that are not those of the run that goes on."""
    made = objective_of(settings)
    if made is not None and made.has_reference:
        identity = reference_identity(before, (rows.train, rows.evaluation))
        check_reference(settings.out, identity)


def _check_place(settings: TrainConfig, options: Options) -> CheckpointStore:
    """Refuse trackers that are missing, and a folder that cannot take the run; return its checkpoints."""
    check_installed(settings.report_to)
    RunLock.check(settings.out)
    store = CheckpointStore(settings.out, {}, seed=settings.seed, backend="")
    if not options.resume and not options.overwrite:
        check_no_run(settings.out, store)
    return store


def _check_head(source: ModelConfig, dims: ModelDims) -> int:
    """Return the classes of the model's head, 0 for a decoder; ModelError as `load_model`."""
    values: dict[str, Any] = {}
    if not source.source.startswith(TINY_PREFIX) and not source.source.endswith(".gguf"):
        values, _ = config_of(source.source, source.revision)
    if check_head(source.source, values, dims, source.classes):
        return source.classes or 0
    return dims.classes


def _check_adapter(config: RunConfig, placement: Placement, adapter: Any) -> None:
    method = config.method
    if placement.spec.trains == "all":
        raise ConfigError(f"method {method.name} trains the whole model and takes no adapter")
    check_base(task_of_adapter(adapter), _source_info(config.model), adapter)
    start = load_adapter(adapter)
    check_scale(start, method.rank, method.alpha)
    check_base_weights(start, method)


def _source_info(source: ModelConfig) -> SourceInfo:
    if source.source.startswith(TINY_PREFIX):  # its weights come from a seed
        return load_model(source.source).source
    return resolve(source.source, source.revision)


def _start(
    config: RunConfig,
    rows: RunRows,
    options: Options,
    model: SourceInfo,
    identity: dict[str, Any],
) -> events.Start:
    """Return the head that the log of the run would have, as far as a resume compares it."""
    return events.Start(
        config=config.model_dump(mode="json"),
        identity=identity | run_identity(config.data, config.train, rows, options),
        seed=config.train.seed,
        backend="",
        model_source=model.source,
        model_sha256=model.sha256,
    )
