"""An export for a Qualcomm NPU: blocks in its delegates; embedding, head, loss and update around
them on the CPU.

P-RGE's step is one program with one delegate of all blocks, and is checked by directions. MeSP's
has functions of one block, compiled for each layer (`layers`), and is checked by the gradient of
every tensor.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ondevice.core.errors import ConfigError, VerificationError
from ondevice.core.target import WeightBytes, WeightPlacement
from ondevice.exporters.android_npu import qnn
from ondevice.exporters.base import VerifyRequest, beyond, text_batches
from ondevice.exporters.executorch.blocks_model import can_generate, check_blocks_model
from ondevice.exporters.executorch.target import ExecutorchTarget, log

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import Manifest
    from ondevice.core.program import Agreement, BuiltProgram, GraphProgram
    from ondevice.exporters.android_npu.session import NpuBlocksSession, NpuSession
    from ondevice.exporters.base import ExportJob
    from ondevice.exporters.executorch.lower import Lowered
    from ondevice.exporters.executorch.session import ExecutorchSession

SMALLEST_WIDTH = 64
"""Below it QNN 2.49 compiles programs that give wrong numbers at some batch sizes, and says nothing
(seen at 32)."""
TOLERANCE = {"none": {"loss": 1e-2, "update": 1.0}, "w8": {"loss": 5e-2, "update": 1.0}}
"""Largest errors by quantisation: of a loss, relative, with float16 in the blocks and with 8-bit
weights; of the update, as a part of what float32 on the CPU rounds, given the program's own
projected gradients."""
LEAST = {"sign_agreement": 0.85, "correlation": 0.9}
"""Agreement that eight directions must reach: one of them may be so close to zero that its sign is
chance."""
LEAST_COSINE, GRADIENT_LOSS = 0.999, 1e-2
"""Of each tensor's exact gradient with float32's, and the largest relative error of a loss."""
LOGIT_ERROR = 2e-2
"""Of logits behind a prompt that is read on the NPU, as a part of the largest."""
ENOUGH = 8
"""Directions below which signs and correlation are reported and not judged."""
DEFAULT_DIRECTIONS = 8


class AndroidNpu(ExecutorchTarget):
    """ExecuTorch programs with a part for one chip's NPU; QNN's simulator runs it here."""

    def problems(self, job: ExportJob, dims: ModelDims) -> list[str]:
        """Settings that only the NPU minds."""
        config = job.export
        problems = []
        if reason := qnn.problem():
            problems.append(reason)
        if unknown := [soc for soc in config.soc if soc not in self.spec.socs]:
            problems.append(
                f"soc {', '.join(unknown)} is not known; expected {', '.join(self.spec.socs)} or all"
            )
        if len(config.lengths_tokens) != 1:
            problems.append(
                "the NPU's program has one length: every bucket would store the model again"
            )
        if config.form != "functional":
            problems.append(f"form {config.form} does not go with the NPU: use functional")
        if config.quantize not in TOLERANCE:
            problems.append(f"quantize {config.quantize} is for the CPU; expected none or w8")
        if config.uses_ops:
            problems.append(
                "the NPU's program runs on a stock runtime: leave generator and loss at auto"
            )
        narrow = [
            name for name, (inputs, _) in dims.linear_shapes.items() if inputs < SMALLEST_WIDTH
        ]
        if narrow:
            problems.append(
                f"the NPU needs linear layers of {SMALLEST_WIDTH} inputs or more: {', '.join(narrow)}"
            )
        if (
            dims.gated
            and {"q", "k"} & {*dict(dims.traits.norms)}
            and dims.head_dim < SMALLEST_WIDTH
        ):
            problems.append(
                f"the NPU needs norms of {SMALLEST_WIDTH} numbers or more: heads have {dims.head_dim}"
            )
        if not dims.gated:
            problems.append(
                f"family {dims.family} has layer norms, which are not lowered to the NPU here"
            )
        return problems

    def lower(
        self, job: ExportJob, built: BuiltProgram, folder: Path
    ) -> tuple[BuiltProgram, Lowered]:
        """Compile the blocks for the chip, and lower the rest in XNNPACK's and the runtime's own
        kernels."""
        if built.parts is not None:
            from ondevice.exporters.android_npu.layers import lower_layers

            return lower_layers(job, built, folder)
        with qnn.quiet():
            from ondevice.exporters.android_npu.compile import compile_blocks
            from ondevice.exporters.executorch import lower as lowering
            from ondevice.exporters.executorch.rewrite import FusedRMSNorm, SigmoidGelu, rewritten

        (soc,) = job.export.soc
        assert built.blocks is not None and built.finish is not None  # noqa: S101 - a program of this kind has them
        log.info(
            "compiling %d blocks for the NPU of %s: two minutes for 30 blocks",
            built.loaded.dims.layers,
            soc,
        )
        (module, inputs), started = built.blocks, time.perf_counter()
        with rewritten(built.loaded.model, FusedRMSNorm, GELUTanh=SigmoidGelu):
            int8 = job.export.quantize == "w8"
            compiled = compile_blocks(module, inputs, soc, method="train_step", int8=int8)
        seconds = time.perf_counter() - started
        log.info("compiled in %.0f s; lowering the rest", seconds)
        built = replace(built, modules=built.finish(compiled.delegate))
        with rewritten(built.loaded.model), qnn.quiet():
            lowered = lowering.lower(built.modules)
        lowered.seconds += seconds
        return built, lowered

    def check_program(
        self, session: ExecutorchSession, program: GraphProgram, built: BuiltProgram, job: ExportJob
    ) -> tuple[dict[str, Any], list[str]]:
        """Check one step in the simulator, where it takes minutes, against float32 eager, and its
        update."""
        batches = text_batches(session, built.loaded.tokenizer, 1)
        agreement = program.compare(session, built, batches, job.method.learning_rate)
        if wrong := self._wrong(agreement, session.manifest.quantize):
            raise VerificationError(
                "the NPU's program does not follow eager PyTorch; nothing was written",
                expected="; ".join(expected for expected, _ in wrong),
                received="; ".join(received for _, received in wrong),
            )
        values = {**agreement.values, "backend": session.backend}
        if can_generate(session):
            values["max_rel_logit_error"] = check_blocks_model(
                cast(Any, session), built.loaded, LOGIT_ERROR
            )
        return values, []

    def _wrong(self, agreement: Agreement, quantize: str) -> list[Any]:
        if "min_gradient_cosine" in agreement.shares:
            return beyond(
                agreement, {"loss_free": GRADIENT_LOSS}, {"min_gradient_cosine": LEAST_COSINE}
            )
        judged = agreement.values["directions"] >= ENOUGH
        return beyond(agreement, TOLERANCE[quantize], LEAST if judged else None)

    def open(self, folder: Path, manifest: Manifest) -> NpuSession | NpuBlocksSession:
        """Open a session in the ExecuTorch runtime with QNN's simulator."""
        from ondevice.exporters.android_npu.session import NpuBlocksSession, NpuSession

        form = NpuBlocksSession if manifest.program_spec.shape == "blocks" else NpuSession
        return form(folder, manifest)

    def verify(self, folder: Path, manifest: Manifest, request: VerifyRequest) -> dict[str, Any]:
        """Gradients in the simulator and in float32 eager: projected ones, with several scales
        `scales` lists them all; or exact ones, by tensor."""
        if manifest.program_spec.shape == "blocks":
            return self._verify_blocks(folder, manifest, request)
        if request.steps is not None:
            raise ConfigError(
                "an NPU's program is checked by directions",
                expected="--directions N",
                received=f"--steps {request.steps}",
            )
        program, built = self.rebuild(folder, manifest, request)
        session = self.open(folder, manifest)
        results = []
        ports = manifest.program_spec.methods["train_step"].outputs
        (queries,) = (port.shape[0] for port in ports if port.role == "projected_gradients")
        steps = -(-(request.directions or DEFAULT_DIRECTIONS) // queries)
        scales = request.perturbation_scales or (session.constants["perturbation_scale"],)
        for scale in scales:
            session.restart()
            session.constants["perturbation_scale"] = scale
            batches = request.batches(session, built.loaded.tokenizer, steps)
            agreement = program.compare(session, built, batches, manifest.method["learning_rate"])
            wrong = self._wrong(agreement, manifest.quantize)
            broken = [f"expected {expected}, received {received}" for expected, received in wrong]
            results.append({**agreement.values, "broken": broken, "ok": not broken})
        answer = {
            **results[0],
            "quantize": manifest.quantize,
            "soc": manifest.soc,
            "backend": session.backend,
        }
        session.close()
        if len(results) > 1:
            answer |= {"scales": results, "ok": all(result["ok"] for result in results)}
        return answer

    def _verify_blocks(
        self, folder: Path, manifest: Manifest, request: VerifyRequest
    ) -> dict[str, Any]:
        request.refuse_directions("a program with exact gradients")
        program, built = self.rebuild(folder, manifest, request)
        session: Any = self.open(folder, manifest)
        batches = request.batches(session, built.loaded.tokenizer, request.steps or 1)
        agreement = program.compare(session, built, batches, manifest.method["learning_rate"])
        wrong = self._wrong(agreement, manifest.quantize)
        broken = [f"expected {expected}, received {received}" for expected, received in wrong]
        answers = {}
        if can_generate(session):
            try:
                answers["max_rel_logit_error"] = check_blocks_model(
                    session, built.loaded, LOGIT_ERROR
                )
            except VerificationError as error:
                broken.append(str(error))
        session.close()
        return {
            **agreement.values,
            **answers,
            "soc": manifest.soc,
            "backend": session.backend,
            "broken": broken,
            "ok": not broken,
        }


def placement(
    dims: ModelDims, weights: WeightBytes, export: ExportConfig, loss_tiles: int, evaluates: bool
) -> WeightPlacement:
    """Say where weights are: the blocks' linears are unpacked from the file into the NPU's memory,
    in float16 or int8, once, as there is one method. Embedding and head stay in the mapped file, in
    float32."""
    linears = weights.linears if export.quantize == "w8" else weights.linears // 2
    rest = sum(weights) - weights.linears
    notes = ("packed weights are the NPU's own copy; its scratch memory is not counted",)
    return WeightPlacement(rest, linears, 0, rest + linears, notes)
