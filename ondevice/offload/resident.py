"""Layers whose masters and moments stay on the accelerator, which updates them itself.

The first layers are the ones: their gradients arrive last and they are needed first, so between two steps nothing has
to come and go for them. Each also takes its share of the update off the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.runtime_ops.layer_adam import Moments, merge, split_, torch_step

if TYPE_CHECKING:
    from ondevice.offload.device import Device
    from ondevice.offload.units import Unit
    from ondevice.runtime_ops.layer_adam import AdamStep

CHUNK = 1 << 25
"""Elements whose gradients are there in float32 at once."""


@dataclass
class _State:
    """Flat, on the accelerator: what is computed with, float32 master and moments."""

    memory: Tensor
    master: Tensor
    m: Tensor
    v: Tensor


class Resident:
    """States of the first layers; 14 bytes a parameter of the accelerator's memory with bfloat16 compute."""

    def __init__(self, units: tuple[Unit, ...], device: Device, dtype: torch.dtype, split: bool) -> None:
        self.units, self.device, self.dtype, self.split = units, device, dtype, split
        self.states: dict[int, _State] = {}

    def take(self, unit: Unit) -> None:
        """Fill a unit's state from its parameters."""
        master = self.device.empty(unit.numel, torch.float32)
        for piece in unit.pieces:
            flat = master[piece.offset : piece.offset + piece.numel]
            flat.copy_(piece.parameter.detach().reshape(-1))
        memory = self.device.empty(unit.numel, self.dtype)
        moments = (self.device.empty(unit.numel, torch.float32) for _ in range(2))
        self.states[unit.index] = _State(memory.copy_(master), master, *moments)

    @torch.no_grad()
    def update(self, unit: Unit, gradient: Tensor, adam: AdamStep, scale: Tensor | None) -> None:
        """AdamW on the compute lane. `gradient` [numel] in the compute dtype, multiplied by `scale` first."""
        state = self.states[unit.index]
        for low in range(0, unit.numel, CHUNK):
            part = slice(low, min(low + CHUNK, unit.numel))
            wide = gradient[part].float()
            if scale is not None:
                wide = wide * scale
            torch_step(state.master[part], wide, state.m[part], state.v[part], adam)
        state.memory.copy_(state.master)

    def master(self, unit: Unit) -> Tensor:
        """float32 [numel] on the host."""
        return self.states[unit.index].master.cpu()

    def flat(self, unit: Unit) -> dict[str, Tensor]:
        """What the unit's weights are made of, on the host, under the name that `arrays` has for it."""
        return {"high": self.states[unit.index].memory.cpu()} if self.split else {"master": self.master(unit)}

    def arrays(self, unit: Unit) -> dict[str, Tensor]:
        """Everything a resume needs, on the host, in the form of units whose states are there."""
        state = self.states[unit.index]
        master, moments = state.master.cpu(), Moments("float32", state.m.cpu(), state.v.cpu())
        if not self.split:
            return {"master": master, **moments.tensors()}
        high, low = torch.empty(unit.numel, dtype=torch.bfloat16), torch.empty(unit.numel, dtype=torch.uint16)
        split_(master, high, low, moments)
        return {"high": high, "low": low, **moments.tensors()}

    def load(self, unit: Unit, parts: dict[str, Tensor]) -> None:
        """Take back what `arrays` gave; float32, bfloat16 and uint16 on the host."""
        state, moments = self.states[unit.index], Moments("float32", parts["m"], parts["v"])
        master = merge(parts["high"], parts["low"], moments) if self.split else parts["master"]
        state.memory.copy_(state.master.copy_(master))
        state.m.copy_(moments.m)
        state.v.copy_(moments.v.abs())
