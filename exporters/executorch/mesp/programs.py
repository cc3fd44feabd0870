"""The methods of a MeSP program as modules that torch.export takes, and how they are lowered.

Nothing is delegated. XNNPACK keeps a packed copy of every weight it multiplies with, and the backward pass would add
one of each weight transposed; the runtime's own products read the frozen weights in the mapped file, so that all the
memory a step takes is the planned arena. Nor are common subexpressions merged: a block that is computed again in its
backward pass is one, and merging the two would keep everything of the forward pass.
"""

from __future__ import annotations

import logging
import time
import warnings
from typing import TYPE_CHECKING

import torch
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.passes import MemoryPlanningPass
from torch import Tensor, nn

from ondevice.exporters.executorch.lower import Lowered, lowered, shared_records
from ondevice.exporters.executorch.programs import MethodSpec, Port

if TYPE_CHECKING:
    from ondevice.exporters.base import ExportConfig
    from ondevice.methods.mesp.torch.program import MespProgram


class TrainStep(nn.Module):
    """The whole step: loss, exact gradients, SGD's or AdamW's update."""

    def __init__(self, program: MespProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, labels: Tensor, adapter: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *moments, step, rate = rest
        return self.program.train_step(ids, labels, adapter, tuple(moments), step, rate)


class Evaluate(nn.Module):
    """Row losses under the adapter."""

    def __init__(self, program: MespProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, labels: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        return self.program.evaluate(ids, labels, adapter)


class NextToken(nn.Module):
    """Logits of the token behind the first `length` of a row."""

    def __init__(self, program: MespProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, length: Tensor, adapter: Tensor) -> Tensor:
        return self.program.next_token(ids, length, adapter)


def build_methods(program: MespProgram, config: ExportConfig) -> list[MethodSpec]:
    """The methods of the artifact; the longest bucket has the plain name, others carry their length."""
    adapter = Port("adapter", "float32", (program.layout.size,))
    moments = tuple(Port(name, "float32", adapter.shape) for name in program.moments)
    scalars = (Port("step", "int64", (1,)), Port("learning_rate", "float32", (1,)))
    methods = []
    for length in config.lengths_tokens:
        suffix = "" if length == max(config.lengths_tokens) else f"_{length}"
        rows = tuple(Port(name, "int64", (config.batch_size, length), "token id") for name in ("ids", "labels"))
        loss = Port("loss", "float32", (1,), "nats per labelled token")
        taken, given = (*rows, adapter, *moments, *scalars), (loss, adapter, *moments)
        methods.append(MethodSpec(f"train_step{suffix}", TrainStep(program), taken, given))
        rows = tuple(Port(name, "int64", (config.eval_batch_size, length), "token id") for name in ("ids", "labels"))
        count = config.eval_batch_size
        sums = (Port("nll_sum", "float32", (count,), "nats"), Port("tokens", "float32", (count,)))
        methods.append(MethodSpec(f"evaluate{suffix}", Evaluate(program), (*rows, adapter), sums))
    if config.next_token:
        longest = max(config.lengths_tokens)
        row = (Port("ids", "int64", (1, longest), "token id"), Port("length", "int64", (1,), "tokens"), adapter)
        logits = Port("logits", "float32", (program.dims.vocab,))
        methods.append(MethodSpec("next_token", NextToken(program), row, (logits,)))
    return methods


def lower(methods: list[MethodSpec]) -> Lowered:
    """Export and serialise `methods` into one program of the runtime's own kernels; weights are stored once."""
    started = time.perf_counter()
    logging.getLogger("executorch").setLevel(logging.ERROR)
    linear = [torch.ops.aten.linear.default]  # its decomposition would copy every weight to transpose it
    with torch.no_grad(), shared_records(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        edge = to_edge_transform_and_lower(
            {m.name: torch.export.export(m.module.eval(), m.example_inputs(), strict=False) for m in methods},
            compile_config=EdgeCompileConfig(preserve_ops=linear, _core_aten_ops_exception_list=linear),
        )
        program = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=MemoryPlanningPass()))
    return lowered(edge, program, methods, started)
