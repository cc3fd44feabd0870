"""The blocks of a model, with all copies of the adapter as inputs, compiled into one QNN delegate.

The delegate ends at the hidden state. Loss, projected gradient, update and noise stay on the CPU in float32: inside
the delegate's float16 the difference of two losses would be one rounding step (measured: half of the projected
gradients were exactly zero).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
from executorch.backends.qualcomm.utils.utils import (
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch import Tensor, nn

from ondevice.errors import ConfigError, VerificationError
from ondevice.exporters.executorch.lower import shared_records
from ondevice.exporters.executorch.rewrite import FusedRMSNorm, rewritten
from ondevice.runtime import qnn

if TYPE_CHECKING:
    from ondevice.methods.prge.torch import PrgeProgram

METHOD = "train_step"
"""The compiled graph carries the name of the program's method: the runtime looks it up by that."""


class Body(nn.Module):
    """All blocks: hidden [copies * batch, T, D] and one B [copies, rank, outputs] for each linear to the new hidden.

    Args:
        program: the training program whose model and layout these are.
        length_tokens: T.
        unrolled: run row after row with shared weights instead of one batch.
    """

    cos: Tensor
    sin: Tensor
    mask: Tensor

    def __init__(self, program: PrgeProgram, length_tokens: int, unrolled: bool = False) -> None:
        super().__init__()
        self.model, self.family, self.unrolled = program.model, program.family, unrolled
        positions = {entry: index for index, entry in enumerate(program.layout.entries)}
        self.slots = [
            [(program.linears[entry].slot, positions[entry]) for entry in program.layout.of_layer(layer)]
            for layer in range(program.family.dims.layers)
        ]
        cos, sin = program.family.positions(length_tokens, "cpu", torch.float32)
        # Constants: the angles would be rounded to float16, which has steps of 1/32 at position 63.
        self.register_buffer("cos", cos.detach().clone())
        self.register_buffer("sin", sin.detach().clone())
        self.register_buffer("mask", torch.full((1, 1, length_tokens, length_tokens), -1e4).triu(1))

    def forward(self, hidden: Tensor, *b: Tensor) -> Tensor:
        if not self.unrolled:
            return self._rows(hidden, b)
        rows, copies = hidden.shape[0], b[0].shape[0]
        parts = []
        for row in range(rows):
            copy = row // (rows // copies)
            parts.append(self._rows(hidden[row : row + 1], tuple(value[copy : copy + 1] for value in b)))
        return torch.cat(parts)

    def _rows(self, hidden: Tensor, b: tuple[Tensor, ...]) -> Tensor:
        for layer, slots in enumerate(self.slots):
            for slot, index in slots:
                slot.copies = b[index]
            hidden = self.family.block(layer, hidden, (self.cos, self.sin), self.mask)
            for slot, _ in slots:
                slot.copies = None
        return hidden


def compile_body(
    program: PrgeProgram, inputs: tuple[Tensor, ...], soc: str, *, unrolled: bool = False, int8: bool = False
) -> tuple[Any, float]:
    """One delegate of all blocks, as a module that a program can call, and the seconds it took.

    Args:
        inputs: example inputs of `Body.forward`, of the shapes that the program will use.
        soc: a name of `QcomChipset`, such as SM8650.
        unrolled: row after row instead of one batch.
        int8: frozen linear weights as int8 with a scale for each output; activations stay float16.

    Raises:
        ConfigError: the model has an operator that QNN does not take.
        VerificationError: QNN's compiler failed; the note holds its own words.
    """
    started = time.perf_counter()
    specs = generate_qnn_executorch_compiler_spec(QcomChipset[soc], generate_htp_compiler_spec(use_fp16=True))
    body: nn.Module = Body(program, inputs[0].shape[1], unrolled).eval()
    try:
        with torch.no_grad(), rewritten(program.model, FusedRMSNorm), shared_records(), qnn.quiet():
            example: Any = {METHOD: inputs}
            if int8:
                body = _with_int8_weights(body, inputs, soc)
            edge = to_edge_transform_and_lower_to_qnn({METHOD: body}, example, {METHOD: specs})
    except (RuntimeError, AssertionError) as error:
        raise VerificationError(
            f"QNN's compiler failed for {soc}",
            received="; ".join([str(error).splitlines()[0], *getattr(error, "__notes__", [])]),
            hint="try another --soc, or a smaller --batch-size, --queries or --length",
        ) from error
    graph = edge.exported_program(METHOD).graph_module
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    outside = sorted({str(node.target) for node in calls if not _of_delegate(node)})
    modules = get_lowered_backend_modules(graph)
    if outside or len(modules) != 1:
        raise ConfigError(
            "QNN does not take the whole model",
            expected="one delegate",
            received=f"{len(modules)} delegates, and outside of them {', '.join(outside) or 'nothing'}",
        )
    call = next(node for node in calls if node.target is executorch_call_delegate)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if [*call.args[1:]] != placeholders:
        raise VerificationError("QNN changed the order of the inputs", received=str(call.args[1:]))
    return modules[0], time.perf_counter() - started


def _with_int8_weights(body: nn.Module, inputs: tuple[Tensor, ...], soc: str) -> nn.Module:
    """Every linear with int8 weights; nothing is calibrated, because no activation is quantised."""
    from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
    from executorch.backends.qualcomm.serialization.qc_schema import QnnExecuTorchBackendType
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = QnnQuantizer(backend=QnnExecuTorchBackendType.kHtpBackend, soc_model=QcomChipset[soc])
    quantizer.set_default_quant_config(QuantDtype.use_fp16a8w, is_linear_per_channel=True)
    prepared = prepare_pt2e(torch.export.export(body, inputs, strict=True).module(), quantizer)
    prepared(*inputs)
    return convert_pt2e(prepared)


def _of_delegate(node: Any) -> bool:
    return node.target is executorch_call_delegate or "getitem" in str(node.target)
