"""The blocks of a model compiled into one QNN delegate."""

from __future__ import annotations

import time
from typing import Any

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

from ondevice.core.errors import ConfigError, VerificationError
from ondevice.exporters.android_npu import qnn
from ondevice.exporters.executorch.lower import shared_records
from ondevice.exporters.executorch.rewrite import FusedRMSNorm, rewritten

METHOD = "train_step"
"""The compiled graph carries the name of the program's method: the runtime looks it up by that."""


def compile_blocks(
    blocks: nn.Module, model: nn.Module, inputs: tuple[Tensor, ...], soc: str, *, int8: bool = False
) -> tuple[Any, float]:
    """One delegate of all blocks, as a module that a program can call, and the seconds it took.

    Args:
        blocks: a module of nothing else.
        model: whose norms and attention they are.
        inputs: example inputs, of the shapes that the program will use.
        soc: a name of `QcomChipset`, such as SM8650.
        int8: frozen linear weights as int8 with a scale for each output; activations stay float16.

    Raises:
        ConfigError: the model has an operator that QNN does not take.
        VerificationError: QNN's compiler failed; the note holds its own words.
    """
    started = time.perf_counter()
    specs = generate_qnn_executorch_compiler_spec(QcomChipset[soc], generate_htp_compiler_spec(use_fp16=True))
    body = blocks.eval()
    try:
        with torch.no_grad(), rewritten(model, FusedRMSNorm), shared_records(), qnn.quiet():
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
