"""The model that answers, an artifact's weights or its program; the last one stays loaded."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from ondevice.artifact.manifest import read_manifest
from ondevice.core.dims import ModelDims
from ondevice.data.tasks.trained import TrainedTask, read_trained_task
from ondevice.generation.generator import Generator
from ondevice.models import LoadedModel, SourceInfo, load_model, read_dims
from ondevice.models.load import artifact_tokenizer
from ondevice.models.packed import load_packed
from ondevice.models.save import FILE_NAME
from ondevice.models.sources.resolve import TINY_PREFIX, config_of
from ondevice.planning.estimate import weight_bytes
from ondevice.server.engine.program import Program
from ondevice.server.room import check_room_here, job_wants, needs, usable_bytes
from ondevice.training.choices import resolve_device

_loaded: dict[str, Any] = {}


def recorded_task(folder: str | None) -> TrainedTask | None:
    """Return the task that the folder of an adapter or of a model records; None without one."""
    if folder is None or not Path(folder).is_dir():
        return None
    return read_trained_task(Path(folder))


def as_trained(generator: Generator, task: TrainedTask | None) -> Generator:
    """Let a generator frame and end answers as the training did, if its task is known."""
    if task is not None:
        generator.tokenizer = task.with_template(generator.tokenizer)
        generator.end_tokens = task.end_ids(generator.tokenizer) or generator.end_tokens
    return generator


def hold(
    model: str | None,
    artifact: str | None,
    tokens: int,
    job: dict[str, Any] | None,
    *,
    precise: bool = False,
) -> LoadedModel:
    """Return the model that is asked, loaded; it stays, and takes the place of the one before.

    Args:
        tokens: of a prompt and the generated text, at most.
        precise: in float32 if that fits, as an evaluation computes; else as its weights are stored.
        model: a source string; None with an artifact.
        artifact: a folder for PyTorch; its packed weights are the model.
        job: the one that runs, of `server.daemon.running_job`.

    Raises:
        BusyError: the model does not fit next to the running job.
    """
    wanted = (model, artifact, _stamp(artifact or str(model)))
    if _loaded.get("wanted") != wanted or (precise and not _loaded["precise"]):
        _forget()
        loaded = _open(model, artifact, tokens, job, precise)
        _loaded.update(wanted=wanted, loaded=loaded, precise=precise)
    return _loaded["loaded"]


def hold_program(artifact: str, job: dict[str, Any] | None) -> Program:
    """Return an artifact's program; it stays, and takes the place of the model before.

    Args:
        artifact: a folder.
        job: the one that runs, as for `hold`.

    Raises:
        BusyError: the program does not fit next to the running job.
        ArtifactError: the artifact is damaged.
    """
    wanted = (None, artifact, _stamp(artifact))
    if _loaded.get("wanted") != wanted:
        _forget()
        program = Program(Path(artifact))
        if job is not None:
            check_room_here(program.needs(), "cpu", job)
        _loaded.update(wanted=wanted, loaded=program)
    return _loaded["loaded"]


def _open(
    model: str | None,
    artifact: str | None,
    tokens: int,
    job: dict[str, Any] | None,
    precise: bool = False,
) -> LoadedModel:
    """Plan if a job runs, and load."""
    device = resolve_device("auto")
    if artifact is not None:
        return _open_artifact(Path(artifact), tokens, job, device)
    source = str(model)
    dims = read_dims(source)
    dtype = _dtype(source)
    if precise and _fits_in_float32(dims, tokens, device, job):
        dtype = "float32"
    if job is not None:
        weights = sum(weight_bytes(dims, dtype))
        check_room_here(needs(dims, weights, dtype, tokens, device), device, job)
    return load_model(source, dtype=dtype, device=device)


def _open_artifact(
    folder: Path, tokens: int, job: dict[str, Any] | None, device: str
) -> LoadedModel:
    manifest = read_manifest(folder)
    packed = folder / "model"
    if job is not None:
        dtype = json.loads((packed / "config.json").read_text(encoding="utf-8"))["dtype"]
        weights = (packed / FILE_NAME).stat().st_size
        dims = ModelDims.from_manifest(manifest.model.dims)
        parts = needs(dims, weights, dtype, tokens, device)
        if manifest.quantize != "none":
            parts["dense matrix"] = 2 * max(a * b for a, b in dims.linear_shapes.values())
        check_room_here(parts, device, job)
    base = manifest.model
    info = SourceInfo(base.source, packed, base.revision, known_sha256=base.sha256)
    return load_packed(packed, device, artifact_tokenizer(folder), info)


def _fits_in_float32(dims: ModelDims, tokens: int, device: str, job: dict[str, Any] | None) -> bool:
    parts = needs(dims, sum(weight_bytes(dims, "float32")), "float32", tokens, device)
    return sum(parts.values()) <= usable_bytes(device) - job_wants(device, job)


def _dtype(source: str) -> str:
    """Return bfloat16 for weights in bfloat16: float32 would need twice the memory."""
    config = {}
    if not source.startswith(TINY_PREFIX):
        config = config_of(source)[0]
    stored = config.get("dtype") or config.get("torch_dtype")
    if stored == "bfloat16":
        return "bfloat16"
    return "float32"


def _stamp(source: str) -> tuple[int, int] | None:
    """Return inode and change time of a folder, which differ after a replacement, or None."""
    try:
        stat = Path(source).stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns


def _forget() -> None:
    """Free the memory of the loaded model."""
    _loaded.clear()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
