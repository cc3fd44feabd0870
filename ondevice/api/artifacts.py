"""Export a training program, and hold an exported one against eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.manifest import read_manifest
from ondevice.errors import ArtifactError, ConfigError
from ondevice.exporters.base import ExportConfig, ExportJob, ExportReport
from ondevice.exporters.registry import exporter
from ondevice.methods.prge.config import PrgeConfig

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig

LIMITS = {"none": (1e-3, 1e-5), "q4": (1e-3, 1e-4), "8da4w": (1e-1, 5e-2)}
"""Largest relative loss error, free-running and replayed, that `verify` calls right, by quantisation."""


def export_jobs(config: RunConfig, *, overwrite: bool = False) -> list[ExportJob]:
    """What `config` asks an exporter for: one job, or one for each chip of an NPU target."""
    target, sections = exporter(config.export.target), [config.export]
    if socs := target.socs:
        chosen = list(socs) if config.export.soc == ("all",) else list(dict.fromkeys(config.export.soc))
        sections = [config.export.model_copy(update={"soc": (soc,)}) for soc in chosen]
    return [
        ExportJob(
            model=config.model,
            method=config.method,
            export=section,
            seed=config.train.seed,
            task=config.data.task,
            overwrite=overwrite,
        )
        for section in sections
    ]


def export_each(config: RunConfig, out: Path, *, overwrite: bool = False) -> list[ExportReport]:
    """Export the run's training step; several chips give one artifact each, in folders of `out` named after them.

    Args:
        config: model, method, `export` section, seed and task.
        out: the artifact's folder.
        overwrite: replace what is there.
    """
    jobs = export_jobs(config, overwrite=overwrite)
    places = [Path(out)] if len(jobs) == 1 else [Path(out) / job.export.soc[0] for job in jobs]
    target = exporter(config.export.target)
    if problems := list(dict.fromkeys(problem for job in jobs for problem in target.check(job))):
        raise ConfigError("cannot export: " + "; ".join(problems))
    return [target.export(job, place) for job, place in zip(jobs, places)]


def export(config: RunConfig, out: Path, *, overwrite: bool = False) -> ExportReport:
    """`export_each` for one artifact.

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


def run_config(folder: Path, path: Path | None = None, overrides: dict[str, Any] | None = None) -> RunConfig:
    """A run file for an artifact: model, method and seed are the program's, the rest `path`'s and `overrides`'.

    Of the method only the learning rate can be chosen: it is an input of the program.

    Raises:
        ArtifactError: if `folder` is no whole artifact.
        ConfigError: for an unknown key, a wrong value, or an override of what the program fixes.
    """
    from ondevice.api.runfile import RunConfig, read_yaml

    manifest, given = read_manifest(folder), dict(overrides or {})
    rate = given.pop("method.learning_rate", None)
    for key in given:
        if key.split(".")[0] in ("model", "method", "export") or key in ("train.seed", "train.batch_size"):
            raise ConfigError(
                f"'{key}' is fixed in the artifact",
                expected="data.*, train.* or method.learning_rate",
                hint="export the model again with this setting",
            )
    if rate is None and path is not None and isinstance(section := read_yaml(path).get("method"), dict):
        rate = section.get("learning_rate")
    fixed = {
        "model.source": manifest.model.source,
        "method": dict(manifest.method),
        "train.seed": manifest.generator.seed,
        "train.batch_size": manifest.batch_size,
        "method.learning_rate": rate,
    }
    return RunConfig.load(path, {**given, **fixed})


def verify(folder: Path, *, steps: int = 20, data: Path | None = None, model: str | None = None) -> dict[str, Any]:
    """Run `steps` training steps in the runtime and in eager PyTorch, and compare.

    Args:
        folder: the artifact.
        steps: training steps.
        data: rows to train on; random tokens if not given.
        model: where the model is now, if not where the manifest says.

    Returns:
        `steps`, `max_rel_loss_error` (free-running), `max_rel_loss_error_replayed` (the runtime's projected
        gradients fed to both sides), `max_abs_adapter_error`, `gradient_correlation`, `backend`, `ok`.

    Raises:
        ArtifactError: if the model is not the one that was exported.
    """
    from ondevice.api.opening import read_dataset
    from ondevice.data import Batches, pad_id_of
    from ondevice.exporters.executorch.author import author
    from ondevice.exporters.executorch.check import compare, random_batches
    from ondevice.models import load_model
    from ondevice.runtime.executorch import ExecutorchSession

    manifest = read_manifest(folder)
    source = model or manifest.model.source
    loaded = load_model(source, revision=manifest.model.revision, dtype="float32", device="cpu")
    if loaded.source.sha256 != manifest.model.sha256:
        raise ArtifactError(
            f"{source} is not the model that was exported",
            expected=manifest.model.sha256,
            received=loaded.source.sha256,
            hint="--model says where the exported model is",
        )
    config = ExportConfig.parse(
        {
            "quantize": manifest.quantize,
            "loss": manifest.loss,
            "generator": manifest.generator.lowering,
            "form": manifest.form,
        },
        "manifest.json",
    )
    method = PrgeConfig.parse(manifest.method, "manifest.json: method")
    session = ExecutorchSession(Path(folder), manifest)
    tokenizer = loaded.tokenizer
    program = author(loaded, method, config, session.seed)
    if data is None:
        batches = random_batches(session, manifest.model.dims["vocab"], steps)
    else:
        dataset = read_dataset(data, tokenizer, task=manifest.task, max_length_tokens=max(manifest.lengths_tokens))
        source_batches = Batches(
            dataset, session.batch_size, session.lengths_tokens, session.seed, pad_id_of(tokenizer)
        )
        batches = ((np.asarray(b.ids), np.asarray(b.labels)) for b in map(source_batches.at, range(steps)))
    result = compare(session, program, batches, method.learning_rate).to_dict()
    session.close()
    free, replayed = LIMITS[manifest.quantize]
    within = result["max_rel_loss_error"] <= free and result["max_rel_loss_error_replayed"] <= replayed
    ok = within and np.isfinite(result["max_abs_adapter_error"])
    return {**result, "backend": "executorch-xnnpack", "ok": bool(ok)}
