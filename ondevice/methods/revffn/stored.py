"""The same network with every activation stored by autograd: the reference that the walk back is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ondevice.methods.revffn.streams import Mix
    from ondevice.methods.revffn.walk import Reversible


def stored_hidden(network: Reversible, ids_BT: Tensor) -> Tensor:
    """`Reversible.hidden` under autograd, [B, T, hidden] in the compute dtype.

    Streams are what they are in the walk, and beside each goes a float32 tensor that only carries its gradient. So
    branches see the same numbers in the same shapes, and rounding has gradient 1.
    """
    streams, coupling = network.streams, network.coupling
    position = network.position(ids_BT.shape[1])
    first = coupling.split(network.family.embed(ids_BT))
    u, v = (streams.from_float(part.detach()) for part in first)
    old, new = (part.float() for part in first)

    def value(carrier: Tensor, stream: Tensor, dtype: torch.dtype = network.dtype) -> Tensor:
        return _Value.apply(carrier, streams.to_float(stream, dtype))

    peaks: list[Tensor] = []
    for step in network.steps:
        older = value(old, u) if step.crossed else None
        branch = coupling.branch(step, position, value(new, v), older)
        with torch.no_grad():
            w, _ = streams.step(u, v, branch.detach(), step.mix)
            peaks.append(streams.peaks(w, branch.detach(), step.mix))
        old, new = new, _Sum.apply(old, new, branch, step.mix)
        u, v = v, w
    network.check(peaks)
    return coupling.merge(value(old, u, torch.float32), value(new, v, torch.float32)).to(network.dtype)


class _Value(torch.autograd.Function):
    """The value of a stream, whose gradient goes to `carrier`."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None


class _Sum(torch.autograd.Function):
    """A step's sum as far as gradients go; its value is made by the streams."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor, branch: Tensor, mix: Mix) -> Tensor:
        ctx.mix, ctx.dtype = mix, branch.dtype
        return new.new_zeros(()).expand(new.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None]:
        mix: Mix = ctx.mix
        newer = mix.present * grad if mix.present else None
        return mix.past_of(grad), newer, mix.branch_of(grad).to(ctx.dtype), None
