"""The methods of P-RGE's program as modules that torch.export takes.

Functional form: the adapter goes in and comes out, so a stock runtime runs it and a restart needs
nothing but the adapter. Stateful form: the adapter is a buffer inside the program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ondevice.methods.prge.step import PrgeProgram
from ondevice.nn.graph_loss import weight_tiles


class Method(nn.Module):
    """A method of the program in functional form."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.program = program


class TrainStep(Method):
    """The whole step of Algorithm 1: noise, both forwards, losses, projected gradients, update."""

    def forward(self, ids: Tensor, labels: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        """`rest` is the state, seed, step and learning rate."""
        return self.program.stepped(ids, labels, rest[:-3], *rest[-3:])


class Evaluate(Method):
    """Row losses under the unperturbed adapter."""

    def forward(self, ids: Tensor, labels: Tensor, adapter: Tensor) -> tuple[Tensor, Tensor]:
        with self.program.bound((adapter,)):
            return self.program.evaluate(ids, labels, adapter)


class NextToken(Method):
    """Logits of the token behind the first `length` of a row, under the unperturbed adapter."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__(program)
        self.tiles = weight_tiles(program.family.head_weight, program.config.loss_tiles)

    def forward(self, ids: Tensor, length: Tensor, adapter: Tensor) -> Tensor:
        with self.program.bound((adapter,)):
            last = self.program.hidden(ids, adapter)[0].index_select(0, length - 1)
        return torch.cat([head(last)[0] for _, head in self.tiles])


class ApplyUpdate(nn.Module):
    """Only the update, from logged projected gradients: replays a run without the model."""

    def __init__(self, program: PrgeProgram) -> None:
        super().__init__()
        self.update = program.update

    def forward(self, *rest: Tensor) -> tuple[Tensor, ...]:
        """`rest` is the state, projected gradients, seed, step and learning rate."""
        return self.update(rest[:-4], *rest[-4:])


class KeptState(nn.Module):
    """Owner of the buffers that the methods of a program share."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.names = tuple(sizes)
        for name, size in sizes.items():
            self.register_buffer(name, torch.zeros(size))

    def read(self) -> tuple[Tensor, ...]:
        """Return the buffers. It writes them back unchanged: in a method that only reads one it
        would be baked in as a constant."""
        return tuple(self.get_buffer(name).add_(0.0) for name in self.names)

    def write(self, values: Sequence[Tensor]) -> None:
        for name, value in zip(self.names, values, strict=True):
            self.get_buffer(name).copy_(value)


class OnBuffers(nn.Module):
    """A functional method with the state as buffers that the methods of the program share.

    Args:
        method: takes the state behind its first `before` inputs, and if it `writes` one returns it
            last; else it takes only the adapter.
    """

    state: KeptState

    def __init__(self, method: nn.Module, state: KeptState, before: int, writes: bool) -> None:
        super().__init__()
        self.method = method
        self.state = state
        self.before = before
        self.writes = writes

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Return the outputs that are not state; of `ApplyUpdate` the sum of the adapter's
        elements."""
        state = self.state.read()
        if not self.writes:
            return self.method(*inputs, state[0])
        outputs = self.method(*inputs[: self.before], *state, *inputs[self.before :])
        after = outputs[-len(state) :]
        self.state.write(after)
        return outputs[: -len(state)] or after[0].sum(dim=0, keepdim=True)


class GetState(nn.Module):
    """A buffer as an output."""

    state: KeptState

    def __init__(self, state: KeptState, name: str) -> None:
        super().__init__()
        self.state = state
        self.name = name

    def forward(self) -> Tensor:
        return self.state.get_buffer(self.name).add_(0.0).clone()


class SetState(nn.Module):
    """Replaces a buffer; returns the sum of its elements."""

    state: KeptState

    def __init__(self, state: KeptState, name: str) -> None:
        super().__init__()
        self.state = state
        self.name = name

    def forward(self, value: Tensor) -> Tensor:
        self.state.get_buffer(self.name).copy_(value)
        return value.sum(dim=0, keepdim=True)
