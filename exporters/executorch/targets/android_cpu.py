"""Target `android-cpu`: ExecuTorch with XNNPACK, and nothing that a stock runtime lacks unless asked."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.errors import VerificationError
from ondevice.exporters.executorch.mesp import job as mesp
from ondevice.exporters.executorch.target import ExecutorchTarget, check_round_trip, log

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest
    from ondevice.exporters.base import ExportJob
    from ondevice.exporters.executorch.lower import Lowered
    from ondevice.exporters.executorch.programs import MethodSpec
    from ondevice.models import LoadedModel, ModelDims

TOLERANCE = {"none": 1e-4, "q4": 1e-4, "8da4w": 5e-2}
"""Largest relative loss error of the program against eager, replayed, by quantisation."""
ADAPTER_TOLERANCE = 1e-5
DIRECTIONS = 12
"""Projected gradients at least that a correlation is taken over."""


class Target(ExecutorchTarget):
    """ExecuTorch programs for phones' CPUs; they run on any CPU that ExecuTorch supports."""

    name = "android-cpu"
    methods: ClassVar[tuple[str, ...]] = ("prge", "mesp")

    def problems(self, job: ExportJob, dims: ModelDims) -> list[str]:
        if job.method.name == "mesp":
            return mesp.problems(job, dims)
        problems = []
        if job.export.quantize not in TOLERANCE:
            problems.append(f"quantize {job.export.quantize} is for the NPU; expected {', '.join(TOLERANCE)}")
        if job.export.next_token and (job.export.form != "functional" or job.export.quantize != "none"):
            problems.append("next_token goes with form functional and float32 weights")
        if job.export.quantize == "8da4w" and importlib.util.find_spec("torchao") is None:
            problems.append("torchao is not installed: pip install 'ondevice-train[executorch]'")
        if job.export.uses_ops and not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
            problems.append(
                "this program needs the project's ops and no C++ compiler was found: install g++ or clang++"
            )
        widths = {"hidden": dims.hidden, "ff": dims.intermediate, "heads": dims.heads * dims.head_dim}
        if job.export.quantize != "none" and any(width % 32 for width in widths.values()):
            listed = ", ".join(f"{name} {width}" for name, width in widths.items())
            problems.append(f"{job.export.quantize} needs dimensions that are multiples of 32: {listed}")
        return problems

    def build(self, job: ExportJob, loaded: LoadedModel) -> tuple[Any, list[MethodSpec], Lowered]:
        if job.method.name == "mesp":
            log.info("lowering a step of exact gradients: some ten seconds a layer")
            return mesp.build(job, loaded)
        from ondevice.exporters.executorch import author as authoring
        from ondevice.exporters.executorch.lower import lower
        from ondevice.exporters.executorch.programs import build_methods
        from ondevice.exporters.executorch.rewrite import rewritten

        config, stateful = job.export, job.export.form == "stateful"
        program = authoring.author(loaded, job.method, config, job.seed)
        methods = build_methods(
            program, config.lengths_tokens, config.batch_size, config.eval_batch_size, stateful, config.next_token
        )
        log.info("lowering %s: some minutes for 30 layers", ", ".join(method.name for method in methods))
        with rewritten(loaded.model):
            lowered = lower(methods, stateful=stateful, quantized_fusion=config.quantize == "8da4w")
        return program, methods, lowered

    def verify(
        self, folder: Path, manifest: Manifest, program: Any, job: ExportJob
    ) -> tuple[dict[str, Any], list[str]]:
        """N steps against eager and an adapter round trip; raises before anything is renamed into place."""
        if job.method.name == "mesp":
            return mesp.verify(folder, manifest, program, job), []
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
        check_round_trip(session, program.layout.entries)
        check = {**result.to_dict(), "adapter_round_trip": True}
        if job.export.quantize == "8da4w":
            check["gradient_correlation_float32"] = _against_float32(session, job, vocabulary)
        session.close()
        return check, _warnings(job, check)


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
