"""A unit's way to and from the accelerator; with several ranks, from its owner to all, and the sum back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ondevice.offload.device import Device, Event, Lane
    from ondevice.offload.ranks import Ranks
    from ondevice.offload.report import Timeline
    from ondevice.offload.units import Unit
    from ondevice.offload.worker import Task


class Slot:
    """Memory of one unit on the accelerator. `used` is when the last computation that reads it ends."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: Event | None = None
        self.task: Task | None = None


def square(gradient: Tensor) -> Tensor:
    """Return the squared norm, float32 [1]."""
    return torch.linalg.vector_norm(gradient, dtype=torch.float32).square().reshape(1)


class Transfers:
    """Copies and what the ranks do together, on the transfer thread. Ranks must ask for the same ones in one order."""

    def __init__(self, device: Device, timeline: Timeline, ranks: Ranks) -> None:
        self.device, self.timeline, self.ranks = device, timeline, ranks
        self.last: Event | None = None

    def to_device(self, unit: Unit, target: Tensor, source: Tensor | None, used: Event | None) -> Event:
        """Fill `target` from `source`, which only the owner has, after `used`."""
        if used is not None:
            self.device.hold("h2d", used)
        started = self.device.record("h2d")
        if source is not None:
            self.device.copy("h2d", target, source)
        if not self.ranks.single:
            with self._together("h2d"):
                self.ranks.broadcast(target, unit)
        return self._ended("h2d", unit, started, source)

    def to_host(
        self,
        unit: Unit,
        target: Tensor | None,
        source: Tensor,
        computed: Event,
        norm: tuple[Tensor | None, Tensor] | None = None,
    ) -> Event:
        """Copy gradients, summed over the ranks, to `target`, which only the owner has.

        Args:
            norm: their squared norm, and where on the host it goes; None in the first place: it is computed here.
        """
        self.device.hold("d2h", computed)
        started = self.device.record("d2h")
        if not self.ranks.single:
            with self._together("d2h"):
                self.ranks.reduce(source, unit)
                if norm is not None and target is not None:
                    norm = square(source), norm[1]
        if target is not None:
            self.device.copy("d2h", target, source)
            if norm is not None and norm[0] is not None:
                self.device.copy("d2h", norm[1], norm[0])
        return self._ended("d2h", unit, started, None if target is None else source)

    def all_reduce(self, value: Tensor, host: Tensor, computed: Event) -> Event:
        """Sum `value` over the ranks, and copy it to `host`."""
        self.device.hold("d2h", computed)
        with self._together("d2h"):
            self.ranks.all_reduce(value)
        self.device.copy("d2h", host, value)
        return self.device.record("d2h")

    @contextmanager
    def _together(self, lane: Lane) -> Iterator[None]:
        """One communication after the other on the accelerator, too, whatever the lane: NCCL needs one order."""
        if self.last is not None:
            self.device.hold(lane, self.last)
        with self.device.on(lane):
            yield
        self.last = self.device.record(lane)

    def _ended(self, lane: Lane, unit: Unit, started: Event, moved: Tensor | None) -> Event:
        event = self.device.record(lane)
        size = 0 if moved is None else moved.numel() * moved.element_size()
        self.timeline.span(lane, unit.name, started, event, size)
        return event
