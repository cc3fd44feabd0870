"""Target `android-cpu`: ExecuTorch with XNNPACK, and nothing that a stock runtime lacks unless asked."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.errors import ArtifactError, ConfigError, OndeviceError, VerificationError
from ondevice.exporters.base import ExportJob, ExportReport
from ondevice.methods.prge.config import PrgeConfig

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest

log = logging.getLogger("ondevice.exporters")

NAME = "android-cpu"
TOLERANCE = {"none": 1e-4, "q4": 1e-4, "8da4w": 5e-2}
"""Largest relative loss error of the program against eager, replayed, by quantisation."""
ADAPTER_TOLERANCE = 1e-5
DIRECTIONS = 12
"""Projected gradients at least that a correlation is taken over."""


class Target:
    """ExecuTorch programs for phones' CPUs; they run on any CPU that ExecuTorch supports."""

    def check(self, job: ExportJob) -> list[str]:
        """Every reason why `job` cannot be exported; no weights are loaded."""
        from ondevice.models import read_dims

        problems = []
        if importlib.util.find_spec("executorch") is None:
            problems.append("executorch is not installed: pip install 'ondevice-train[executorch]'")
        if not isinstance(job.method, PrgeConfig):
            return [*problems, f"method {job.method.name} does not export to {NAME}: use --method prge"]
        if job.method.form != "master" or not (job.method.inner_loop and job.method.outer_loop):
            problems.append(
                "an exported step has form master, inner_loop and outer_loop: the others are eager baselines"
            )
        if job.export.quantize == "8da4w" and importlib.util.find_spec("torchao") is None:
            problems.append("torchao is not installed: pip install 'ondevice-train[executorch]'")
        if job.export.uses_ops and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            problems.append(
                "this program needs the project's ops and no C++ compiler was found: install g++ or clang++"
            )
        try:
            dims = read_dims(job.model.source, job.model.revision)
        except OndeviceError as error:
            return [*problems, str(error)]
        try:
            for target in job.method.targets:
                dims.linear_shape(target)
        except OndeviceError as error:
            problems.append(str(error))
        if job.method.top_layers is not None and job.method.top_layers > dims.layers:
            problems.append(f"top_layers is {job.method.top_layers} and the model has {dims.layers} layers")
        if max(job.export.lengths_tokens) > dims.max_positions:
            problems.append(
                f"lengths_tokens {max(job.export.lengths_tokens)} exceeds the model's {dims.max_positions} positions"
            )
        widths = {"hidden": dims.hidden, "ff": dims.intermediate, "heads": dims.heads * dims.head_dim}
        if job.export.quantize != "none" and any(width % 32 for width in widths.values()):
            listed = ", ".join(f"{name} {width}" for name, width in widths.items())
            problems.append(f"{job.export.quantize} needs dimensions that are multiples of 32: {listed}")
        return problems

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Load, author, lower, check against eager, and write the artifact; see `Exporter.export`."""
        problems = self.check(job)
        if problems:
            raise ConfigError("cannot export: " + "; ".join(problems))
        out = Path(out)
        _check_free(out, job.overwrite)
        from ondevice.exporters.executorch import author as authoring
        from ondevice.exporters.executorch.describe import describe, readme
        from ondevice.exporters.executorch.lower import lower
        from ondevice.exporters.executorch.programs import build_methods
        from ondevice.exporters.executorch.rewrite import rewritten
        from ondevice.models import load_model, save_tokenizer

        log.info("loading %s", job.model.source)
        loaded = load_model(job.model.source, revision=job.model.revision, dtype="float32", device="cpu")
        names = {
            (layer, target): loaded.family.linear_name(layer, target)
            for layer in range(loaded.dims.layers)
            for target in job.method.targets
        }
        config = job.export
        stateful = config.form == "stateful"
        program = authoring.author(loaded, job.method, config, job.seed)
        methods = build_methods(program, config.lengths_tokens, config.batch_size, config.eval_batch_size, stateful)
        log.info("lowering %s: some minutes for 30 layers", ", ".join(method.name for method in methods))
        with rewritten(loaded.model):
            lowered = lower(methods, stateful=stateful, quantized_fusion=config.quantize == "8da4w")
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            (folder / "program.pte").write_bytes(lowered.buffer)
            save_tokenizer(loaded, folder / "tokenizer")
            manifest = describe(NAME, job, loaded, program, methods, lowered, names)
            (folder / "README.md").write_text(readme(manifest), encoding="utf-8")
            log.info("lowered in %.0f s; checking %d steps against eager", lowered.seconds, config.check_steps)
            check, warnings = self._check(folder, manifest, program, job)
            from ondevice.artifact.manifest import write_manifest

            manifest = manifest.model_copy(update={"check": check})
            write_manifest(manifest, folder)
        return ExportReport(
            path=out,
            target=NAME,
            program_bytes=len(lowered.buffer),
            lowering_s=lowered.seconds,
            planned_bytes=lowered.planned_bytes,
            custom_ops=manifest.custom_ops,
            check=check,
            warnings=tuple(warnings),
        )

    def _check(
        self, folder: Path, manifest: Manifest, program: Any, job: ExportJob
    ) -> tuple[dict[str, Any], list[str]]:
        """N steps against eager and an adapter round trip; raises before anything is renamed into place."""
        from ondevice.exporters.executorch.check import compare, random_batches
        from ondevice.runtime.executorch import ExecutorchSession

        session = ExecutorchSession(folder, manifest)
        vocabulary = manifest.model.dims["vocab"]
        batches = random_batches(session, vocabulary, job.export.check_steps)
        result = compare(session, program, batches, job.method.learning_rate)
        limit = TOLERANCE[job.export.quantize]
        if not result.max_rel_loss_error_replayed <= limit or not result.max_abs_adapter_error <= ADAPTER_TOLERANCE:
            raise VerificationError(
                "the program does not do what eager PyTorch does; nothing was written",
                expected=f"relative loss error <= {limit:g}, adapter error <= {ADAPTER_TOLERANCE:g}",
                received=f"{result.max_rel_loss_error_replayed:.3g}, {result.max_abs_adapter_error:.3g}",
            )
        with tempfile.TemporaryDirectory() as temporary:
            save_adapter(session.adapter(), Path(temporary) / "adapter")
            flat = session.flat().copy()
            session.load_adapter(load_adapter(Path(temporary) / "adapter"))
        used = np.zeros(len(flat), dtype=bool)
        for entry in program.layout.entries:
            used[entry.offset : entry.offset + entry.count] = True
        if not np.array_equal(session.flat()[used], flat[used]):
            raise VerificationError("the adapter does not survive saving and loading; nothing was written")
        check = {**result.to_dict(), "adapter_round_trip": True}
        if job.export.quantize == "8da4w":
            check["gradient_correlation_float32"] = _against_float32(session, job, vocabulary)
        session.close()
        return check, _warnings(job, check)


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuse a place that cannot be written before minutes are spent on a program."""
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file", expected="a folder or a free name", hint="choose another name")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ArtifactError(f"{out} is not empty", hint="choose another folder, or pass --overwrite")
    if not (out / MANIFEST_NAME).is_file():
        raise ArtifactError(
            f"{out} is not an artifact and is not replaced",
            expected=MANIFEST_NAME,
            received=min(p.name for p in out.iterdir()),
            hint="choose another folder, or empty this one yourself",
        )


def _against_float32(session: Any, job: ExportJob, vocabulary: int) -> float:
    """What quantisation did to the projected gradients: the program against the float32 model in eager."""
    from ondevice.exporters.executorch.author import author
    from ondevice.exporters.executorch.check import gradient_correlation, random_batches
    from ondevice.models import load_model

    loaded = load_model(job.model.source, revision=job.model.revision, dtype="float32", device="cpu")
    plain = job.export.model_copy(update={"quantize": "none"})
    program = author(loaded, job.method, plain, job.seed)
    steps = max(job.export.check_steps, -(-DIRECTIONS // job.method.queries))
    return gradient_correlation(session, program, random_batches(session, vocabulary, steps))


def _warnings(job: ExportJob, check: dict[str, Any]) -> list[str]:
    if job.export.quantize == "8da4w" and job.method.perturbation_scale < 3e-2:
        return [
            f"8da4w rounds activations to 8 bits: at perturbation scale {job.method.perturbation_scale:g} "
            f"the projected gradients correlate {check['gradient_correlation_float32']:.2f} with float32's; "
            "use --quantize q4, or a scale of 3e-2 or more"
        ]
    return []
