"""An export for a CPU: this project's ops or a stock runtime, and XNNPACK's products."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ondevice.artifact.manifest import ANSWERS
from ondevice.core.dims import MoeDims
from ondevice.core.errors import VerificationError
from ondevice.core.manifest import kind_of
from ondevice.core.target import WeightBytes, WeightPlacement
from ondevice.exporters.base import DEFAULT_STEPS, VerifyRequest, beyond, text_batches
from ondevice.exporters.executorch.blocks import BlocksSession
from ondevice.exporters.executorch.blocks_model import can_generate, check_blocks_model
from ondevice.exporters.executorch.packed import has_answers
from ondevice.exporters.executorch.session import ExecutorchSession
from ondevice.exporters.executorch.target import ExecutorchTarget, log
from ondevice.models.text_model import load_text_model

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import Manifest
    from ondevice.core.program import Agreement, BuiltProgram, GraphProgram, ProgramModule
    from ondevice.exporters.base import ExportJob
    from ondevice.exporters.executorch.lower import Lowered

TOLERANCE = {
    "none": {"loss": 1e-5, "loss_free": 1e-4, "update": 1.0, "gradient": 2e-4},
    "q4": {"loss": 1e-4, "loss_free": 1e-3, "update": 1.0, "gradient": 1e-4},
    "q4dq": {"loss_free": 1e-3, "gradient": 1e-4},
    "8da4w": {"loss": 5e-2, "loss_free": 1e-1, "update": 1.0},
    "int8": {"loss_free": 1e-4, "gradient": 1e-4},
    "8da8w": {"loss_free": 5e-2},
}
"""Largest errors against eager over the same rounded weights, relative, by quantisation, and of an
update as a part of what float32 rounds (`prge.rounding`); see `core.program.Agreement`. Measured in
float32: 6e-7 of a loss from the same state, 5.3e-7 free-running. A gradient's: XNNPACK adds the
terms of a product one after the other. Over 30 layers and 8 rows of 32 tokens the worst tensor is
1.1e-4 from float64 (the median 2e-5) where the runtime's own kernels are 2e-5 and eager PyTorch
6e-6."""
LEAST = {"8da8w": {"gradient_cosine": 0.9}, "8da4w": {"gradient_cosine": 0.95}}
"""Of what must be large against the same eager PyTorch, whose activations and gradients are not
rounded."""
ROUNDED_LOGITS = 5e-2
"""Largest error of a logit behind activations in 8 bits, as a part of the largest logit."""
PACKED_FROM_ROWS = 16
"""Hidden states from which XNNPACK takes the products of a block program in float32."""
LEAST_COSINE_FLOAT32 = 0.5
"""Of the gradient of rounded weights with float32's, if a method measures it; 4 bits have 0.69
on weights that lie on no grid of 4 bits."""


class AndroidCpu(ExecutorchTarget):
    """ExecuTorch programs for phones' CPUs; they run on any CPU that ExecuTorch supports."""

    def problems(self, job: ExportJob, dims: ModelDims) -> list[str]:
        """Return settings that only a CPU minds."""
        problems = []
        if job.export.quantize not in TOLERANCE:
            problems.append(
                f"quantize {job.export.quantize} is for another target; expected {', '.join(TOLERANCE)}"
            )
        program: GraphProgram = self.program(job.method)
        # Torchao's levels, unless the method's own program chooses them.
        packs = job.export.quantize == "8da4w" and "8da4w" not in program.chosen
        if packs and importlib.util.find_spec("torchao") is None:
            problems.append("torchao is not installed: pip install 'ondevice-train[executorch]'")
        if job.export.kernels == "stock" and program.uses_ops(job.export):
            problems.append("export.kernels is stock, and this program needs the project's ops")
        if program.uses_ops(job.export) and not any(
            shutil.which(name) for name in ("c++", "g++", "clang++")
        ):
            problems.append(
                "this program needs the project's ops and no C++ compiler was found: install g++ or clang++"
            )
        widths = _widths(dims)
        if job.export.quantize != "none" and any(width % 32 for _, width in widths):
            listed = ", ".join(f"{name} {width}" for name, width in widths)
            problems.append(
                f"{job.export.quantize} needs dimensions that are multiples of 32: {listed}"
            )
        return problems

    def lower(
        self, job: ExportJob, built: BuiltProgram, folder: Path
    ) -> tuple[BuiltProgram, Lowered]:
        """Return the program in XNNPACK's and the runtime's own kernels."""
        from ondevice.exporters.executorch import lower as lowering
        from ondevice.exporters.executorch.rewrite import rewritten

        if built.shape == "blocks":
            log.info("lowering %s", ", ".join(module.name for module in built.modules))
            of_all = [module for module in built.modules if not module.per_layer]
            of_kinds: dict[int, list[ProgramModule]] = {}
            for module in built.modules:
                if module.per_layer:
                    of_kinds.setdefault(kind_of(module.name), []).append(module)
            rows = PACKED_FROM_ROWS if job.export.quantize == "none" else None
            lowered = lowering.lower_portable(of_all, packed_from_rows=rows)
            for _, of_layers in sorted(of_kinds.items()):
                lowered = lowered.with_layers(lowering.lower_portable(of_layers, integers=True))
            return built, lowered
        log.info(
            "lowering %s: some minutes for 30 layers",
            ", ".join(module.name for module in built.modules),
        )
        buffers = [tensor.name for tensor in built.state if tensor.kept == "program"]
        with rewritten(built.loaded.model):
            fused = job.export.quantize == "8da4w"
            return built, lowering.lower(built.modules, buffers=buffers, quantized_fusion=fused)

    def check_program(
        self, session: ExecutorchSession, program: GraphProgram, built: BuiltProgram, job: ExportJob
    ) -> tuple[dict[str, Any], list[str]]:
        """Return N steps against eager; raises before anything is renamed into place."""
        quantize = job.export.quantize
        batches = text_batches(session, built.loaded.tokenizer, job.export.check_steps)
        agreement = program.compare(session, built, batches, job.method.learning_rate)
        _refuse(agreement, quantize)
        if session.fused:
            stock = BlocksSession(session.folder, session.manifest, stock=True)
            batches = text_batches(stock, built.loaded.tokenizer, job.export.check_steps)
            _refuse(program.compare(stock, built, batches, job.method.learning_rate), quantize)
            if can_generate(stock):
                check_blocks_model(cast(Any, stock), built.loaded)
            stock.close()
        if can_generate(session):
            limit = ROUNDED_LOGITS if session.fused and quantize == "8da4w" else 0.0
            agreement.values["max_rel_logit_error"] = check_blocks_model(
                cast(Any, session), built.loaded, limit
            )
        if quantize not in program.rounded or program.rounding is None:
            return agreement.values, []
        loaded = load_text_model(
            job.model.source, revision=job.model.revision, dtype="float32", device="cpu"
        )
        plain = job.export.model_copy(update={"quantize": "none"})
        values, warnings = program.rounding(
            session,
            program.build(loaded, job.method, plain, job.seed),
            job.method,
            lambda steps: text_batches(
                session, loaded.tokenizer, max(steps, job.export.check_steps)
            ),
        )
        if not (cosine := values.get("gradient_cosine_float32", 1.0)) >= LEAST_COSINE_FLOAT32:
            raise VerificationError(
                f"{quantize} makes another model of this one; nothing was written",
                expected=f"cosine of its gradient with float32's >= {LEAST_COSINE_FLOAT32:g}",
                received=f"{cosine:.3g}",
                hint="--quantize int8 rounds least, none not at all",
            )
        return agreement.values | values, warnings

    def open(self, folder: Path, manifest: Manifest) -> ExecutorchSession:
        """Return a session in the ExecuTorch runtime."""
        if manifest.program_spec.shape == "blocks":
            return BlocksSession(folder, manifest)
        return ExecutorchSession(folder, manifest)

    def verify(self, folder: Path, manifest: Manifest, request: VerifyRequest) -> dict[str, Any]:
        """Run steps of the program and of eager, and measure how far they are apart."""
        request.refuse_directions(manifest.target)
        program, built = self.rebuild(folder, manifest, request)
        session = self.open(folder, manifest)
        batches = request.batches(session, built.loaded.tokenizer, request.steps or DEFAULT_STEPS)
        agreement = program.compare(session, built, batches, manifest.method["learning_rate"])
        session.close()
        backend = session.backend
        if built.shape == "step":
            backend += "-xnnpack"
        ok = not _wrong(agreement, manifest.quantize)
        answers = {}
        if has_answers(folder / ANSWERS):
            from ondevice.exporters.executorch.answers import verify_answers

            source = request.model or manifest.model.source
            # Again: the program's own copy was rounded.
            loaded = load_text_model(
                source, revision=manifest.model.revision, dtype="float32", device="cpu"
            )
            try:
                answers = {
                    f"answers_{key}": value
                    for key, value in verify_answers(folder / ANSWERS, loaded).items()
                }
            except VerificationError as error:
                ok = False
                answers = {"answers": str(error)}
        return {**agreement.values, **answers, "backend": backend, "ok": ok}


def _widths(dims: ModelDims) -> list[tuple[str, int]]:
    """Return what the matrices of blocks have as inputs, by name; layers may differ."""
    every = range(dims.layers)
    widths = [("hidden", dims.hidden)]
    widths += [("ff", width) for width in dict.fromkeys(map(dims.mlp_width, every))]
    heads = dict.fromkeys(dims.heads * dims.head_width(layer) for layer in every)
    widths += [("heads", width) for width in heads]
    if dims.traits.layer_input:
        widths.append(("layer_input", dims.traits.layer_input))
    if isinstance(dims, MoeDims):
        widths.append(("expert", dims.expert_intermediate))
        if dims.dense_layers:
            widths.append(("dense", dims.dense_intermediate))
    return widths


def _wrong(agreement: Agreement, quantize: str) -> list[Any]:
    """Return (expected, received) of every limit that is not kept; a zeroth-order program has no
    cosine."""
    least = LEAST[quantize] if quantize in LEAST and agreement.shares else None
    return beyond(agreement, TOLERANCE[quantize], least)


def _refuse(agreement: Agreement, quantize: str) -> None:
    if wrong := _wrong(agreement, quantize):
        raise VerificationError(
            "the program does not do what eager PyTorch does; nothing was written",
            expected=", ".join(expected for expected, _ in wrong),
            received=", ".join(received for _, received in wrong),
        )


def placement(
    dims: ModelDims, weights: WeightBytes, export: ExportConfig, loss_tiles: int, evaluates: bool
) -> WeightPlacement:
    """Place the weights as ExecuTorch does: it maps the file. XNNPACK packs each linear it runs
    into anonymous memory, once for each loaded method, and does not read the file's copy again;
    this project's q4 op reads the mapped file itself."""
    if export.quantize == "q4":
        return WeightPlacement(sum(weights), 0, 0, sum(weights))
    loaded = len(export.lengths_tokens) * (1 + evaluates)
    packed, arena = weights.linears, 0
    if export.quantize == "8da4w":
        packed += weights.head
    elif export.loss != "op":
        # A tile of the head is sliced out of the mapped table, and packed.
        tiles = 1 if export.loss == "plain" else loss_tiles
        arena = 2 * -(-dims.vocab // tiles) * dims.hidden * 4
    notes = ()
    if packed and loaded > 1:
        notes = (f"XNNPACK packs the linears once for each of {loaded} loaded methods",)
    return WeightPlacement(sum(weights) - packed, packed * loaded, arena, sum(weights), notes)
