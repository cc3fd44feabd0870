"""Train in eager PyTorch or through an exported program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ondevice.api.converting import ORDINARY, Ordinary, convert_back
from ondevice.api.opening import artifact_tokenizer, read_dataset, resolve_device
from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.errors import ConfigError
from ondevice.methods.registry import OFFLOADING, RANKED, Backend, backend_for, home_of, open_session, reads_files
from ondevice.train import events
from ondevice.train.evaluate import EvalResult, evaluate_dataset
from ondevice.train.history import RunResult
from ondevice.train.loop import run_loop
from ondevice.train.schedule import WarmupDecay
from ondevice.train.stop import StopRequest

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.artifact.manifest import Manifest
    from ondevice.data import Dataset
    from ondevice.methods.session import Session

Sink = Callable[[events.Event], None]
ADAPTER = "adapter"
BEST_ADAPTER = "adapter-best"
MODEL = "model"


@dataclass(frozen=True)
class Trained:
    """A finished or interrupted run and what it wrote.

    Attributes:
        result: losses, times, memory, evaluation.
        adapter: folder of the adapter after the last step, None for a full-parameter method.
        best_adapter: folder of the adapter with the best evaluation, where there was more than one.
        model: folder of the trained model, for a full-parameter method.
        ordinary: what came of the conversion back to the ordinary architecture, for a method that trains another.
        problems: rows that were not used.
    """

    result: RunResult
    adapter: Path | None
    best_adapter: Path | None
    model: Path | None
    problems: tuple[Any, ...]
    ordinary: Ordinary | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        result = self.result
        values = {
            name: getattr(result, name)
            for name in (
                "steps",
                "first_loss",
                "final_loss",
                "step_time_s",
                "tokens_per_s",
                "peak_memory_bytes",
                "peak_device_bytes",
                "overlap",
                "interrupted",
            )
        }
        values["evaluation"] = result.evaluation.figures() if result.evaluation else None
        for name in ("adapter", "best_adapter", "model"):
            path = getattr(self, name)
            values[name] = str(path) if path else None
        values |= {} if self.ordinary is None else self.ordinary.to_dict()
        return {**values, "unused_rows": len(self.problems)}


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    force: bool = False,
    adapter: Path | None = None,
    sinks: Iterable[Sink] = (),
) -> Trained:
    """Fine-tune in eager PyTorch, or in MLX where `config.train.backend` says so.

    Args:
        config: the run.
        resume: go on from the newest checkpoint in `config.train.out`.
        overwrite: replace the run that is there.
        force: run even if the plan says that it does not fit.
        adapter: start from this adapter.
        sinks: called with every event.

    Under `torchrun` every process calls this with the same arguments. Rank 0 reads the data and writes; the others
    compute with it, and return what it returns.
    """
    from ondevice.plan.estimate import plan
    from ondevice.plan.fits import ensure_fits
    from ondevice.plan.limit import memory_limit

    data, limit = config.data, config.train.memory_limit_bytes
    if data.path is None:
        raise ConfigError("no data is given", expected="data.path in the run file, or --data")
    rank, world = ranks_of(config)
    backend = backend_for(config.method, config.train.backend)
    device = "cpu" if backend == "mlx" else resolve_device(config.model.device)
    estimate = plan(
        config.model.source,
        config.method,
        batch_size=config.train.batch_size // world,
        length_tokens=data.max_length_tokens,
        dtype=config.model.dtype,
        runtime="mlx" if backend == "mlx" else "torch",
        device=f"this-{device}",
        memory_limit_bytes=limit,
    )
    ensure_fits(estimate, force)
    with memory_limit(limit, estimate):
        return _train_model(config, data.path, backend, device, (rank, world), resume, overwrite, adapter, sinks)


def _train_model(
    config: RunConfig,
    path: Path,
    backend: Backend,
    device: str,
    ranks: tuple[int, int],
    resume: bool,
    overwrite: bool,
    adapter: Path | None,
    sinks: Iterable[Sink],
) -> Trained:
    """`train` once it is known that it fits: load, read, open the session, and run the loop."""
    from ondevice.models import load_model, open_model

    data, (rank, world) = config.data, ranks
    given = {"revision": config.model.revision, "dtype": config.model.dtype}
    if backend == "mlx" or reads_files(config.method):
        loaded = open_model(config.model.source, **given, packed=backend == "mlx")
    else:
        loaded = load_model(config.model.source, **given, device=home_of(config.method, device))
    if rank:
        session = cast(Any, open_session(loaded, config.method, config.train.seed, device, backend))
        with StopRequest():  # a signal is for rank 0, which ends the running step and saves
            return session.follow()
    options = {"task": data.task, "max_length_tokens": data.max_length_tokens, "train_on_prompt": data.train_on_prompt}
    dataset = read_dataset(path, loaded.tokenizer, **options)
    evaluation = read_dataset(data.eval_path, loaded.tokenizer, **options) if data.eval_path else None
    session = open_session(loaded, config.method, config.train.seed, device, backend)
    if adapter is not None:
        session.load_adapter(load_adapter(adapter))
    start = events.Start(
        config=config.model_dump(mode="json"),
        identity={
            "method": config.method.model_dump(mode="json"),
            "dtype": config.model.dtype,
            "data": _data_identity(config, path),
            **adapter_identity(adapter),
        },
        seed=config.train.seed,
        backend=session.backend,
        generator_backend=session.generator_backend,
        model_source=config.model.source,
        model_sha256=loaded.source.sha256,
    )
    trained = _train(session, dataset, evaluation, config, start, loaded, resume, overwrite, sinks)
    if world > 1:
        cast(Any, session).finish(trained)
    return trained


def ranks_of(config: RunConfig) -> tuple[int, int]:
    """This process' number and how many train together (`torchrun`); 0 and 1 without.

    Raises:
        ConfigError: the method or the batch cannot be divided.
    """
    if "WORLD_SIZE" not in os.environ:
        return 0, 1  # and torch, which knows of ranks, is not imported for a method that does without it
    from ondevice.offload.ranks import asked, check_rows

    rank, world = asked()
    if world > 1 and config.method.name not in RANKED:
        raise ConfigError(
            f"method {config.method.name} trains in one process",
            expected=f"under torchrun: {', '.join(RANKED)}",
            hint="run `ondevice train` without torchrun",
        )
    check_rows(config.train.batch_size, world)
    return rank, world


def _data_identity(config: RunConfig, path: Path) -> dict[str, Any]:
    from ondevice.artifact.files import sha256_file

    digest = sha256_file(path) if Path(path).is_file() else None
    return {
        "sha256": digest,
        "batch_size": config.train.batch_size,
        **config.data.model_dump(mode="json", exclude={"path", "eval_path"}),
    }


def adapter_identity(adapter: Path | None) -> dict[str, Any]:
    """What names the adapter that a run started from; nothing where it started from none."""
    from ondevice.artifact import mlx_lm_files, peft_files
    from ondevice.artifact.files import sha256_file

    if adapter is None:
        return {}
    form = mlx_lm_files if mlx_lm_files.is_mlx_lm(Path(adapter)) else peft_files
    return {"adapter": sha256_file(Path(adapter) / form.WEIGHTS_NAME)}


def run_artifact(
    folder: Path,
    config: RunConfig,
    *,
    resume: bool = False,
    overwrite: bool = False,
    adapter: Path | None = None,
    sinks: Iterable[Sink] = (),
) -> Trained:
    """Fine-tune with an artifact in its runtime; model and method are the artifact's, the rest is `config`'s."""
    from ondevice.plan.limit import memory_limit

    manifest, limit = read_manifest(folder), config.train.memory_limit_bytes
    if limit is None:
        return _run_manifest(folder, manifest, config, resume, overwrite, adapter, sinks)
    from ondevice.plan.artifacts import plan_artifact
    from ondevice.plan.fits import ensure_fits

    estimate = plan_artifact(folder, manifest, limit)
    ensure_fits(estimate)
    with memory_limit(limit, estimate):
        return _run_manifest(folder, manifest, config, resume, overwrite, adapter, sinks)


def _run_manifest(
    folder: Path,
    manifest: Manifest,
    config: RunConfig,
    resume: bool,
    overwrite: bool,
    adapter: Path | None,
    sinks: Iterable[Sink],
) -> Trained:
    """`run_artifact` once it is known that it fits."""
    from ondevice.runtime.opening import open_session

    session = open_session(folder, manifest)
    tokenizer = artifact_tokenizer(folder)
    longest = max(manifest.lengths_tokens)
    options = {
        "task": config.data.task or manifest.task,
        "max_length_tokens": longest,
        "train_on_prompt": config.data.train_on_prompt,
    }
    if config.data.path is None:
        raise ConfigError("no data is given", expected="--data")
    dataset = read_dataset(config.data.path, tokenizer, **options)
    evaluation = read_dataset(config.data.eval_path, tokenizer, **options) if config.data.eval_path else None
    if adapter is not None:
        session.load_adapter(load_adapter(adapter))
    start = events.Start(
        config=config.model_dump(mode="json"),
        identity={
            "artifact": manifest.files[manifest.program],
            "learning_rate": config.method.learning_rate,
            "data": _data_identity(config, config.data.path),
            **adapter_identity(adapter),
        },
        seed=manifest.generator.seed,
        backend=session.backend,
        generator_backend=session.generator_backend,
        model_source=manifest.model.source,
        model_sha256=manifest.model.sha256,
    )
    return _train(session, dataset, evaluation, config, start, None, resume, overwrite, sinks, tokenizer)


def _train(
    session: Any,
    dataset: Dataset,
    evaluation: Dataset | None,
    config: RunConfig,
    start: events.Start,
    loaded: Any,
    resume: bool,
    overwrite: bool,
    sinks: Iterable[Sink],
    tokenizer: Any = None,
) -> Trained:
    from ondevice.data import Batches, pad_id_of

    settings = config.train
    pad = pad_id_of(tokenizer if loaded is None else loaded.tokenizer)
    size = session.batch_size or settings.batch_size
    batches = Batches(dataset, size, session.lengths_tokens, settings.seed, pad)

    def evaluate_now(should_stop: Callable[[], bool]) -> EvalResult | None:
        return evaluate_dataset(session, evaluation or dataset, pad, rows=settings.eval_rows, should_stop=should_stop)

    rate = WarmupDecay(settings.schedule, config.method.learning_rate, settings.steps, settings.warmup_steps)
    result = run_loop(
        session,
        batches,
        start=start,
        steps=settings.steps,
        learning_rate=rate,
        out=settings.out,
        resume=resume,
        overwrite=overwrite,
        checkpoint_every=settings.checkpoint_every,
        eval_every=settings.eval_every,
        evaluate_fn=None if evaluation is None else evaluate_now,
        sinks=sinks,
    )
    trained, best, model, ordinary = session.adapter(), None, None, None
    if trained is not None:
        save_adapter(trained, settings.out / ADAPTER)
        best = _save_best(session, result, settings.out)
    elif loaded is not None and not result.interrupted:
        from ondevice.artifact.files import atomic_directory
        from ondevice.models import save_tokenizer
        from ondevice.models.save import save_weights

        model = settings.out / MODEL
        with atomic_directory(model) as temporary:
            if config.method.name in OFFLOADING:
                save_weights(temporary, cast(Any, session).weights(), loaded)
            elif hasattr(session, "save_model"):
                session.save_model(temporary)
            else:
                loaded.model.save_pretrained(temporary)
                save_tokenizer(loaded, temporary)
        if getattr(session, "ordinary_session", None) is not None:
            ordinary = convert_back(session, loaded, evaluation or dataset, pad, settings.out / ORDINARY)
    session.close()
    return Trained(
        result, settings.out / ADAPTER if trained is not None else None, best, model, tuple(dataset.problems), ordinary
    )


def _save_best(session: Session, result: RunResult, out: Path) -> Path | None:
    """The adapter of the best evaluation, where that is not the last checkpoint."""
    if result.best_checkpoint is None or result.best_checkpoint == result.checkpoint:
        return None
    from ondevice.artifact.tensors import read_tensors
    from ondevice.train.checkpoint import STATE_FILE

    session.load_state(read_tensors(result.best_checkpoint / STATE_FILE))
    adapter = session.adapter()
    if adapter is None:
        return None
    save_adapter(adapter, out / BEST_ADAPTER)
    return out / BEST_ADAPTER
