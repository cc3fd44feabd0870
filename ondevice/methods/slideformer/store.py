"""SlideFormer's masters and moments: in host memory, some moments on a disk, and of some units all on the accelerator
(`resident`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from ondevice.methods.slideformer.resident import Resident, fields, resident_units
from ondevice.offload.host import DTYPES, HostStore, native, parameters, release
from ondevice.offload.shares import array_name
from ondevice.runtime_ops import rows as row_ops
from ondevice.runtime_ops.layer_adam import HostState, Moments

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.methods.slideformer.disk_states import DiskStates
    from ondevice.offload.device import Device, Event
    from ondevice.offload.ranks import Arrays, Ranks
    from ondevice.offload.units import Unit, Units


class TieredStore(HostStore):
    """Masters and moments of this rank's share of all units; those of `resident` stay on the accelerator."""

    def __init__(
        self,
        units: Units,
        config: SlideformerConfig,
        device: Device,
        disk: DiskStates | None,
        ranks: Ranks,
    ) -> None:
        self.units, self.disk, self.ranks = units, disk, ranks
        kept = resident_units(units, config)
        self.resident = Resident(kept, device, DTYPES[config.compute], native(config), ranks)
        super().__init__(
            [ranks.share(unit) for unit in units.all if unit not in kept], config, device
        )
        for unit in kept:  # one after the other, so that no state is there twice for long
            self.resident.fill(unit)
            self.resident.adopt(
                unit, HostStore._host_state(self, ranks.share(unit), config.moments_dtype)
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
        """Begin to read weights that `outgoing` will be asked for; the unit's last update is done."""
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
        flats = {array_name(part, unit): fields(self.state(unit))[part] for unit in self.owned}
        for unit in self.resident.shares:
            flats |= {
                array_name(part, unit): tensor for part, tensor in self.resident.flat(unit).items()
            }
        return flats

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
        staging = [] if self.disk is None else self.disk.staging
        return super().bytes + sum(memory.numel() * memory.element_size() for memory in staging)
