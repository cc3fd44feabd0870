"""States that stay on the accelerator, which then updates them itself: of the first layers, and of the tables.

They are those: the gradients of layer 0 and of the embedding arrive last and are needed first, so between two steps
nothing has to come and go for them, and each takes its share of the update off the host. A state lies there as it would
on the host, and is updated to the same bits (`runtime_ops.triton_adam`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.runtime_ops.layer_adam import HostState, Moments, device_adam, merge, torch_step

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.offload.device import Device
    from ondevice.offload.units import Unit, Units
    from ondevice.runtime_ops.layer_adam import AdamStep

CHUNK = 1 << 25
"""Elements whose gradients are there in float32 at once, where the update is torch's."""


def fields(state: HostState) -> dict[str, Tensor]:
    """Return a state's tensors by the name that a checkpoint has for them."""
    named = {"master": state.master, "high": state.high, "low": state.low, **state.moments.tensors()}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def resident_units(units: Units, config: SlideformerConfig) -> tuple[Unit, ...]:
    """Return the units whose states stay on the accelerator: the first layers, and the tables."""
    tables = (units.embedding, *(() if units.tied else (units.head,))) if config.keeps_tables else ()
    return (*units.layers[: config.kept_layers], *tables)


class Resident:
    """States of `units` on the accelerator: as many bytes a parameter as on the host, and none there."""

    def __init__(self, units: tuple[Unit, ...], device: Device, dtype: torch.dtype, native: bool) -> None:
        self.units, self.device, self.dtype, self.native = units, device, dtype, native
        self.states: dict[int, HostState] = {}

    def __contains__(self, unit: Unit) -> bool:
        return any(unit is one for one in self.units)

    def adopt(self, unit: Unit, state: HostState) -> None:
        """Take over a state that is on the host; it may be let go of after."""
        moved = {name: self._copy(tensor) for name, tensor in fields(state).items()}
        master, high, low = (moved.pop(name, None) for name in ("master", "high", "low"))
        if high is None and master is not None and master.dtype != self.dtype:
            high = self.device.empty(unit.numel, self.dtype).copy_(master)
        moments = Moments(state.moments.kind, **moved)
        self.states[unit.index] = HostState(master, high, low, moments, state.seed)

    def memory(self, unit: Unit) -> Tensor:
        """Return what is computed with, flat."""
        state = self.states[unit.index]
        memory = state.master if state.high is None else state.high
        assert memory is not None  # noqa: S101  a state has one or the other
        return memory

    @torch.no_grad()
    def update(self, unit: Unit, gradient: Tensor, adam: AdamStep, scale: Tensor | None, threads: int) -> None:
        """Run AdamW on the compute lane. `gradient` [numel] in the compute dtype, multiplied by `scale` first."""
        state = self.states[unit.index]
        if self.native:
            device_adam(gradient, state, adam, scale, threads)
            return
        assert state.master is not None  # noqa: S101  the form that torch's update needs
        for low in range(0, unit.numel, CHUNK):
            chunk = slice(low, min(low + CHUNK, unit.numel))
            wide = gradient[chunk].float()
            if scale is not None:
                wide = wide * scale.float()
            torch_step(state.master[chunk], wide, state.moments.m[chunk], state.moments.v[chunk], adam)
        if state.high is not None:
            state.high.copy_(state.master)

    def master(self, unit: Unit) -> Tensor:
        """Return float32 [numel] on the host."""
        parts = self.arrays(unit)
        if "master" in parts:
            return parts["master"]
        moments = {name: tensor for name, tensor in parts.items() if name not in ("high", "low")}
        return merge(parts["high"], parts["low"], Moments(self.states[unit.index].moments.kind, **moments))

    def flat(self, unit: Unit) -> dict[str, Tensor]:
        """Return the tensor that holds the unit's weights, on the host, under the name that `arrays` has for it."""
        state = self.states[unit.index]
        return {"high": self.memory(unit).cpu()} if state.master is None else {"master": state.master.cpu()}

    def arrays(self, unit: Unit) -> dict[str, Tensor]:
        """Return everything a resume needs, copies on the host, as the unit's state there would be."""
        state = self.states[unit.index]
        kept = fields(state)
        if state.master is not None:
            kept.pop("high", None)
        return {name: tensor.cpu().clone() for name, tensor in kept.items()}

    def load(self, unit: Unit, parts: dict[str, Tensor]) -> None:
        """Take back what `arrays` gave."""
        state = self.states[unit.index]
        for name, tensor in fields(state).items():
            if name in parts:
                tensor.copy_(parts[name])
        if state.master is not None and state.high is not None:
            state.high.copy_(state.master)

    def _copy(self, tensor: Tensor) -> Tensor:
        words = tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor  # few kernels know uint16
        return self.device.empty(tensor.numel(), words.dtype).copy_(words).view(tensor.dtype)
