"""Frozen weights of layers while only their changes are trained: their placement, type and use.

A projected weight is base + P D Q^T with D in float32: the base stands still, so it may have few
bits, and D loses no small step. When a matrix gets other projectors, its change goes into the base
(`fold`), rounded stochastically if the base has 16 bits; a quantised base cannot take it, so the
old projectors and their D are retained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ondevice.core.errors import MissingPackageError
from ondevice.nn.rounding import stochastic_round
from ondevice.offload.transfers import Slot
from ondevice.offload.units import Piece

if TYPE_CHECKING:
    from ondevice.offload.device import Device, Event, Timeline
    from ondevice.offload.units import Unit

BLOCK = 64
"""Elements that share a scale in a quantised base."""


class Base(Protocol):
    """Weights of layers, in flat runs as `Unit` lays them out."""

    folds: bool
    stays: bool
    """True if `source` reads the same memory every time, and nothing else."""

    def fetch(self, unit: Unit, slot: Slot) -> None:
        """Ask for a layer early."""
        ...

    def source(self, unit: Unit, slot: Slot) -> Tensor:
        """Return the layer's weights, flat, in the compute dtype, on the compute lane: in `slot`,
        or resident."""
        ...

    def fold(self, unit: Unit, start: int, weight: Tensor, seed: int) -> None:
        """Let the unit's elements from `start` on are `weight`, float32."""
        ...

    def flat(self, unit: Unit) -> Tensor:
        """Return the weights of a layer that was folded into, flat on the host, for a
        checkpoint."""
        ...

    def load(self, unit: Unit, flat: Tensor) -> None:
        """Load the weights that `flat` returned."""
        ...


class Resident:
    """On the accelerator, in the compute dtype or in float32."""

    folds = True
    stays = True

    def __init__(
        self, units: tuple[Unit, ...], device: Device, compute: torch.dtype, dtype: torch.dtype
    ) -> None:
        self.compute = compute
        self.memory = {u.index: device.empty(u.numel, dtype) for u in units}
        for unit in units:
            _fill(unit, self.memory[unit.index])

    def fetch(self, unit: Unit, slot: Slot) -> None:
        return

    def source(self, unit: Unit, slot: Slot) -> Tensor:
        memory = self.memory[unit.index]
        if memory.dtype == self.compute:
            return memory
        return slot.memory[: unit.numel].copy_(memory)

    def fold(self, unit: Unit, start: int, weight: Tensor, seed: int) -> None:
        stochastic_round(
            self.memory[unit.index][start : start + weight.numel()], weight.view(-1), seed
        )

    def flat(self, unit: Unit) -> Tensor:
        return self.memory[unit.index].to("cpu", copy=True)

    def load(self, unit: Unit, flat: Tensor) -> None:
        self.memory[unit.index].copy_(flat)


class OnHost:
    """In pinned host memory; layers slide through the accelerator, once up and once down but for
    those that the window still holds."""

    folds = True
    stays = False

    def __init__(
        self, units: tuple[Unit, ...], device: Device, timeline: Timeline, compute: torch.dtype
    ) -> None:
        self.device = device
        self.timeline = timeline
        self.memory = {u.index: device.pinned(u.numel, compute) for u in units}
        for unit in units:
            _fill(unit, self.memory[unit.index])
        self.coming: dict[int, tuple[int, Event]] = {}

    @property
    def bytes(self) -> int:
        """Of host memory."""
        return sum(t.nbytes for t in self.memory.values())

    def fetch(self, unit: Unit, slot: Slot) -> None:
        if (
            self.coming.get(id(slot), (-1, None))[0] == unit.index
        ):  # asked for while the layer above computed
            return
        memory = slot.memory[: unit.numel]
        self.device.hold("h2d", self.device.record("compute") if slot.used is None else slot.used)
        started = self.device.record("h2d")
        self.device.copy("h2d", memory, self.memory[unit.index])
        event = self.device.record("h2d")
        self.timeline.span("h2d", unit.name, started, event, memory.nbytes)
        self.coming[id(slot)] = (unit.index, event)

    def source(self, unit: Unit, slot: Slot) -> Tensor:
        if self.coming.get(id(slot), (-1, None))[0] != unit.index:
            self.fetch(unit, slot)
        self.device.hold("compute", self.coming.pop(id(slot))[1])
        return slot.memory

    def fold(self, unit: Unit, start: int, weight: Tensor, seed: int) -> None:
        memory = self.memory[unit.index][start : start + weight.numel()]
        memory.copy_(
            stochastic_round(torch.empty_like(memory, device=weight.device), weight.view(-1), seed)
        )

    def flat(self, unit: Unit) -> Tensor:
        return self.memory[unit.index].clone()

    def load(self, unit: Unit, flat: Tensor) -> None:
        self.memory[unit.index].copy_(flat)


class Quantised:
    """On the accelerator in 8 bits, or 4 (NF4), by bitsandbytes; vectors stay in the compute dtype.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
    """

    folds = False
    stays = False

    def __init__(
        self, units: tuple[Unit, ...], where: torch.device, compute: torch.dtype, kind: str
    ) -> None:
        try:
            import bitsandbytes.functional as bnb
        except ImportError as error:
            raise MissingPackageError(
                f"method.weight_dtype: {kind} needs bitsandbytes",
                hint='pip install "ondevice-train[cuda]"',
            ) from error
        self.bnb = bnb
        self.kind = kind
        self.codes = dict[int, list[tuple[Piece, Any, Any]]]()
        for unit in units:
            self.codes[unit.index] = [
                (piece, *self._encode(piece, where, compute)) for piece in unit.pieces
            ]

    def _encode(self, piece: Piece, where: torch.device, compute: torch.dtype) -> tuple[Any, Any]:
        weight = piece.parameter.detach().to(where, compute)
        if len(piece.shape) < 2:
            return weight.reshape(-1).clone(), None
        if self.kind == "int8":
            return self.bnb.quantize_blockwise(weight.contiguous(), blocksize=BLOCK)
        return self.bnb.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")

    def fetch(self, unit: Unit, slot: Slot) -> None:
        return

    def source(self, unit: Unit, slot: Slot) -> Tensor:
        for piece, codes, state in self.codes[unit.index]:
            part = _part(slot.memory, piece)
            if state is None:
                part.copy_(codes)
            elif self.kind == "int8":
                part.copy_(self.bnb.dequantize_blockwise(codes, state).reshape(-1))
            else:
                part.copy_(self.bnb.dequantize_4bit(codes, state).reshape(-1))
        return slot.memory

    def fold(self, unit: Unit, start: int, weight: Tensor, seed: int) -> None:
        raise RuntimeError("a quantised base takes no changes")

    def flat(self, unit: Unit) -> Tensor:
        raise RuntimeError("a quantised base takes no changes")

    def load(self, unit: Unit, flat: Tensor) -> None:
        raise RuntimeError("a quantised base takes no changes")


def _part(memory: Tensor, piece: Piece) -> Tensor:
    return memory[piece.offset : piece.offset + piece.numel]


def _fill(unit: Unit, memory: Tensor) -> None:
    for piece in unit.pieces:
        _part(memory, piece).copy_(piece.parameter.detach().reshape(-1))
