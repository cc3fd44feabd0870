"""SlideFormer's masters and moments: in host memory, on a disk, or on the accelerator (`Resident`).

Resident are the first layers and the tables: the gradients of layer 0 and of the embedding arrive
last and are needed first, so nothing has to be copied for them between two steps, and the host
updates less. A state has the same form as on the host, and is updated to the same bits
(`runtime_ops.triton_adam`). Each of several ranks has all weights of a resident layer, and masters
and moments of its shard; updated weights are gathered at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.groups import updates
from ondevice.offload.host import DTYPES, HostStore, fields, native, parameters, release
from ondevice.offload.units import SINGLE, Ranks, array_name
from ondevice.runtime_ops import rows as row_ops
from ondevice.runtime_ops.layer_adam import HostState, Moments, device_adam, merge, torch_step

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device, Event
    from ondevice.offload.disk_states import DiskStates
    from ondevice.offload.units import Arrays, Ranks, Unit, Units
    from ondevice.runtime_ops.layer_adam import AdamStep


class TieredStore(HostStore):
    """Masters and moments of this rank's shard of all units; those of `resident` stay on the
    accelerator."""

    def __init__(
        self,
        units: Units,
        config: EngineConfig,
        device: Device,
        disk: DiskStates | None,
        ranks: Ranks,
    ) -> None:
        self.units = units
        self.disk = disk
        self.ranks = ranks
        kept = resident_units(units, config)
        self.resident = Resident(kept, device, DTYPES[config.compute], native(config), ranks)
        super().__init__(
            [ranks.shard(unit) for unit in units.all if unit not in kept], config, device
        )
        for unit in kept:  # one after the other, so that no state is there twice for long
            self.resident.fill(unit)
            self.resident.adopt(
                unit, HostStore._host_state(self, ranks.shard(unit), config.moments)
            )
            release(unit, self.dtype)
        for unit in units.all:
            release(unit, self.dtype)

    def _host_state(self, unit: Unit, moments: str) -> HostState:
        state = super()._host_state(unit, moments)
        if self.disk is not None and self.disk.holds(unit):
            return self.disk.put(unit, state)
        return state

    def state(self, unit: Unit) -> HostState:
        """Return a unit's state, in memory or as maps of the files: views."""
        state = super().state(unit)
        if self.disk is not None and self.disk.holds(unit):
            return self.disk.stored(unit, state)
        return state

    def prefetch(self, unit: Unit) -> None:
        """Begin to read weights for the next `outgoing`; the unit's last update is done."""
        if self.disk is not None:
            self.disk.prefetch_weights(unit)

    def _weights(self, unit: Unit) -> Tensor:
        if self.disk is not None and self.disk.holds_master(unit):
            return self.disk.weights(unit)
        return super()._weights(unit)

    def sent(self, event: Event) -> None:
        """See `HostStore.sent`."""
        super().sent(event)
        if self.disk is not None:
            self.disk.sent(event)

    def rows(self, unit: Unit, rows: Tensor, out: Tensor) -> None:
        """Read rows of a table in the compute dtype: int64 [R] into `out` [R, width]."""
        table = self._weights(unit)
        piece = unit.pieces[0]
        view = table[: piece.numel].view(piece.shape)
        if view.dtype == out.dtype:
            row_ops.gather(view, rows, out)
        else:
            out.copy_(view[rows])

    @property
    def shards(self) -> tuple[Unit, ...]:
        """All shards of this rank, wherever they are."""
        return (*self.resident.shards, *self.owned)

    @property
    def flat_part(self) -> str:
        """The array of a unit's state that weights are made of."""
        if self.split:
            return "high"
        return "master"

    def flats(self) -> dict[str, Tensor]:
        """Return the arrays that `weights` is made of."""
        part = self.flat_part
        flats = {array_name(part, unit): fields(self.state(unit))[part] for unit in self.owned}
        for unit in self.resident.shards:
            flats |= {
                array_name(part, unit): tensor for part, tensor in self.resident.flat(unit).items()
            }
        return flats

    def weights(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return every parameter by name, from the `flats` or `arrays` of the only rank, without
        copies.

        In split form they are bfloat16, else the float32 masters."""
        weights = {}
        for unit in self.units.all:
            weights |= parameters(unit, arrays[array_name(self.flat_part, unit)])
        return weights

    def weight_parts(self, arrays: dict[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield the same of this rank's shard: parameter, its first element that is here, elements,
        flat."""
        for unit in self.shards:
            for piece in unit.pieces if unit.here else ():
                flat = arrays[array_name(self.flat_part, unit)]
                yield piece.name, piece.start, flat[piece.offset : piece.offset + piece.numel]

    def masters(self) -> dict[str, Tensor]:
        """See `HostStore.masters`; of all units of this rank, of cut parameters the flat part."""
        masters = super().masters()
        for unit in self.resident.shards:
            masters |= parameters(unit, self.resident.master(unit))
        return masters

    def arrays(self) -> dict[str, Tensor]:
        """See `HostStore.arrays`; of units on the accelerator copies."""
        arrays = {}
        for unit in self.resident.shards:
            arrays |= self._named(unit)
        return arrays | super().arrays()

    def _parts(self, unit: Unit) -> dict[str, Tensor]:
        if unit.index in self.states:
            return super()._parts(unit)
        return self.resident.arrays(unit)

    def load(self, arrays: Arrays) -> None:
        """See `HostStore.load`."""
        super().load(arrays)
        for unit in self.resident.shards:
            self.resident.load(unit, self._load(unit, arrays))

    def _load(self, unit: Unit, arrays: Arrays) -> dict[str, Tensor]:
        parts = super()._load(unit, arrays)
        if (
            self.disk is not None and unit.index in self.states and self.disk.holds(unit)
        ):  # private maps of the files
            parts = dict(parts)
            master, high, low = (parts.pop(name, None) for name in ("master", "high", "low"))
            state = self.states[unit.index]
            self.disk.put(
                unit, HostState(master, high, low, Moments(state.moments.kind, **parts), state.seed)
            )
        return parts

    @property
    def bytes(self) -> int:
        """Of masters, moments, and buffers for conversion and for the disk."""
        staging = []
        if self.disk is not None:
            staging = self.disk.staging
        return super().bytes + sum(memory.nbytes for memory in staging)


CHUNK = 1 << 25
"""Elements whose gradients exist in float32 at once, if the update is torch's."""


def resident_units(units: Units, config: EngineConfig) -> tuple[Unit, ...]:
    """Return the units whose states stay on the accelerator: the first layers, and the tables."""
    if config.keeps_tables:
        tables = (units.embedding, *(() if units.tied else (units.head,)))
    else:
        tables = ()
    return (*units.layers[: config.kept_layers], *tables)


class Resident:
    """States of `units` on the accelerator: as many bytes a parameter as on the host, and none
    there.

    Attributes:
        units: complete, for the computation; `shards` are those whose states this rank has and
            updates.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        device: Device,
        dtype: torch.dtype,
        native: bool,
        ranks: Ranks = SINGLE,
    ) -> None:
        self.units = units
        self.device = device
        self.dtype = dtype
        self.native = native
        self.ranks = ranks
        self.shards = tuple(ranks.shard(unit) for unit in units)
        self.computed: dict[int, Tensor] = {}
        self.states: dict[int, HostState] = {}

    def __contains__(self, unit: Unit) -> bool:
        return any(unit is one for one in self.units)

    def fill(self, unit: Unit) -> None:
        """Copy a unit's weights from its parameters, which are complete on every rank."""
        memory = self.computed[unit.index] = self.device.empty(
            self.ranks.bounds(unit)[-1], self.dtype
        )
        for piece in unit.pieces:
            memory[piece.offset : piece.offset + piece.numel].copy_(piece.values)

    def adopt(self, unit: Unit, state: HostState) -> None:
        """Copy the state of this rank's shard from the host, where it may be released
        afterwards."""
        own = self.computed[unit.index][self.ranks.own(self.ranks.bounds(unit))]
        moments = Moments(
            state.moments.kind, **{n: self._copy(t) for n, t in state.moments.tensors().items()}
        )
        low = None
        if state.low is not None:
            low = self._copy(state.low)
        if state.high is not None:
            master = None
            high = own.copy_(state.high)
        elif self.dtype == torch.float32:
            master = own.copy_(_there(state.master))
            high = None
        else:
            master = self._copy(_there(state.master))
            high = own.copy_(master)
        self.states[unit.index] = HostState(master, high, low, moments, state.seed)

    def memory(self, unit: Unit) -> Tensor:
        """Return the unit's weights, flat; with several ranks padded to all shards."""
        return self.computed[unit.index]

    @torch.no_grad()
    def update(
        self, unit: Unit, gradient: Tensor, adam: AdamStep, scale: Tensor | None, threads: int
    ) -> None:
        """Run AdamW on the current stream. `gradient` of this rank's shard, in the compute dtype,
        is multiplied by `scale` first."""
        state = self.states[unit.index]
        shard = next(one for one in self.shards if one.index == unit.index)
        for part, own, settings in updates(shard, gradient, state, adam):
            if self.native:
                device_adam(part, own, settings, scale, threads)
                continue
            master = _there(own.master)  # the form that torch's update needs
            for low in range(0, len(master), CHUNK):
                chunk = slice(low, min(low + CHUNK, len(master)))
                wide = part[chunk].float()
                if scale is not None:
                    wide = wide * scale.float()
                moments = own.moments
                torch_step(master[chunk], wide, moments.m[chunk], moments.v[chunk], settings)
        if not self.native and state.high is not None:
            state.high.copy_(_there(state.master))

    def master(self, unit: Unit) -> Tensor:
        """Return float32 on the host, of this rank's shard."""
        parts = self.arrays(unit)
        if "master" in parts:
            return parts["master"]
        moments = {name: tensor for name, tensor in parts.items() if name not in ("high", "low")}
        return merge(
            parts["high"], parts["low"], Moments(self.states[unit.index].moments.kind, **moments)
        )

    def flat(self, unit: Unit) -> dict[str, Tensor]:
        """Return the shard's weights, a copy on the host, by their name in `arrays`."""
        state = self.states[unit.index]
        if state.master is None:
            name = "high"
            weights = _there(state.high)
        else:
            name = "master"
            weights = state.master
        return {name: weights.to("cpu", copy=True)}

    def arrays(self, unit: Unit) -> dict[str, Tensor]:
        """Return everything a resume needs, copies on the host, as `HostStore` would."""
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
        # few kernels know uint16
        words = tensor
        if tensor.dtype == torch.uint16:
            words = tensor.view(torch.int16)
        return self.device.empty(tensor.numel(), words.dtype).copy_(words).view(tensor.dtype)


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101  which fields a state has follows from its form
    return tensor
