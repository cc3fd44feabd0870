"""Target `android-npu`: the blocks on a Qualcomm NPU through QNN, everything else in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.errors import VerificationError
from ondevice.exporters.executorch.target import ExecutorchTarget, check_round_trip, log
from ondevice.runtime import qnn

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest
    from ondevice.exporters.base import ExportJob
    from ondevice.exporters.executorch.lower import Lowered
    from ondevice.exporters.executorch.programs import MethodSpec
    from ondevice.models import LoadedModel, ModelDims

SOCS = {
    "SM8450": "Snapdragon 8 Gen 1",
    "SM8475": "Snapdragon 8+ Gen 1",
    "SM8550": "Snapdragon 8 Gen 2",
    "SM8650": "Snapdragon 8 Gen 3",
    "SM8750": "Snapdragon 8 Elite",
    "SM8845": "Snapdragon 8 Gen 5",
    "SM8850": "Snapdragon 8 Elite Gen 5",
}
"""Phone chips whose NPU computes in float16."""
PERTURBATION_SCALE = 3e-2
"""The default here, three times the method's: float16 leaves an error of some 0.01 in the difference of two losses,
which a larger step makes small beside it (docs/android.md has the curve)."""
SMALLEST_WIDTH = 64
"""Below it QNN 2.49 compiles programs that give wrong numbers at some batch sizes, and says nothing (seen at 32)."""


class Target(ExecutorchTarget):
    """One delegate of all blocks; embedding, noise, loss, projected gradient and update around it."""

    name = "android-npu"
    socs = SOCS
    perturbation_scale = PERTURBATION_SCALE

    def problems(self, job: ExportJob, dims: ModelDims) -> list[str]:
        config, problems = job.export, []
        if reason := qnn.problem():
            problems.append(reason)
        if unknown := [soc for soc in config.soc if soc not in SOCS]:
            problems.append(f"soc {', '.join(unknown)} is not known; expected {', '.join(SOCS)} or all")
        if len(config.lengths_tokens) != 1:
            problems.append("the NPU's program has one length: every bucket would store the model again")
        if config.form != "functional":
            problems.append(f"form {config.form} does not go with the NPU: use functional")
        if config.quantize not in ("none", "w8"):
            problems.append(f"quantize {config.quantize} is for the CPU; expected none or w8")
        if config.next_token:
            problems.append("next_token is for the CPU: the NPU's program has one method")
        if config.uses_ops:
            problems.append("the NPU's program runs on a stock runtime: leave generator and loss at auto")
        narrow = [name for name, (inputs, _) in dims.linear_shapes.items() if inputs < SMALLEST_WIDTH]
        if narrow:
            problems.append(f"the NPU needs linear layers of {SMALLEST_WIDTH} inputs or more: {', '.join(narrow)}")
        if not dims.gated:
            problems.append(f"family {dims.family} has layer norms, which are not lowered to the NPU here")
        return problems

    def build(self, job: ExportJob, loaded: LoadedModel) -> tuple[Any, list[MethodSpec], Lowered]:
        qnn.load_compiler()
        with qnn.quiet():
            from ondevice.exporters.executorch import author as authoring
            from ondevice.exporters.executorch.lower import lower
            from ondevice.exporters.executorch.qnn.body import compile_body
            from ondevice.exporters.executorch.qnn.program import example_body_inputs, npu_methods
            from ondevice.exporters.executorch.rewrite import rewritten

        config, (soc,), (length,) = job.export, job.export.soc, job.export.lengths_tokens
        program = authoring.author(loaded, job.method, config, job.seed)
        rows = job.method.copies * config.batch_size
        log.info("compiling %d blocks for the NPU of %s: two minutes for 30 blocks", loaded.dims.layers, soc)
        inputs = example_body_inputs(program, rows, length)
        body, seconds = compile_body(
            program, inputs, soc, unrolled=config.rows == "unrolled", int8=config.quantize == "w8"
        )
        log.info("compiled in %.0f s; lowering the rest", seconds)
        methods = npu_methods(program, body, rows, length)
        with rewritten(loaded.model), qnn.quiet():
            lowered = lower(methods)
        lowered.seconds += seconds
        return program, methods, lowered

    def verify(
        self, folder: Path, manifest: Manifest, program: Any, job: ExportJob
    ) -> tuple[dict[str, Any], list[str]]:
        """One step in the simulator against float32 eager, the update it made, and an adapter round trip."""
        from ondevice.exporters.executorch.check import random_batches
        from ondevice.exporters.executorch.qnn.check import agreement
        from ondevice.runtime.npu import NpuSession

        session = NpuSession(folder, manifest)
        batches = random_batches(session, manifest.model.dims["vocab"], 1)
        result = agreement(session, program, batches, job.method.learning_rate, job.method.perturbation_scale)
        if reasons := result.reasons(manifest.quantize):
            raise VerificationError(
                "the NPU's program does not follow eager PyTorch; nothing was written",
                expected="; ".join(expected for expected, _ in reasons),
                received="; ".join(received for _, received in reasons),
            )
        check_round_trip(session, program.layout.entries)
        session.close()
        return {**result.to_dict(), "backend": session.backend, "adapter_round_trip": True}, []
