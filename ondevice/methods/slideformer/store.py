"""SlideFormer's masters and moments: in host memory, some moments on a disk, and of some units all on the accelerator
(`resident`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ondevice.methods.slideformer.resident import Resident
from ondevice.offload.host import DTYPES, HostStore, native, parameters, release
from ondevice.runtime_ops import rows as row_ops
from ondevice.runtime_ops.layer_adam import HostState, Moments

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.methods.slideformer.disk import DiskMoments
    from ondevice.offload.device import Device
    from ondevice.offload.ranks import Arrays, Ranks
    from ondevice.offload.units import Unit, Units


def resident_units(units: Units, config: SlideformerConfig) -> tuple[Unit, ...]:
    """Return the units whose states stay on the accelerator: the first layers, and the tables."""
    tables = (units.embedding, *(() if units.tied else (units.head,))) if config.keeps_tables else ()
    return (*units.layers[: config.kept_layers], *tables)


class TieredStore(HostStore):
    """Masters and moments of the units that this rank owns; those of `resident` stay on the accelerator."""

    def __init__(
        self, units: Units, config: SlideformerConfig, device: Device, disk: DiskMoments | None, ranks: Ranks
    ) -> None:
        self.units, self.disk, self.ranks = units, disk, ranks
        kept = resident_units(units, config)
        self.resident = Resident(kept, device, DTYPES[config.compute], native(config))
        super().__init__([unit for unit in units.all if ranks.owns(unit) and unit not in kept], config, device)
        for unit in kept:  # one after the other, so that no state is there twice for long
            self.resident.adopt(unit, HostStore._host_state(self, unit, config.moments_dtype))
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

    def flats(self) -> dict[str, Tensor]:
        """Return those of `arrays` that `weights` is made of."""
        part = "high" if self.split else "master"
        states = ((unit, self.states[unit.index]) for unit in self.owned)
        flats = {f"{part}/{unit.key}": self._master(s) if s.high is None else s.high for unit, s in states}
        for unit in self.resident.units:
            flats |= {f"{part}/{unit.key}": tensor for part, tensor in self.resident.flat(unit).items()}
        return flats

    def weights(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return every parameter by name, out of the `flats` or `arrays` of all ranks: bfloat16 as computed with in
        split form, else the float32 masters; no copies."""
        weights, part = {}, "high" if self.split else "master"
        for unit in self.units.all:
            weights |= parameters(unit, arrays[f"{part}/{unit.key}"])
        return weights

    def masters(self) -> dict[str, Tensor]:
        """See `HostStore.masters`; of all units that are kept here."""
        masters = super().masters()
        for unit in self.resident.units:
            masters |= parameters(unit, self.resident.master(unit))
        return masters

    def arrays(self) -> dict[str, Tensor]:
        """See `HostStore.arrays`; of units on the accelerator copies."""
        arrays = {}
        for unit in self.resident.units:
            arrays |= {f"{part}/{unit.key}": tensor for part, tensor in self._parts(unit).items()}
        return arrays | super().arrays()

    def _parts(self, unit: Unit) -> dict[str, Tensor]:
        return super()._parts(unit) if unit.index in self.states else self.resident.arrays(unit)

    def load(self, arrays: Arrays) -> None:
        """See `HostStore.load`."""
        super().load(arrays)
        for unit in self.resident.units:
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
