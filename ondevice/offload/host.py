"""Host memory: float32 masters and AdamW's moments, flat for each unit (SlideFormer section 3.2).

In `split` form a master is its bfloat16 value, pinned, which the accelerator reads as it is, and the 16 bits that are
missing to float32: no conversion pass and no conversion buffer. In `plain` form it is float32, and what goes to the
accelerator is converted into one of two buffers that all units share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ondevice.errors import CheckpointError, MissingPackageError
from ondevice.offload.disk import moments_bytes, moments_in
from ondevice.offload.ranks import SINGLE, Arrays, Ranks
from ondevice.offload.resident import Resident
from ondevice.offload.storage import buffer
from ondevice.runtime_ops import layer_adam
from ondevice.runtime_ops import rows as row_ops

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device, Event
    from ondevice.offload.disk import DiskMoments
    from ondevice.offload.units import Unit

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def release(unit: Unit, dtype: torch.dtype) -> None:
    """Let go of the memory of a unit's parameters."""
    for piece in unit.pieces:
        piece.parameter.grad = None
        piece.parameter.data = torch.empty(0, dtype=dtype)


def native(config: EngineConfig, moments: str = "float32") -> bool:
    """Whether the update is the C++ pass.

    Raises:
        MissingPackageError: it is asked for and there is no compiler.
    """
    if config.optimizer == "torch":
        return False
    found = layer_adam.available()
    if not found and (config.optimizer == "native" or moments != "float32"):
        raise MissingPackageError(
            "the fused update needs a C++ compiler, and none was found",
            expected="g++ or clang++",
            hint="install one, or set method.optimizer: torch with method.moments: float32",
        )
    return found


class Listed(Protocol):
    """Units, of a whole model or of what is trained of it."""

    @property
    def all(self) -> tuple[Unit, ...]: ...


class HostStore:
    """Masters and moments of the units that this rank owns, but for `kept`, which stay on the accelerator; takes the
    values out of the model's parameters."""

    def __init__(
        self, units: Listed, config: EngineConfig, device: Device, disk: DiskMoments | None = None,
        ranks: Ranks = SINGLE, kept: tuple[Unit, ...] = (), moments: str = "float32",
    ) -> None:  # fmt: skip
        self.units, self.device, self.disk, self.ranks = units, device, disk, ranks
        self.owned = tuple(unit for unit in units.all if ranks.owns(unit) and unit not in kept)
        self.dtype = DTYPES[config.compute]
        self.native = native(config, moments)
        self.split = self.native and self.dtype == torch.bfloat16
        self.converted: list[tuple[Tensor, Event | None]] = []
        self.turn = 0
        self.resident = Resident(kept, device, self.dtype, self.split)
        for unit in kept:
            self.resident.take(unit)
            release(unit, self.dtype)
        self.states = {unit.index: self._take(unit, moments) for unit in self.owned}
        for unit in units.all:
            release(unit, self.dtype)
        if self.dtype == torch.bfloat16 and not self.split:
            largest = max((unit.numel for unit in self.owned), default=0)
            self.converted = [(device.pinned(largest, self.dtype), None) for _ in range(2)]

    def _take(self, unit: Unit, moments: str) -> layer_adam.HostState:
        """Fill a unit's state from its parameters, and let go of their memory."""
        master = torch.zeros(unit.numel) if self.split else self.device.pinned(unit.numel, torch.float32)
        for piece in unit.pieces:
            flat = master[piece.offset : piece.offset + piece.numel]
            flat.copy_(piece.parameter.detach().reshape(-1))
        release(unit, self.dtype)
        held = moments_in(buffer(moments_bytes(unit.numel, moments), pin=False), unit.numel, moments)
        state = layer_adam.HostState(master, None, None, held, unit.index)
        if self.split:
            high = self.device.pinned(unit.numel, torch.bfloat16)
            low = buffer(2 * unit.numel, pin=False).view(torch.uint16)[: unit.numel]
            layer_adam.split_(master, high, low, held)
            state = layer_adam.HostState(None, high, low, held, unit.index)
        if self.disk is not None and self.disk.holds(unit):
            self.disk.put(unit, held)
            state.moments = layer_adam.Moments.empty(0, moments)
        return state

    def moments(self, unit: Unit) -> layer_adam.Moments:
        """A unit's moments, where they are: views."""
        if self.disk is not None and self.disk.holds(unit):
            return self.disk.stored(unit)
        return self.states[unit.index].moments

    def outgoing(self, unit: Unit, span: slice) -> Tensor:
        """Elements `span` of a unit as the accelerator reads them, in the compute dtype; call `sent` after."""
        state = self.states[unit.index]
        if state.high is not None:
            return state.high[span]
        if not self.converted:
            return self._master(state)[span]
        self.turn = 1 - self.turn
        memory, event = self.converted[self.turn]
        if event is not None:
            event.wait()
        master = self._master(state)[span]
        return memory[: master.numel()].copy_(master)

    def sent(self, event: Event) -> None:
        """The copy of what `outgoing` gave last has ended at `event`."""
        if self.converted:
            self.converted[self.turn] = (self.converted[self.turn][0], event)

    def rows(self, unit: Unit, rows: Tensor, out: Tensor) -> None:
        """Rows of a table in the compute dtype: int64 [R] into `out` [R, width]."""
        state = self.states[unit.index]
        table = self._master(state) if state.high is None else state.high
        piece = unit.pieces[0]
        view = table[: piece.numel].view(piece.shape)
        if view.dtype == out.dtype:
            row_ops.gather(view, rows, out)
        else:
            out.copy_(view[rows])

    def flats(self) -> dict[str, Tensor]:
        """Those of `arrays` that `weights` is made of."""
        part = "high" if self.split else "master"
        states = ((unit, self.states[unit.index]) for unit in self.owned)
        found = {f"{part}/{unit.key}": self._master(s) if s.high is None else s.high for unit, s in states}
        for unit in self.resident.units:
            found |= {f"{part}/{unit.key}": tensor for part, tensor in self.resident.flat(unit).items()}
        return found

    def weights(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every parameter by name, out of the `flats` or `arrays` of all ranks: bfloat16 as computed with in split
        form, else the float32 masters; no copies."""
        found, part = {}, "high" if self.split else "master"
        for unit in self.units.all:
            flat = arrays[f"{part}/{unit.key}"]
            for piece in unit.pieces:
                found[piece.name] = flat[piece.offset : piece.offset + piece.numel].view(piece.shape)
        return found

    def masters(self) -> dict[str, Tensor]:
        """Every parameter of this rank's units by name in float32, as copies."""
        found = {}
        for unit in (*self.owned, *self.resident.units):
            state = self.states.get(unit.index)
            if state is None:
                flat = self.resident.master(unit)
            elif state.high is not None and state.low is not None:
                flat = layer_adam.merge(state.high, state.low, self.moments(unit))
            else:
                flat = self._master(state)
            for piece in unit.pieces:
                found[piece.name] = flat[piece.offset : piece.offset + piece.numel].view(piece.shape).clone()
        return found

    def arrays(self) -> dict[str, Tensor]:
        """Everything a resume needs of this rank's units, as views; of those on the accelerator, copies."""
        found = {}
        for unit in (*self.resident.units, *self.owned):
            found |= {f"{part}/{unit.key}": tensor for part, tensor in self._parts(unit).items()}
        return found

    def _parts(self, unit: Unit) -> dict[str, Tensor]:
        state = self.states.get(unit.index)
        if state is None:
            return self.resident.arrays(unit)
        parts = {"master": state.master, "high": state.high, "low": state.low, **self.moments(unit).tensors()}
        return {part: tensor for part, tensor in parts.items() if tensor is not None}

    def load(self, arrays: Arrays) -> None:
        """Take back what `arrays` gave, bfloat16 as uint16.

        Raises:
            CheckpointError: naming the first array that is missing or of another size or type.
        """
        for unit in (*self.owned, *self.resident.units):
            key, parts = unit.key, self._parts(unit)
            for part, tensor in parts.items():
                target = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
                value = arrays.get(f"{part}/{key}")
                if value is None or value.shape != tuple(target.shape) or value.dtype != target.numpy().dtype:
                    raise CheckpointError(
                        f"the checkpoint does not fit: {part}/{key}",
                        expected=f"{target.numpy().dtype} {list(target.shape)}",
                        received=None if value is None else f"{value.dtype} {list(value.shape)}",
                        hint="resume with the settings, and on a machine with the compiler, that wrote it",
                    )
                target.copy_(torch.from_numpy(value))
            if unit.index not in self.states:
                self.resident.load(unit, parts)
            elif self.disk is not None and self.disk.holds(unit):
                fields = {name: tensor for name, tensor in parts.items() if name not in ("master", "high", "low")}
                self.disk.put(unit, layer_adam.Moments(self.states[unit.index].moments.kind, **fields))

    @property
    def bytes(self) -> int:
        """Of masters, moments, and buffers for conversion and for the disk."""
        tensors = [memory for memory, _ in self.converted]
        tensors += [] if self.disk is None else self.disk.staging
        for state in self.states.values():
            tensors += [t for t in (state.master, state.high, state.low) if t is not None]
            tensors += state.moments.tensors().values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @staticmethod
    def _master(state: layer_adam.HostState) -> Tensor:
        if state.master is None:
            raise RuntimeError("a state in split form has no float32 master")
        return state.master
