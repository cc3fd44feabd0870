"""SlideFormer's masters and moments: in host memory, some moments on a disk, and of the first layers all on
the accelerator, which then updates them itself.

The first layers are the ones: their gradients arrive last and they are needed first, so between two steps nothing has
to come and go for them. Each also takes its share of the update off the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.host import DTYPES, HostStore, is_split, parameters, release
from ondevice.offload.ranks import SINGLE
from ondevice.offload.shares import array_name
from ondevice.runtime_ops import rows as row_ops
from ondevice.runtime_ops.layer_adam import HostState, Moments, merge, split_, torch_step

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.methods.slideformer.disk import DiskMoments
    from ondevice.offload.device import Device
    from ondevice.offload.ranks import Arrays, Ranks
    from ondevice.offload.units import Unit, Units
    from ondevice.runtime_ops.layer_adam import AdamStep

CHUNK = 1 << 25
"""Elements whose gradients are there in float32 at once."""


@dataclass
class _State:
    """Flat, on the accelerator: what is computed with; of this rank's share float32 master and moments, and that share
    of what is computed with."""

    memory: Tensor
    own: Tensor
    master: Tensor
    m: Tensor
    v: Tensor


class Resident:
    """States of the first layers; 14 bytes a parameter of the accelerator's memory with bfloat16 compute, or 2 and a
    rank's share of 12."""

    def __init__(
        self, units: tuple[Unit, ...], device: Device, dtype: torch.dtype, split: bool, ranks: Ranks = SINGLE
    ) -> None:
        self.units, self.device, self.dtype, self.split, self.ranks = units, device, dtype, split, ranks
        self.shares = tuple(ranks.share(unit) for unit in units)
        self.states: dict[int, _State] = {}

    def adopt(self, unit: Unit) -> None:
        """Fill a unit's state from its parameters."""
        share, bounds = self.ranks.share(unit), self.ranks.bounds(unit)
        memory = self.device.empty(bounds[-1], self.dtype)
        master, m, v = (self.device.empty(share.numel, torch.float32) for _ in range(3))
        for flat, one in ((memory, unit), (master, share)):
            for piece in one.pieces:
                flat[piece.offset : piece.offset + piece.numel].copy_(piece.values)
        self.states[unit.index] = _State(memory, memory[self.ranks.own(bounds)], master, m, v)

    @torch.no_grad()
    def update(self, unit: Unit, gradient: Tensor, adam: AdamStep, scale: Tensor | None) -> None:
        """Run AdamW on the current stream. `gradient` of this rank's share, in the compute dtype, is multiplied by
        `scale` first."""
        state = self.states[unit.index]
        for low in range(0, state.master.numel(), CHUNK):
            chunk = slice(low, min(low + CHUNK, state.master.numel()))
            wide = gradient[chunk].float()
            if scale is not None:
                wide = wide * scale
            torch_step(state.master[chunk], wide, state.m[chunk], state.v[chunk], adam)
        state.own.copy_(state.master)

    def master(self, unit: Unit) -> Tensor:
        """Return float32 [numel] on the host."""
        return self.states[unit.index].master.to("cpu", copy=True)

    def flat(self, unit: Unit) -> Tensor:
        """Return what the unit's weights are made of, on the host."""
        return self.states[unit.index].own.to("cpu", copy=True) if self.split else self.master(unit)

    def arrays(self, unit: Unit) -> dict[str, Tensor]:
        """Return everything a resume needs, on the host, for the units whose states are there."""
        state = self.states[unit.index]
        master, m, v = (tensor.to("cpu", copy=True) for tensor in (state.master, state.m, state.v))  # a CPU, too
        moments = Moments("float32", m, v)
        if not self.split:
            return {"master": master, **moments.tensors()}
        high, low = torch.empty(len(master), dtype=torch.bfloat16), torch.empty(len(master), dtype=torch.uint16)
        split_(master, high, low, moments)
        return {"high": high, "low": low, **moments.tensors()}

    def load(self, unit: Unit, parts: dict[str, Tensor]) -> None:
        """Take back what `arrays` gave; float32, bfloat16 and uint16 on the host."""
        state, moments = self.states[unit.index], Moments("float32", parts["m"], parts["v"])
        master = merge(parts["high"], parts["low"], moments) if self.split else parts["master"]
        state.own.copy_(state.master.copy_(master))
        state.m.copy_(moments.m)
        state.v.copy_(moments.v.abs())


class TieredStore(HostStore):
    """Masters and moments of this rank's share of all units; those of `resident` stay on the accelerator."""

    def __init__(
        self, units: Units, config: SlideformerConfig, device: Device, disk: DiskMoments | None, ranks: Ranks
    ) -> None:
        self.units, self.disk, self.ranks = units, disk, ranks
        kept = units.layers[: config.resident_layers]
        self.resident = Resident(kept, device, DTYPES[config.compute], is_split(config), ranks)
        for unit in kept:  # one after the other, so that no parameter is there twice for long
            self.resident.adopt(unit)
            release(unit, DTYPES[config.compute])
        super().__init__([ranks.share(unit) for unit in units.all if unit not in kept], config, device)
        for unit in units.all:
            release(unit, self.dtype)

    def _host_state(self, unit: Unit, moments: str) -> HostState:
        state = super()._host_state(unit, moments)
        if self.disk is not None and self.disk.holds(unit):
            self.disk.put(unit, state.moments)
            state.moments = Moments.empty(0, moments)
        return state

    def moments(self, unit: Unit) -> Moments:
        """Return a unit's moments, in memory or as a map of the file: views."""
        if self.disk is not None and self.disk.holds(unit):
            return self.disk.stored(unit)
        return super().moments(unit)

    def rows(self, unit: Unit, rows: Tensor, out: Tensor) -> None:
        """Read rows of a table in the compute dtype: int64 [R] into `out` [R, width]."""
        state = self.states[unit.index]
        table = self._master(state) if state.high is None else state.high
        piece = unit.pieces[0]
        view = table[: piece.numel].view(piece.shape)
        if view.dtype == out.dtype:
            row_ops.gather(view, rows, out)
        else:
            out.copy_(view[rows])

    @property
    def shares(self) -> tuple[Unit, ...]:
        """All that this rank keeps, wherever it is."""
        return (*self.resident.shares, *self.owned)

    @property
    def flat_part(self) -> str:
        """The array of a unit's state that weights are made of."""
        return "high" if self.split else "master"

    def flats(self) -> dict[str, Tensor]:
        """Return those of `arrays` that `weights` is made of."""
        part = self.flat_part
        states = ((unit, self.states[unit.index]) for unit in self.owned)
        flats = {array_name(part, unit): self._master(s) if s.high is None else s.high for unit, s in states}
        return flats | {array_name(part, unit): self.resident.flat(unit) for unit in self.resident.shares}

    def weights(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return every parameter by name, out of the `flats` or `arrays` of the only rank: bfloat16 as computed with in
        split form, else the float32 masters; no copies."""
        weights = {}
        for unit in self.units.all:
            weights |= parameters(unit, arrays[array_name(self.flat_part, unit)])
        return weights

    def weight_parts(self, arrays: dict[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the same of this rank's share: parameter, its first element that is here, elements, flat."""
        for unit in self.shares:
            for piece in unit.pieces if unit.here else ():
                flat = arrays[array_name(self.flat_part, unit)]
                yield piece.name, piece.start, flat[piece.offset : piece.offset + piece.numel]

    def masters(self) -> dict[str, Tensor]:
        """See `HostStore.masters`; of all that is kept here, and of parameters that are cut the flat part."""
        masters = super().masters()
        for unit in self.resident.shares:
            masters |= parameters(unit, self.resident.master(unit))
        return masters

    def arrays(self) -> dict[str, Tensor]:
        """See `HostStore.arrays`; of units on the accelerator copies."""
        arrays = {}
        for unit in self.resident.shares:
            arrays |= self._named(unit)
        return arrays | super().arrays()

    def _parts(self, unit: Unit) -> dict[str, Tensor]:
        return super()._parts(unit) if unit.index in self.states else self.resident.arrays(unit)

    def load(self, arrays: Arrays) -> None:
        """See `HostStore.load`."""
        super().load(arrays)
        for unit in self.resident.shares:
            self.resident.load(unit, self._load(unit, arrays))

    def _load(self, unit: Unit, arrays: Arrays) -> dict[str, Tensor]:
        parts = super()._load(unit, arrays)
        if self.disk is not None and self.disk.holds(unit):  # `parts` is a private map of the file
            fields = {name: tensor for name, tensor in parts.items() if name not in ("master", "high", "low")}
            self.disk.put(unit, Moments(self.states[unit.index].moments.kind, **fields))
        return parts

    @property
    def bytes(self) -> int:
        """Of masters, moments, and buffers for conversion and for the disk."""
        staging = [] if self.disk is None else self.disk.staging
        return super().bytes + sum(memory.numel() * memory.element_size() for memory in staging)
