"""States that stay on the accelerator, which then updates them itself: of the first layers, and of the tables.

They are those: the gradients of layer 0 and of the embedding arrive last and are needed first, so between two steps
nothing has to come and go for them, and each takes its share of the update off the host. A state lies there as it would
on the host, and is updated to the same bits (`runtime_ops.triton_adam`). Of several ranks each has a whole layer to
compute with, and master and moments of its share; what all have updated is gathered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.ranks import SINGLE, Ranks
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
    named = {
        "master": state.master,
        "high": state.high,
        "low": state.low,
        **state.moments.tensors(),
    }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def resident_units(units: Units, config: SlideformerConfig) -> tuple[Unit, ...]:
    """Return the units whose states stay on the accelerator: the first layers, and the tables."""
    tables = (
        (units.embedding, *(() if units.tied else (units.head,))) if config.keeps_tables else ()
    )
    return (*units.layers[: config.kept_layers], *tables)


class Resident:
    """States of `units` on the accelerator: as many bytes a parameter as on the host, and none there.

    Attributes:
        units: whole, as they are computed with; `shares` is what this rank keeps of their states, and updates.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        device: Device,
        dtype: torch.dtype,
        native: bool,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.units, self.device, self.dtype, self.native, self.ranks = (
            units,
            device,
            dtype,
            native,
            ranks,
        )
        self.shares = tuple(ranks.share(unit) for unit in units)
        self.computed: dict[int, Tensor] = {}
        self.states: dict[int, HostState] = {}

    def __contains__(self, unit: Unit) -> bool:
        return any(unit is one for one in self.units)

    def fill(self, unit: Unit) -> None:
        """Take what is computed with from a unit's parameters, which are whole on every rank."""
        memory = self.computed[unit.index] = self.device.empty(
            self.ranks.bounds(unit)[-1], self.dtype
        )
        for piece in unit.pieces:
            memory[piece.offset : piece.offset + piece.numel].copy_(piece.values)

    def adopt(self, unit: Unit, state: HostState) -> None:
        """Take over the state of this rank's share, which is on the host; it may be let go of after."""
        own = self.computed[unit.index][self.ranks.own(self.ranks.bounds(unit))]
        moments = Moments(
            state.moments.kind, **{n: self._copy(t) for n, t in state.moments.tensors().items()}
        )
        low = None if state.low is None else self._copy(state.low)
        if state.high is not None:
            master, high = None, own.copy_(state.high)
        elif self.dtype == torch.float32:
            master, high = own.copy_(_there(state.master)), None
        else:
            master = self._copy(_there(state.master))
            high = own.copy_(master)
        self.states[unit.index] = HostState(master, high, low, moments, state.seed)

    def memory(self, unit: Unit) -> Tensor:
        """Return what is computed with, flat; of several ranks with what fills up the last shares."""
        return self.computed[unit.index]

    @torch.no_grad()
    def update(
        self, unit: Unit, gradient: Tensor, adam: AdamStep, scale: Tensor | None, threads: int
    ) -> None:
        """Run AdamW on the current stream. `gradient` of this rank's share, in the compute dtype, is multiplied by
        `scale` first."""
        state = self.states[unit.index]
        if self.native:
            device_adam(gradient, state, adam, scale, threads)
            return
        master = _there(state.master)  # the form that torch's update needs
        for low in range(0, len(master), CHUNK):
            chunk = slice(low, min(low + CHUNK, len(master)))
            wide = gradient[chunk].float()
            if scale is not None:
                wide = wide * scale.float()
            torch_step(master[chunk], wide, state.moments.m[chunk], state.moments.v[chunk], adam)
        if state.high is not None:
            state.high.copy_(master)

    def master(self, unit: Unit) -> Tensor:
        """Return float32 on the host, of this rank's share."""
        parts = self.arrays(unit)
        if "master" in parts:
            return parts["master"]
        moments = {name: tensor for name, tensor in parts.items() if name not in ("high", "low")}
        return merge(
            parts["high"], parts["low"], Moments(self.states[unit.index].moments.kind, **moments)
        )

    def flat(self, unit: Unit) -> dict[str, Tensor]:
        """Return the tensor that holds the share's weights, a copy on the host, under the name that `arrays` has for
        it."""
        state = self.states[unit.index]
        name, weights = (
            ("high", _there(state.high)) if state.master is None else ("master", state.master)
        )
        return {name: weights.to("cpu", copy=True)}

    def arrays(self, unit: Unit) -> dict[str, Tensor]:
        """Return everything a resume needs, copies on the host, as the share's state there would be."""
        state = self.states[unit.index]
        kept = fields(state)
        if state.master is not None:
            kept.pop("high", None)
        return {name: tensor.to("cpu", copy=True) for name, tensor in kept.items()}

    def load(self, unit: Unit, parts: dict[str, Tensor]) -> None:
        """Take back what `arrays` gave."""
        state = self.states[unit.index]
        for name, tensor in fields(state).items():
            if name in parts:
                tensor.copy_(parts[name])
        if state.master is not None and state.high is not None:
            state.high.copy_(state.master)

    def _copy(self, tensor: Tensor) -> Tensor:
        words = (
            tensor.view(torch.int16) if tensor.dtype == torch.uint16 else tensor
        )  # few kernels know uint16
        return self.device.empty(tensor.numel(), words.dtype).copy_(words).view(tensor.dtype)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101  which fields a state has follows from its form
    return tensor
