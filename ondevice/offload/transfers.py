"""A unit's way to and from the accelerator; with several ranks, each one's share to all, and back to each its sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ondevice.offload.device import Device, Event, Lane
    from ondevice.offload.ranks import Bounds, Ranks
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
    """Copies and what the ranks do together, on the transfer thread. Ranks must ask for the same ones in one order.

    What ranks do together has a lane of its own, `comm`: copies of one unit run beside the communication of another.
    """

    def __init__(self, device: Device, timeline: Timeline, ranks: Ranks) -> None:
        self.device, self.timeline, self.ranks = device, timeline, ranks
        self.expect: Callable[[str, Event], None] = lambda name, event: None
        """Called with what the ranks have begun together, and when it is done."""

    def to_device(
        self, unit: Unit, target: Tensor, source: Tensor | None, used: Event | None
    ) -> Event:
        """Fill `target` from `source`, if there is one, after `used`."""
        if used is not None:
            self.device.hold("h2d", used)
        started = self.device.record("h2d")
        if source is not None:
            self.device.copy("h2d", target, source)
        return self._ended("h2d", unit, started, source)

    def to_host(
        self,
        unit: Unit,
        target: Tensor,
        source: Tensor,
        computed: Event,
        norm: tuple[Tensor | None, Tensor] | None = None,
    ) -> Event:
        """Copy gradients to `target`.

        Args:
            norm: their squared norm, and where on the host it goes; None in the first place: it is there already.
        """
        self.device.hold("d2h", computed)
        started = self.device.record("d2h")
        self.device.copy("d2h", target, source)
        if norm is not None and norm[0] is not None:
            self.device.copy("d2h", norm[1], norm[0])
        return self._ended("d2h", unit, started, source)

    def gather(self, unit: Unit, memory: Tensor, bounds: Bounds, copied: Event) -> Event:
        """Fill `memory` on all ranks, each one's part from there, after `copied`."""
        if self.ranks.single:
            return copied
        return self.together(unit, copied, lambda: self.ranks.gather(memory, bounds))

    def reduce(
        self,
        unit: Unit,
        memory: Tensor,
        bounds: Bounds,
        computed: Event,
        square_to: Tensor | None = None,
    ) -> tuple[Tensor, Event]:
        """Sum `memory` over the ranks, after `computed`; return this rank's part, and when it is there.

        Args:
            square_to: where on the host the squared norm of all parts goes.
        """
        if self.ranks.single:
            return memory, computed
        own = memory[self.ranks.own(bounds)]

        def run() -> None:
            self.ranks.reduce(memory, bounds)
            self.norm(own, square_to)

        return own, self.together(unit, computed, run)

    def norm(self, own: Tensor, square_to: Tensor | None) -> Tensor | None:
        """Return the squared norm of all ranks' parts, float32 [1], which also goes to the host; in the lane `comm`."""
        if square_to is None:
            return None
        total = square(own)
        self.ranks.all_reduce(total)
        self.device.copy("comm", square_to, total)
        return total

    def together(self, unit: Unit, after: Event, run: Callable[[], object]) -> Event:
        """Do what the ranks do together, in a lane of its own: NCCL needs one order."""
        self.device.hold("comm", after)
        started = self.device.record("comm")
        with self.device.on("comm"):
            run()
        event = self.device.record("comm")
        self.expect(unit.name, event)
        self.timeline.span("comm", unit.name, started, event)
        return event

    def all_reduce(self, value: Tensor, host: Tensor, computed: Event) -> Event:
        """Sum `value` over the ranks, and copy it to `host`."""
        lane: Lane = "d2h" if self.ranks.single else "comm"
        self.device.hold(lane, computed)
        with self.device.on(lane):
            self.ranks.all_reduce(value)
        self.device.copy(lane, host, value)
        return self.device.record(lane)

    def _ended(self, lane: Lane, unit: Unit, started: Event, moved: Tensor | None) -> Event:
        event = self.device.record(lane)
        size = 0 if moved is None else moved.numel() * moved.element_size()
        self.timeline.span(lane, unit.name, started, event, size)
        return event
