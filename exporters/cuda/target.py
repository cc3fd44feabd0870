"""An export for PyTorch on an NVIDIA GPU: pack the weights, write, and check against plain layers."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import atomic_directory, sha256_file
from ondevice.artifact.manifest import MANIFEST_NAME, write_manifest
from ondevice.core.errors import ConfigError, OndeviceError, VerificationError
from ondevice.core.manifest import Manifest
from ondevice.core.registry import open_session
from ondevice.data.batching import Batch as RowsOf
from ondevice.exporters.base import (
    DEFAULT_STEPS,
    Exporter,
    ExportJob,
    ExportReport,
    VerifyRequest,
    check_free,
    check_model,
    name_state,
    size_problems,
    text_batches,
    write_task,
)
from ondevice.exporters.cuda import describe
from ondevice.models import families_with, save_tokenizer
from ondevice.models.text_model import load_text_model, text_dims

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import ProgramSpec
    from ondevice.core.program import Batch, TorchProgram
    from ondevice.exporters.cuda.session import TorchProgramSession

log = logging.getLogger("ondevice.exporters")
QUANTIZE = ("none", "nf4", "int8")
TOLERANCE = {"cpu": 1e-6, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest relative error of a loss: on a CPU both sides compute the same, on a GPU in another
order."""
UPDATE_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}
"""Largest part of an update that may be wrong; an update that is missing is 1, one of the wrong
sign 2. Measured on an H200 over the four methods, three weights and five steps: 2.3e-5 in float32,
0.04 in 16 bits, in which AdamW's first steps have another sign for gradients near zero."""


class Cuda(Exporter):
    """Targets with one program and different pins; `spec.data` is their `Platform`."""

    def check(self, job: ExportJob) -> list[str]:
        """See `Exporter.check`."""
        packages = ["torch", "transformers"]
        if job.export.quantize == "nf4":
            packages.append("bitsandbytes")
        problems = [
            f"{package} is not installed: pip install 'ondevice-train[cuda]'"
            for package in packages
            if importlib.util.find_spec(package) is None
        ]
        if importlib.util.find_spec("torch") is None:
            return problems  # nothing of a program can be asked
        program: TorchProgram | None = self.program(job.method)
        if program is None:
            return [*problems, self.no_program(job.method)]
        problems += _settings(job) + program.problems(job.method)
        try:
            dims, _ = text_dims(job.model.source, job.model.revision)
            return problems + _sizes(job, dims)
        except OndeviceError as error:
            return [*problems, error.reason]

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Pack, write, and check against the rounded weights in plain layers; see
        `Exporter.export`."""
        if problems := self.check(job):
            raise ConfigError("cannot export: " + "; ".join(problems))
        out = Path(out)
        platform = self.spec.data
        check_free(out, job.overwrite)
        from ondevice.models.packed import save_packed
        from ondevice.nn.packed import pack_model

        dtype = self.spec.dtype(job.model)
        log.info("loading %s", job.model.source)
        loaded = load_text_model(
            job.model.source, revision=job.model.revision, dtype=dtype, device="cpu"
        )
        began = time.monotonic()
        if job.export.quantize != "none":
            log.info("packing the weights: %s", job.export.quantize)
            pack_model(loaded.family, job.export.quantize)
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            save_packed(loaded, job.export.quantize, folder / "model")
            save_tokenizer(loaded, folder / "tokenizer")
            write_task(job, loaded, folder)
            weights = sha256_file(folder / "model" / "model.safetensors")
            manifest = describe.manifest(self.spec, job, loaded, self.program(job.method))
            written = {
                **platform.requirements,
                manifest.program: describe.program(job, dtype, weights),
                "run.sh": describe.launcher(job.memory_limit_bytes or platform.memory_limit),
                "README.md": describe.readme(manifest, dtype, tuple(platform.requirements)),
            }
            for name, text in written.items():
                (folder / name).write_text(text, encoding="utf-8")
            (folder / "run.sh").chmod(0o755)
            seconds = time.monotonic() - began
            # Before the check, which opens the folder as a user would; an error there discards all
            # of it.
            write_manifest(manifest, folder)
            log.info("written in %.0f s; checking it against plain layers", seconds)
            check, program_spec = self._hold(folder, manifest, loaded, job, dtype)
            manifest = manifest.model_copy(update={"check": check, "program_spec": program_spec})
            write_manifest(manifest, folder)
            size = (folder / "model" / "model.safetensors").stat().st_size
        planned = {
            name: method.planned_bytes for name, method in manifest.program_spec.methods.items()
        }
        return ExportReport(
            path=out, target=self.spec.name, program_bytes=size, lowering_s=seconds, planned_bytes=planned,
            custom_ops=(), check=check, warnings=manifest.caveats, partition={"train_step": ()},
        )  # fmt: skip

    def _hold(
        self, folder: Path, manifest: Manifest, loaded: Any, job: ExportJob, dtype: str
    ) -> tuple[dict[str, Any], ProgramSpec]:
        """Return the check, and the program with its state's names; raises if the written session
        is not the method over the same weights."""
        from ondevice.nn.packed import unpack_model

        session = self._open(folder, manifest, "cpu")
        unpack_model(loaded.family)
        reference = open_session(loaded, job.method, job.seed)
        batches = text_batches(session, loaded.tokenizer, job.export.check_steps)
        check = compare(session, reference, batches, job.method.learning_rate, dtype)
        program_spec = name_state(manifest.program_spec, session)
        session.close()
        if not check["ok"]:
            raise VerificationError(
                "the artifact differs from the method over the same weights; nothing was written",
                received=json.dumps(check),
            )
        return check, program_spec

    def open(self, folder: Path, manifest: Manifest) -> TorchProgramSession:
        """Return a session on the GPU if there is one, else on the CPU."""
        return self._open(folder, manifest, None)

    def _open(self, folder: Path, manifest: Manifest, device: str | None) -> TorchProgramSession:
        from ondevice.exporters.cuda.session import TorchProgramSession

        return TorchProgramSession(folder, manifest, device)

    def verify(self, folder: Path, manifest: Manifest, request: VerifyRequest) -> dict[str, Any]:
        """Return packed weights against the original model's, rounded in the same way, in plain
        layers on the same device."""
        from ondevice.nn.packed import pack_model, unpack_model

        request.refuse_directions(manifest.target)
        source = request.model or manifest.model.source
        session = self.open(folder, manifest)
        loaded: Any = load_text_model(
            source, revision=manifest.model.revision, dtype=session.dtype, device="cpu"
        )
        check_model(loaded, source, manifest)
        if manifest.quantize != "none":
            pack_model(loaded.family, manifest.quantize)
            unpack_model(loaded.family)
        loaded.model.to(session.device)
        reference = open_session(loaded, session.config, session.seed, str(session.device))
        batches = request.batches(session, loaded.tokenizer, request.steps or DEFAULT_STEPS)
        result = compare(session, reference, batches, session.config.learning_rate, session.dtype)
        session.close()
        return result


def compare(
    session: Any, reference: Any, batches: Iterable[Batch], learning_rate: float, dtype: str
) -> dict[str, Any]:
    """Run the same steps on both sides; before each step the reference takes the session's state.

    So errors do not add up, and a wrong update must show in its own step: `update_error` is how far
    the two adapters are apart after it, as a part of how far the reference's moved. A zeroth-order
    reference moves by the session's projected gradients, because the difference of two nearly equal
    losses is mostly rounding in 16 bits.

    Returns:
        `steps`, `max_rel_loss_error`, `max_rel_loss_error_replayed` (the same: states are shared),
        `max_abs_adapter_error` after a step, `update_error`, `evaluation_error`, `backend`, `ok`.
    """
    errors = []
    adapter_errors = []
    update_errors = []
    rows = list(batches)
    with TemporaryDirectory() as folder:  # a method may look at rows before its first step
        session.before_step(0, lambda step: RowsOf(*rows[step % len(rows)]), Path(folder))
    for step, batch in enumerate(rows):
        before = session.state()
        reference.load_state(before)
        start = _vector(reference)
        ours, theirs = (side.step(*batch, step, learning_rate) for side in (session, reference))
        errors.append(_relative(ours.losses, theirs.losses))
        if ours.projected_gradients:
            reference.load_state(before)
            reference.apply_update(ours.projected_gradients, step, learning_rate)
        expected = _vector(reference)
        wrong = _vector(session) - expected
        adapter_errors.append(float(np.abs(wrong).max()))
        update_errors.append(float(np.linalg.norm(wrong) / np.linalg.norm(expected - start)))
    batch = rows[-1]
    reference.load_state(session.state())
    ours, count = session.evaluate(*batch)
    theirs, same = reference.evaluate(*batch)
    evaluation = float("inf")
    if np.array_equal(count, same):
        evaluation = _relative(ours, theirs)
    loss = max(errors)
    adapter = max(adapter_errors)
    update = float(np.max(update_errors))
    limit = TOLERANCE[dtype]
    within = update <= UPDATE_TOLERANCE[dtype]
    # On a CPU both sides run the same kernels, so the adapters must agree in absolute terms too.
    if session.backend == "torch-cpu":
        limit = TOLERANCE["cpu"]
        within = within and adapter <= limit
    within = within and loss <= limit and evaluation <= limit
    return {
        "steps": len(errors),
        "max_rel_loss_error": loss,
        "max_rel_loss_error_replayed": loss,
        "max_abs_adapter_error": adapter,
        "update_error": update,
        "evaluation_error": evaluation,
        "backend": session.backend,
        "ok": bool(within and np.isfinite(adapter)),
    }


def _vector(session: Any) -> np.ndarray:
    """All numbers of a session's adapter, float64, in the order of their names."""
    tensors = session.adapter().tensors
    return np.concatenate([tensors[name].astype(np.float64).ravel() for name in sorted(tensors)])


def _relative(received: Any, expected: Any) -> float:
    """Largest relative error; NaN if either side is not a number, which is below no limit."""
    theirs = np.asarray(expected, dtype=np.float64)
    wrong = np.abs(np.asarray(received, dtype=np.float64) - theirs)
    return float(np.max(wrong / np.maximum(np.abs(theirs), 1e-12)))


def _settings(job: ExportJob) -> list[str]:
    """Settings of the export that do not go together."""
    export = job.export
    problems = []
    if export.quantize not in QUANTIZE:
        problems.append(f"quantize {export.quantize} is for phones; expected {', '.join(QUANTIZE)}")
    others = {"form": "functional", "generator": "auto", "loss": "auto", "next_token": False}
    for name, expected in (others | {"context_tokens": None}).items():
        value = getattr(export, name)
        if value != expected:
            problems.append(f"{name} {value} is for ExecuTorch programs: leave it out")
    return problems


def _sizes(job: ExportJob, dims: ModelDims) -> list[str]:
    """Settings that the model's dimensions stand against."""
    if not dims.gated:
        return [
            f"{dims.family} has no layers that this target packs: {', '.join(families_with('gate_proj'))}"
        ]
    if dims.whole:
        raise dims.unknown("packing a block's matrices")
    dims.adapted(job.method)
    if dims.experts and job.export.quantize != "none":
        return [
            f"{dims.family} is a mixture of experts, whose matrices are one tensor a layer: this target packs linear "
            "layers, and the rest would be most of the model; expected --quantize none, which keeps the weights"
        ]
    return size_problems(job, dims)
