"""A model's blocks, or one function of a block, compiled into one QNN delegate.

Whoever imports this gets QNN's compiler (`qnn.load_compiler`): without it, the import of
ExecuTorch's package would download an SDK.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ondevice.core.errors import ConfigError, VerificationError
from ondevice.exporters.android_npu import qnn
from ondevice.exporters.executorch.shortcuts import shortcuts

qnn.load_compiler()

from executorch.backends.qualcomm.qnn_preprocess import QnnBackend  # noqa: E402
from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset  # noqa: E402
from executorch.backends.qualcomm.utils.qnn_manager_lifecycle import (  # noqa: E402
    QnnManagerContext,
)
from executorch.backends.qualcomm.utils.utils import (  # noqa: E402
    generate_htp_compiler_spec,
    generate_qnn_executorch_compiler_spec,
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir.delegate import executorch_call_delegate  # noqa: E402
from executorch.exir.lowered_backend_module import get_lowered_backend_modules  # noqa: E402


class Delegate(nn.Module):
    """A delegate behind the inputs and outputs of the module that it was made of: its own are in
    the order in which its graph uses and makes them."""

    def __init__(self, lowered: Any, inputs: list[int], outputs: list[int]) -> None:
        super().__init__()
        self.lowered = lowered
        self.inputs = inputs
        self.outputs = outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        results = self.lowered(*(inputs[number] for number in self.inputs))
        return tuple(results[number] for number in self.outputs)


@dataclass(frozen=True)
class Compiled:
    """A compiled module.

    Attributes:
        delegate: a module that a program can call.
        program: what QNN's compiler was given, with the weights of `body`.
        specs: how it compiled.
    """

    delegate: Delegate
    body: nn.Module
    method: str
    program: ExportedProgram
    specs: list[Any]

    @property
    def code(self) -> bytes:
        """The delegate's compiled code."""
        return self.delegate.lowered.processed_bytes

    def code_for(self, body: nn.Module) -> bytes:
        """Compile `body`, the same module with other weights.

        ExecuTorch's passes over the graph are 9 parts in 10 of a compilation, and are the same for
        every layer of a model; so they are not run again.

        Raises:
            VerificationError: a weight is not in the program as it is, or QNN's compiler failed.
        """
        method = self.method
        with qnn.quiet():
            program = copy.deepcopy(self.program)
        for name, value in body.state_dict().items():
            before = self.body.state_dict()[name]
            if torch.equal(before, value):
                continue
            if not (name in program.state_dict and torch.equal(program.state_dict[name], before)):
                raise VerificationError("ExecuTorch's passes change a weight, so that no other can take its place",
                                        received=name)  # fmt: skip
            program.state_dict[name] = value.clone()
        with _compiler_errors(str(method)), qnn.quiet(), QnnManagerContext({method: self.specs}):
            results: Any = QnnBackend.preprocess_multimethod(
                {method: [program]}, {method: [self.specs]}
            )
        (result,) = results[method]
        return result.processed_bytes


def compile_blocks(
    blocks: nn.Module, inputs: tuple[Tensor, ...], soc: str, *, method: str, int8: bool = False
) -> Compiled:
    """Compile one delegate of `blocks`.

    Args:
        blocks: a module of nothing else.
        inputs: example inputs, of the shapes that the program will use.
        method: name of the program's method that will call it: the runtime looks the compiled graph
            up by that.
        soc: a name of `QcomChipset`, such as SM8650.
        int8: frozen linear weights as int8 with a scale for each output; activations stay float16.

    Raises:
        ConfigError: the model has an operator that QNN does not take.
        VerificationError: QNN's compiler failed; the note holds its own words.
    """
    specs = generate_qnn_executorch_compiler_spec(
        QcomChipset[soc], generate_htp_compiler_spec(use_fp16=True)
    )
    body = blocks.eval()
    with _compiler_errors(soc), torch.no_grad(), qnn.quiet():
        lowered = (
            _with_int8_weights(body, inputs, soc) if int8 else body
        )  # traced by Dynamo: without shortcuts
    with _compiler_errors(soc), torch.no_grad(), shortcuts(), qnn.quiet(), _programs() as programs:
        example: Any = {method: inputs}
        edge = to_edge_transform_and_lower_to_qnn({method: lowered}, example, {method: specs})
    graph = edge.exported_program(method).graph_module
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
    if sorted(call.args[1:], key=str) != sorted(placeholders, key=str):
        raise VerificationError("QNN's delegate has other inputs", received=str(call.args[1:]))
    inputs_order = [placeholders.index(node) for node in call.args[1:]]
    results: Any = graph.graph.output_node().args[0]
    outputs_order = [node.args[1] for node in results]
    return Compiled(
        Delegate(modules[0], inputs_order, outputs_order), body, method, programs[0], specs
    )


@contextmanager
def _compiler_errors(soc: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        raise VerificationError(
            f"QNN's compiler failed for {soc}",
            received="; ".join([str(error).splitlines()[0], *getattr(error, "__notes__", [])]),
            hint="try another --soc, or a smaller --batch-size, --queries or --length",
        ) from error


@contextmanager
def _programs() -> Iterator[list[ExportedProgram]]:
    """Copies of the programs that QNN's compiler is given within the block, as it changes them."""
    backend: Any = QnnBackend
    compiler = backend.preprocess_multimethod
    programs = []

    def keep(by_method: dict[str, list[ExportedProgram]], specs: Any) -> Any:
        programs.extend(
            copy.deepcopy(program) for listed in by_method.values() for program in listed
        )
        return compiler(by_method, specs)

    backend.preprocess_multimethod = staticmethod(keep)
    try:
        yield programs
    finally:
        backend.preprocess_multimethod = staticmethod(compiler)


def _with_int8_weights(body: nn.Module, inputs: tuple[Tensor, ...], soc: str) -> nn.Module:
    """Every linear with int8 weights; nothing is calibrated, because no activation is quantised."""
    from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
    from executorch.backends.qualcomm.serialization.qc_schema import QnnExecuTorchBackendType
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = QnnQuantizer(
        backend=QnnExecuTorchBackendType.kHtpBackend, soc_model=QcomChipset[soc]
    )
    quantizer.set_default_quant_config(QuantDtype.use_fp16a8w, is_linear_per_channel=True)
    prepared = prepare_pt2e(torch.export.export(body, inputs, strict=True).module(), quantizer)
    prepared(*inputs)
    return convert_pt2e(prepared)


def _of_delegate(node: Any) -> bool:
    return node.target is executorch_call_delegate or "getitem" in str(node.target)
