"""The reversible network: forward without a graph, and the walk back that rebuilds every block's inputs (section 3.1).

The walk goes through the steps in reverse. From (v, w) it evaluates the branch of v once, under autograd: its value
gives u back, its graph gives the gradients. So an update in between may change the block's parameters at once.
Gradients of the streams are float32. Rounding to fixed point or bfloat16 has gradient 1.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ondevice.methods.revffn.couplings import Step, make_coupling
from ondevice.methods.revffn.streams import make_streams

if TYPE_CHECKING:
    from ondevice.methods.revffn.config import RevffnConfig
    from ondevice.models import Family

OnBlock = Callable[[int, dict[str, Tensor]], None]


@dataclass
class Ends:
    """What a forward pass leaves: the final streams, and what the way back needs besides.

    Attributes:
        u: older stream, `v`: newer stream, in the streams' own dtype.
        length_tokens: T.
        side: by step, the packed low bits that its sum does not hold.
        stored: by step, its older input, where that was kept instead of rebuilt.
    """

    u: Tensor
    v: Tensor
    length_tokens: int
    side: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of everything that waits for the way back."""
        kept = (self.u, self.v, *self.side.values(), *self.stored.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


class Reversible:
    """A family's blocks as a reversible network. Weights stay the model's own; `adapters` are new.

    Args:
        family: the model, on its device; what it computes in is the dtype of its embedding.
        config: coupling, streams and scale.
        device: moves the model there first; None leaves it.
        seed: of the adapters' first values.
    """

    def __init__(
        self, family: Family, config: RevffnConfig, device: torch.device | str | None = None, seed: int = 0
    ) -> None:
        if device is not None:
            family.model.to(device)
        self.family, self.config = family, config
        self.coupling = make_coupling(family, config, seed)
        self.steps = self.coupling.steps
        self.adapters: dict[str, nn.Parameter] = self.coupling.adapters
        self.streams = make_streams(config.streams, config.fraction_bits)
        self.blocks = family.dims.layers

    @property
    def dtype(self) -> torch.dtype:
        """What branches are computed in."""
        return self.family.embedding.weight.dtype

    def block_parameters(self, block: int) -> dict[str, nn.Parameter]:
        """Parameters of a block by name in the model, adapters included."""
        found: dict[str, nn.Parameter] = {}
        for step in self.steps:
            if step.block == block:
                found |= self.coupling.parameters(step)
        return found

    @torch.no_grad()
    def forward(self, ids_BT: Tensor) -> Ends:
        """Embedding and all blocks, without a graph."""
        position = self._position(ids_BT.shape[1])
        first = self.coupling.split(self.family.embed(ids_BT))
        u, v = (self.streams.from_float(part) for part in first)
        ends = Ends(u, v, ids_BT.shape[1])
        for number, step in enumerate(self.steps):
            branch = self._branch(step, position, v, u)
            w, side = self.streams.step(u, v, branch, step.mix)
            if side is not None:
                ends.side[number] = side
            u, v = v, w
        ends.u, ends.v = u, v
        return ends

    def hidden(self, ends: Ends) -> Tensor:
        """What the final norm reads: [B, T, hidden] in the compute dtype."""
        return self.coupling.merge(*(self.streams.to_float(part, self.dtype) for part in (ends.u, ends.v)))

    def backward(self, ends: Ends, grad_BTD: Tensor, on_block: OnBlock) -> Tensor:
        """Walk back through the blocks.

        Args:
            ends: from `forward`; its tensors are let go on the way.
            grad_BTD: gradient of `hidden(ends)`.
            on_block: is called with a block's number, from the last to the first, and the gradients of those of its
                parameters that require one, in their dtypes. It may change that block's parameters.

        Returns:
            the gradient of the embedding's output, float32 [B, T, hidden].
        """
        walk = self.walk(ends, grad_BTD)
        while True:
            try:
                block, gradients = next(walk)
            except StopIteration as end:
                return end.value
            on_block(block, gradients)

    def walk(self, ends: Ends, grad_BTD: Tensor) -> Generator[tuple[int, dict[str, Tensor]], None, Tensor]:
        """`backward` one block at a time, so that several parts of a batch can be walked side by side: a block's number
        and its gradients, from the last to the first; the value at the end is that of `backward`."""
        position = self._position(ends.length_tokens)
        du, dv = (part.float() for part in self.coupling.merge_back(grad_BTD))
        v, w = ends.u, ends.v
        del ends.u, ends.v
        gradients: dict[str, Tensor] = {}
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            u, du, dv, found = self._step_back(step, position, v, w, du, dv, ends.side.pop(number, None))
            gradients |= found
            del found  # whoever takes the gradients may free them
            v, w = u, v
            if number == 0 or self.steps[number - 1].block != step.block:
                yield step.block, gradients
                gradients = {}
        return self.coupling.split_back(du, dv)

    def _step_back(
        self, step: Step, position: tuple[Tensor, Tensor], v: Tensor, w: Tensor, du: Tensor, dv: Tensor,
        side: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:  # fmt: skip
        """u, the gradients of (u, v), and those of the step's parameters, from those of (v, w)."""
        mix = step.mix
        parameters = {name: p for name, p in self.coupling.parameters(step).items() if p.requires_grad}
        inputs = [self.streams.to_float(v, self.dtype).requires_grad_()]
        with torch.enable_grad():
            branch = self.coupling.branch(step, position, inputs[0])
        u = self.streams.unstep(w, v, branch.detach(), mix, side)
        into = (dv if mix.branch == 1.0 else dv * mix.branch).to(branch.dtype)
        grads = torch.autograd.grad(branch, [*inputs, *parameters.values()], into, materialize_grads=True)
        # The order of the three terms is autograd's: the later step's, this step's sum, this step's branch.
        newer = du if not mix.present else du + mix.present * dv
        older = dv if mix.past == 1.0 else mix.past * dv
        return u, older, newer + grads[0].float(), dict(zip(parameters, grads[len(inputs) :], strict=True))

    def stored_hidden(self, ids_BT: Tensor) -> Tensor:
        """`hidden` of the same network under autograd, every activation stored: the reference, [B, T, hidden]."""
        position = self._position(ids_BT.shape[1])
        first = self.coupling.split(self.family.embed(ids_BT))
        u, v = (self.streams.from_float(part.detach()) for part in first)
        old, new = (part.float() for part in first)
        for step in self.steps:
            values = [_Value.apply(carrier, self.streams.to_float(part, self.dtype)) for carrier, part in ((new, v),)]
            branch = self.coupling.branch(step, position, *values)
            w, _ = self.streams.step(u, v, branch.detach(), step.mix)
            old, new = new, _Sum.apply(old, new, branch, step.mix)
            u, v = v, w
        ends = [
            _Value.apply(carrier, self.streams.to_float(part, self.dtype)) for carrier, part in ((old, u), (new, v))
        ]
        return self.coupling.merge(*ends)

    def _branch(self, step: Step, position: tuple[Tensor, Tensor], v: Tensor, u: Tensor) -> Tensor:
        older = self.streams.to_float(u, self.dtype) if step.crossed else None
        return self.coupling.branch(step, position, self.streams.to_float(v, self.dtype), older)

    def _position(self, length: int) -> tuple[Tensor, Tensor]:
        return self.family.positions(length, self.family.embedding.weight.device, self.dtype)


class _Value(torch.autograd.Function):
    """The value of a stream that is kept beside `carrier`, which only carries its gradient (float32)."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


class _Sum(torch.autograd.Function):
    """The gradient of a step's sum; the sum itself is made by the streams."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor, branch: Tensor, mix: Any) -> Tensor:
        ctx.mix, ctx.dtype = mix, branch.dtype
        return new.new_zeros(()).expand(new.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None]:
        mix = ctx.mix
        older = None if not mix.past else grad if mix.past == 1.0 else mix.past * grad
        newer = mix.present * grad if mix.present else None
        return older, newer, (grad if mix.branch == 1.0 else grad * mix.branch).to(ctx.dtype), None
