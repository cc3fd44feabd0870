"""The reversible network under autograd with every activation stored: the reference of its backward
pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ondevice.methods.revffn.reversible import Reversible
from ondevice.methods.revffn.streams import Mix


def stored_hidden(network: Reversible, ids_BT: Tensor) -> Tensor:
    """Return `Reversible.hidden` of the network under autograd, every activation stored: the
    reference, [B, T, hidden].

    Streams are what they are in `forward`, and next to each goes a float32 tensor that only
    carries its gradient. So branches see the same numbers in the same shapes, and rounding has
    gradient 1.
    """
    streams = network.streams
    coupling = network.coupling
    place = network.place(ids_BT.shape[1])
    first = coupling.split(network.family.embed(ids_BT))
    u, v = (streams.from_float(part.detach()) for part in first)
    old, new = (part.float() for part in first)

    def value(carrier: Tensor, stream: Tensor, dtype: torch.dtype = network.dtype) -> Tensor:
        return _Value.apply(carrier, streams.to_float(stream, dtype))

    peaks: list[Tensor] = []
    for step in network.steps:
        older = None
        if step.crossed:
            older = value(old, u)
        branch = coupling.branch(step, place, value(new, v), older)
        with torch.no_grad():
            w, _, peak = streams.step(u, v, branch.detach(), step.mix, inverted=False)
        peaks.append(peak)
        old, new = new, _Sum.apply(old, new, branch, step.mix)
        u = v
        v = w
    network.check(peaks)
    return coupling.merge(value(old, u, torch.float32), value(new, v, torch.float32)).to(
        network.dtype
    )


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
        ctx.mix = mix
        ctx.dtype = branch.dtype
        return new.new_zeros(()).expand(new.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None]:
        mix: Mix = ctx.mix
        newer = None
        if mix.present:
            newer = mix.present * grad
        return mix.past_of(grad), newer, mix.branch_of(grad).to(ctx.dtype), None
