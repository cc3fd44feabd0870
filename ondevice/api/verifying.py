"""Hold an exported program against the same training in eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.manifest import Manifest, read_manifest
from ondevice.errors import ArtifactError, ConfigError
from ondevice.exporters.base import ExportConfig
from ondevice.methods.prge.config import PrgeConfig

if TYPE_CHECKING:
    from ondevice.exporters.executorch.check import Batch
    from ondevice.methods.prge.torch import PrgeProgram

LIMITS = {"none": (1e-3, 1e-5), "q4": (1e-3, 1e-4), "8da4w": (1e-1, 5e-2)}
"""Largest relative loss error, free-running and replayed, that `verify` calls right, by quantisation."""
DEFAULT_STEPS, DEFAULT_DIRECTIONS = 20, 8


def verify(
    folder: Path,
    *,
    steps: int | None = None,
    data: Path | None = None,
    model: str | None = None,
    directions: int | None = None,
    perturbation_scales: tuple[float, ...] = (),
) -> dict[str, Any]:
    """Run training steps in the runtime and in eager PyTorch, and compare.

    Args:
        folder: the artifact.
        steps: training steps, for a program without an NPU part; 20 unless given.
        data: rows to train on; random tokens if not given.
        model: where the model is now, if not where the manifest says.
        directions: projected gradients at least, for an NPU's program; 8 unless given.
        perturbation_scales: the scales to compare at, for an NPU's program; the manifest's unless given.

    Returns:
        In PyTorch and MLX: `steps`, `max_rel_loss_error`, `max_abs_adapter_error`, `evaluation_error`, `backend`, `ok`.
        For an ExecuTorch program with exact gradients: `steps`, `gradient_error` (the largest relative one of a
        tensor), `max_rel_loss_error`, `max_abs_adapter_error`, `backend`, `ok`. For its zeroth-order one: `steps`,
        `max_rel_loss_error` (free-running), `max_rel_loss_error_replayed` (the runtime's projected gradients fed to
        both sides), `max_abs_adapter_error`, `gradient_correlation`, `backend`, `ok`. For an NPU's: `directions`,
        `sign_agreement`, `correlation`, `loss_error`, `adapter_error`, `perturbation_scale`, `backend`, `ok`, against
        float32; with several scales, `scales` lists them all.

    Raises:
        ArtifactError: if the model is not the one that was exported.
        ConfigError: an argument that does not go with the program.
    """
    manifest = read_manifest(folder)
    if manifest.runtime.startswith("mlx "):
        return _in_mlx(Path(folder), manifest, steps or DEFAULT_STEPS, data, model)
    if manifest.runtime.startswith("torch "):
        return _in_torch(Path(folder), manifest, steps or DEFAULT_STEPS, data, model)
    if manifest.method.get("name") == "mesp":
        return _exact(Path(folder), manifest, steps or DEFAULT_STEPS, data, model)
    if manifest.soc is None and (directions is not None or perturbation_scales):
        raise ConfigError(
            "directions and perturbation scales are for an NPU's program", expected="steps", received=manifest.target
        )
    if manifest.soc is not None and steps is not None:
        raise ConfigError(
            "an NPU's program is checked by directions", expected="--directions N", received=f"--steps {steps}"
        )
    program, tokenizer = _eager(folder, manifest, model)
    if manifest.soc is None:
        return _on_cpu(Path(folder), manifest, program, tokenizer, steps or DEFAULT_STEPS, data)
    scales = perturbation_scales or (program.config.perturbation_scale,)
    return _on_npu(Path(folder), manifest, program, tokenizer, directions or DEFAULT_DIRECTIONS, scales, data)


def _eager(folder: Path, manifest: Manifest, model: str | None) -> tuple[PrgeProgram, Any]:
    """The same training in eager PyTorch, and the tokenizer; an NPU's reference is the float32 model."""
    from ondevice.exporters.executorch.author import author
    from ondevice.models import load_model

    source = model or manifest.model.source
    loaded = load_model(source, revision=manifest.model.revision, dtype="float32", device="cpu")
    _same_model(loaded, source, manifest)
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
    return author(loaded, method, config, manifest.generator.seed), loaded.tokenizer


def _same_model(loaded: Any, source: str, manifest: Manifest) -> None:
    if loaded.source.sha256 != manifest.model.sha256:
        raise ArtifactError(
            f"{source} is not the model that was exported",
            expected=manifest.model.sha256,
            received=loaded.source.sha256,
            hint="--model says where the exported model is",
        )


def _exact(folder: Path, manifest: Manifest, steps: int, data: Path | None, model: str | None) -> dict[str, Any]:
    """A program with exact gradients against automatic differentiation."""
    from ondevice.exporters.executorch.mesp.check import compare
    from ondevice.exporters.executorch.mesp.job import GRADIENT_TOLERANCE
    from ondevice.models import load_model
    from ondevice.runtime.first_order import FirstOrderProgramSession

    source = model or manifest.model.source
    loaded = load_model(source, revision=manifest.model.revision, dtype="float32", device="cpu")
    _same_model(loaded, source, manifest)
    session = FirstOrderProgramSession(folder, manifest)
    batches = _batches(session, manifest, loaded.tokenizer, data, steps)
    result = compare(session, loaded, session.config, batches, session.config.learning_rate).to_dict()
    session.close()
    ok = result["gradient_error"] <= GRADIENT_TOLERANCE and result["max_rel_loss_error"] <= LIMITS["none"][0]
    return {**result, "backend": "executorch", "ok": bool(ok and np.isfinite(result["max_abs_adapter_error"]))}


def _in_mlx(folder: Path, manifest: Manifest, steps: int, data: Path | None, model: str | None) -> dict[str, Any]:
    """An MLX program against Python's own stages over the model's own files."""
    from ondevice.exporters.mlx.check import compare
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.mlx.session import open_session
    from ondevice.models import open_model
    from ondevice.runtime.mlx import MlxProgramSession

    source = model or manifest.model.source
    session = MlxProgramSession(folder, manifest)
    files = open_model(source, revision=manifest.model.revision, dtype=session.model.settings.dtype, packed=True)
    _same_model(files, source, manifest)
    reference = open_session(files, MespConfig.parse(manifest.method, "manifest.json: method"), session.seed)
    batches = None if data is None else _batches(session, manifest, files.tokenizer, data, steps)
    result = compare(session, reference, files.dims.vocab, steps, reference.config.learning_rate, batches)
    session.close()
    return {**result, "backend": session.backend}


def _in_torch(folder: Path, manifest: Manifest, steps: int, data: Path | None, model: str | None) -> dict[str, Any]:
    """Packed weights against the original model's, rounded in the same way, in plain layers on the same device."""
    from ondevice.exporters.cuda.check import compare
    from ondevice.methods.registry import open_session
    from ondevice.models import load_model
    from ondevice.nn.packed import pack_model, unpack_model
    from ondevice.runtime.torch import TorchProgramSession

    source, session = model or manifest.model.source, TorchProgramSession(folder, manifest)
    loaded: Any = load_model(source, revision=manifest.model.revision, dtype=session.dtype, device="cpu")
    _same_model(loaded, source, manifest)
    if manifest.quantize != "none":
        pack_model(loaded.family, manifest.quantize)
        unpack_model(loaded.family)
    loaded.model.to(session.device)
    reference = open_session(loaded, session.config, session.seed, str(session.device))
    batches = _batches(session, manifest, loaded.tokenizer, data, steps)
    result = compare(session, reference, batches, session.config.learning_rate, session.dtype)
    session.close()
    return result


def _batches(session: Any, manifest: Manifest, tokenizer: Any, data: Path | None, steps: int) -> Iterator[Batch]:
    from ondevice.api.opening import read_dataset
    from ondevice.data import Batches, pad_id_of
    from ondevice.exporters.executorch.check import random_batches

    if data is None:
        yield from random_batches(session, manifest.model.dims["vocab"], steps)
        return
    dataset = read_dataset(data, tokenizer, task=manifest.task, max_length_tokens=max(manifest.lengths_tokens))
    source = Batches(dataset, session.batch_size, session.lengths_tokens, session.seed, pad_id_of(tokenizer))
    yield from ((np.asarray(b.ids), np.asarray(b.labels)) for b in map(source.at, range(steps)))


def _on_cpu(
    folder: Path, manifest: Manifest, program: PrgeProgram, tokenizer: Any, steps: int, data: Path | None
) -> dict[str, Any]:
    from ondevice.exporters.executorch.check import compare
    from ondevice.runtime.executorch import ExecutorchSession

    session = ExecutorchSession(folder, manifest)
    batches = _batches(session, manifest, tokenizer, data, steps)
    result = compare(session, program, batches, program.config.learning_rate).to_dict()
    session.close()
    free, replayed = LIMITS[manifest.quantize]
    within = result["max_rel_loss_error"] <= free and result["max_rel_loss_error_replayed"] <= replayed
    ok = within and np.isfinite(result["max_abs_adapter_error"])
    return {**result, "backend": "executorch-xnnpack", "ok": bool(ok)}


def _on_npu(
    folder: Path,
    manifest: Manifest,
    program: PrgeProgram,
    tokenizer: Any,
    directions: int,
    scales: tuple[float, ...],
    data: Path | None,
) -> dict[str, Any]:
    from ondevice.exporters.executorch.qnn.check import agreement
    from ondevice.runtime.npu import NpuSession

    session, found = NpuSession(folder, manifest), []
    steps = -(-directions // program.config.queries)
    for scale in scales:
        session.load_state({"adapter": np.zeros_like(session.flat()), "seed": np.array([session.seed])})
        batches = _batches(session, manifest, tokenizer, data, steps)
        result = agreement(session, program, batches, program.config.learning_rate, scale)
        broken = [
            f"expected {expected}, received {received}" for expected, received in result.reasons(manifest.quantize)
        ]
        found.append({**result.to_dict(), "broken": broken, "ok": not broken})
    answer = {**found[0], "quantize": manifest.quantize, "soc": manifest.soc, "backend": session.backend}
    session.close()
    if len(found) > 1:
        answer |= {"scales": found, "ok": all(one["ok"] for one in found)}
    return answer
