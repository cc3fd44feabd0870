"""The methods of a P-RGE program as modules that torch.export takes, with their inputs and outputs.

Functional form: the adapter goes in and comes out, so a stock runtime runs it and a restart needs nothing
but the adapter. Stateful form: the adapter is a buffer inside the program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ondevice.nn.graph_loss import weight_tiles

if TYPE_CHECKING:
    from ondevice.methods.prge.torch import PrgeProgram


@dataclass(frozen=True)
class Port:
    """One input or output of a method, as the manifest lists it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    unit: str = ""


@dataclass(frozen=True)
class MethodSpec:
    """One method of the program: its module, example inputs, and its ports."""

    name: str
    module: nn.Module
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Inputs of the right shapes; ids and labels are zeros, as export only reads shapes."""
        kinds = {"int64": torch.int64, "float32": torch.float32}
        return tuple(torch.zeros(port.shape, dtype=kinds[port.dtype]) for port in self.inputs)


class TrainStep(nn.Module):
    """The whole step of Algorithm 1: noise, both forwards, losses, projected gradients, update."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.program = program

    def forward(
        self, ids: Tensor, labels: Tensor, adapter: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.program.train_step(ids, labels, adapter, seed, step, learning_rate)


class Evaluate(nn.Module):
    """Row losses under the unperturbed adapter."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.program = program

    def forward(self, ids: Tensor, labels: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        return self.program.evaluate(ids, labels, adapter)


class NextToken(nn.Module):
    """Logits of the token behind the first `length` of a row, under the unperturbed adapter."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.program = program
        self.tiles = weight_tiles(program.family.head_weight, program.config.loss_tiles)

    def forward(self, ids: Tensor, length: Tensor, adapter: Tensor) -> Tensor:
        last = self.program.hidden(ids, adapter)[0].index_select(0, length - 1)
        return torch.cat([head(last)[0] for _, head in self.tiles])


class ApplyUpdate(nn.Module):
    """The update alone, from logged projected gradients: replays a run without the model."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.update = program.apply_update

    def forward(
        self, adapter: Tensor, projected_gradients: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor
    ) -> Tensor:
        return self.update(adapter, projected_gradients, seed, step, learning_rate)


class StatefulApplyUpdate(nn.Module):
    """`ApplyUpdate` on the buffer; returns the sum of its elements."""

    state: AdapterState

    def __init__(self, program: PrgeProgram, state: AdapterState) -> None:
        super().__init__()
        self.update, self.state = program.apply_update, state

    def forward(self, projected_gradients: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor) -> Tensor:
        adapter = self.update(self.state.adapter, projected_gradients, seed, step, learning_rate)
        self.state.adapter.copy_(adapter)
        return adapter.sum(dim=0, keepdim=True)


class StatefulTrainStep(nn.Module):
    """`TrainStep` with the adapter as a buffer that the methods of the program share."""

    state: AdapterState

    def __init__(self, program: PrgeProgram, state: AdapterState) -> None:
        super().__init__()
        self.program, self.state = program, state

    def forward(
        self, ids: Tensor, labels: Tensor, seed: Tensor, step: Tensor, learning_rate: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, gradients, adapter = self.program.train_step(ids, labels, self.state.adapter, seed, step, learning_rate)
        self.state.adapter.copy_(adapter)
        return losses, gradients


class StatefulEvaluate(nn.Module):
    """`Evaluate` on the buffer. It writes the buffer back unchanged: a method that only reads it would have it
    baked in as a constant."""

    state: AdapterState

    def __init__(self, program: PrgeProgram, state: AdapterState) -> None:
        super().__init__()
        self.program, self.state = program, state

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.state.adapter.add_(0.0)
        return self.program.evaluate(ids, labels, self.state.adapter)


class AdapterState(nn.Module):
    """Owner of the shared buffer."""

    adapter: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("adapter", torch.zeros(size))


class GetAdapter(nn.Module):
    """The buffer as an output."""

    state: AdapterState

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self) -> Tensor:
        self.state.adapter.add_(0.0)
        return self.state.adapter.clone()


class SetAdapter(nn.Module):
    """Replaces the buffer; returns the sum of its elements."""

    state: AdapterState

    def __init__(self, state: AdapterState) -> None:
        super().__init__()
        self.state = state

    def forward(self, adapter: Tensor) -> Tensor:
        self.state.adapter.copy_(adapter)
        return adapter.sum(dim=0, keepdim=True)


def build_methods(
    program: PrgeProgram,
    lengths_tokens: tuple[int, ...],
    batch_size: int,
    eval_batch_size: int,
    stateful: bool,
    next_token: bool = False,
) -> list[MethodSpec]:
    """The methods of the artifact; the longest bucket has the plain name, others carry their length."""
    size, config = program.layout.size, program.config
    adapter = Port("adapter", "float32", (size,))
    scalars = (Port("seed", "int64", (1,)), Port("step", "int64", (1,)), Port("learning_rate", "float32", (1,)))
    gradients = Port("projected_gradients", "float32", (config.queries,), "nats per unit of perturbation")
    results = (Port("losses", "float32", (config.copies,), "nats per labelled token"), gradients)
    state = AdapterState(size) if stateful else None
    methods = []
    for length in lengths_tokens:
        suffix = "" if length == max(lengths_tokens) else f"_{length}"
        rows = tuple(Port(name, "int64", (batch_size, length), "token id") for name in ("ids", "labels"))
        eval_rows = tuple(Port(name, "int64", (eval_batch_size, length), "token id") for name in ("ids", "labels"))
        sums = (Port("nll_sum", "float32", (eval_batch_size,), "nats"), Port("tokens", "float32", (eval_batch_size,)))
        if state is None:
            methods.append(
                MethodSpec(f"train_step{suffix}", TrainStep(program), (*rows, adapter, *scalars), (*results, adapter))
            )
            methods.append(MethodSpec(f"evaluate{suffix}", Evaluate(program), (*eval_rows, adapter), sums))
        else:
            methods.append(
                MethodSpec(f"train_step{suffix}", StatefulTrainStep(program, state), (*rows, *scalars), results)
            )
            methods.append(MethodSpec(f"evaluate{suffix}", StatefulEvaluate(program, state), eval_rows, sums))
    if next_token:
        row = (Port("ids", "int64", (1, max(lengths_tokens)), "token id"), Port("length", "int64", (1,), "tokens"))
        logits = Port("logits", "float32", (program.family.dims.vocab,))
        methods.append(MethodSpec("next_token", NextToken(program), (*row, adapter), (logits,)))
    if state is None:
        methods.append(MethodSpec("apply_update", ApplyUpdate(program), (adapter, gradients, *scalars), (adapter,)))
    else:
        update, total = StatefulApplyUpdate(program, state), (Port("sum", "float32", (1,)),)
        methods.append(MethodSpec("apply_update", update, (gradients, *scalars), total))
        methods.append(MethodSpec("get_adapter", GetAdapter(state), (), (adapter,)))
        methods.append(MethodSpec("set_adapter", SetAdapter(state), (adapter,), total))
    return methods
