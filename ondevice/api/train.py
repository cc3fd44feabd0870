"""Train in eager PyTorch or MLX, or through an exported program."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.core.errors import ConfigError
from ondevice.core.registry import methods, target
from ondevice.planning.devices import place
from ondevice.training.fit import Options, Sink, Trained, fit, read_rows_of, train_model

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.artifact.manifest import Manifest


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
    from ondevice.planning.fits import plan_within

    config.check_data()  # before the plan, which may fetch a model's configuration
    config = config.for_training()
    placement, notes = place(config), ()
    if config.train.objective != "loss" and placement.spec.order != "zeroth":
        names = ", ".join(spec.name for spec in methods() if spec.order == "zeroth")
        raise ConfigError(
            f"method {config.method.name} needs a gradient, and a score has none",
            expected=f"a zeroth-order method ({names}) for train.objective {config.train.objective}",
            received=f"method {config.method.name}",
            hint="train.objective loss goes with every method",
        )
    if config.data.max_length_tokens is None:
        from ondevice.training.length import with_length

        config, notes = with_length(config)
    with plan_within(config, placement, force):
        return train_model(config, placement, Options(resume, overwrite, adapter, sinks, notes))


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
    from ondevice.artifact.manifest import read_manifest

    config.check_data()
    manifest, limit = read_manifest(folder), config.train.memory_limit_bytes
    options = Options(resume, overwrite, adapter, sinks)
    if limit is None:
        return _run_manifest(folder, manifest, config, options)
    from ondevice.planning.artifacts import plan_artifact
    from ondevice.planning.fits import ensure_fits, memory_limit

    estimate = plan_artifact(folder, manifest, limit)
    ensure_fits(estimate)
    with memory_limit(limit, estimate):
        return _run_manifest(folder, manifest, config, options)


def _run_manifest(folder: Path, manifest: Manifest, config: RunConfig, options: Options) -> Trained:
    """Run `run_artifact`'s program, once the plan is known to fit."""
    from ondevice.models.load import artifact_tokenizer

    session = target(manifest.target).open(folder, manifest)
    tokenizer = artifact_tokenizer(folder)
    rows = read_rows_of(config, tokenizer, max(manifest.lengths_tokens), manifest.task)
    identity = {"artifact": manifest.files[manifest.program], "learning_rate": config.method.learning_rate}
    return fit(session, rows, config, options, identity, manifest.model, seed=manifest.generator.seed)
