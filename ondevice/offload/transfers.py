"""Transfers between host and accelerator: weights, gradients, and the inputs of layers.

With several ranks each shard goes to all ranks, and its summed gradient back to its owner. A
layer's input leaves after the forward pass has read it and is back before the backward pass needs
it (SlideFormer section 3.2)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ondevice.offload.gradients import square
from ondevice.runtime_ops import gradient_codes

if TYPE_CHECKING:
    from ondevice.offload.device import Device, Event, Lane, Timeline
    from ondevice.offload.units import Bounds, Ranks, Unit
    from ondevice.offload.worker import Task


class Slot:
    """Memory of one unit on the accelerator. `used` is when the last computation that reads it
    ends."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: Event | None = None
        self.task: Task | None = None


class Transfers:
    """Copies and what the ranks do together, on the transfer thread. Ranks must ask for the same
    ones in one order.

    Communication between ranks has its own lane, `comm`: it overlaps with copies of other units.
    """

    def __init__(self, device: Device, timeline: Timeline, ranks: Ranks) -> None:
        self.device = device
        self.timeline = timeline
        self.ranks = ranks
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
        coded: bool = False,
    ) -> Event:
        """Copy gradients to `target`.

        Args:
            coded: in 4 bits; codes are at the beginning of the target's memory then.
            norm: their squared norm, and its target on the host; the first is None if it is there.
        """
        self.device.hold("d2h", computed)
        started = self.device.record("d2h")
        if coded:
            with self.device.on("d2h"):
                source = gradient_codes.encode(source)
            target = target.view(torch.uint8)[: len(source)]
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
        """Sum `memory` over the ranks, after `computed`; return this rank's part, and when it is
        there.

        Args:
            square_to: target on the host for the squared norm of all parts.
        """
        if self.ranks.single:
            return memory, computed
        own = memory[self.ranks.own(bounds)]

        def run() -> None:
            self.ranks.reduce(memory, bounds)
            self.norm(own, square_to)

        return own, self.together(unit, computed, run)

    def norm(self, own: Tensor, square_to: Tensor | None) -> Tensor | None:
        """Return the squared norm of all ranks' parts, float32 [1], which also goes to the host; in
        the lane `comm`."""
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
        size = 0 if moved is None else moved.nbytes
        self.timeline.span(lane, unit.name, started, event, size)
        return event


AHEAD = 3
"""Inputs on the accelerator at once, and how many layers the host may run ahead of it."""
ON_HOST = 4
"""Layers whose inputs are in host memory at once if they go to disk."""


class ActivationFile(Protocol):
    """A file that takes inputs from their host buffers."""

    def begin(self, count: int, size_bytes: int, buffers: int, pin: bool) -> list[Tensor]:
        """Make room for `count` inputs; gives the host buffers, uint8: input `at` uses number `at`
        modulo their count."""
        ...

    def place(self, at: int) -> None:
        """Let input `at` have its buffer, once what that held before is in the file."""
        ...

    def write(self, at: int) -> None: ...

    def read(self, at: int) -> None: ...

    def wait(self, at: int) -> None: ...


class Activations:
    """Inputs of all layers by (layer, micro-batch), in order: saved upwards, loaded downwards."""

    def __init__(
        self, device: Device, timeline: Timeline, place: str, disk: ActivationFile | None
    ) -> None:
        self.device = device
        self.timeline = timeline
        self.place = place
        self.disk = disk
        self.shape: tuple[int, int] = (0, 0)
        self.host: list[Tensor] = []
        self.ring: list[tuple[Tensor, Event | None]] = []
        self.turn = 0
        self.bytes = 0

    def begin(self, layers: int, micro_batches: int, like: Tensor) -> None:
        """Get memory for a step: `like` is the largest input. Reuses the last step's if it fits."""
        self.kept: dict[int, Tensor] = {}
        self.leaving: deque[tuple[Event, Tensor, int]] = deque()
        self.left_host: dict[int, Event] = {}
        self.arrived: dict[int, tuple[int, Event]] = {}
        self.numel: dict[int, int] = {}
        self.micro_batches = micro_batches
        if self.place == "device":
            return
        count = layers * micro_batches
        if self.shape[0] >= count and self.shape[1] >= like.numel():
            return
        self.shape = (count, like.numel())
        if self.disk is None:
            self.host = [self.device.pinned(like.numel(), like.dtype) for _ in range(count)]
        else:
            size = like.nbytes
            pin = self.device.type != "cpu"
            memory = self.disk.begin(count, size, min(count, ON_HOST * micro_batches), pin)
            self.host = [buffer.view(like.dtype) for buffer in memory]
        self.ring = [
            (self.device.empty(like.numel(), like.dtype), None) for _ in range(min(count, AHEAD))
        ]
        self.bytes = len(self.host) * like.nbytes

    def save(self, layer: int, micro: int, h: Tensor) -> None:
        """Keep the input of a layer."""
        at = layer * self.micro_batches + micro
        if self.place == "device":
            self.kept[at] = h
            return
        if self.disk is not None:
            self.disk.place(at)
        self.numel[at] = h.numel()
        host = self._host(at)[: h.numel()]
        self.device.hold("d2h", self.device.record("compute"))
        started = self.device.record("d2h")
        self.device.copy("d2h", host, h.reshape(-1))
        event = self.device.record("d2h")
        self.timeline.span("d2h", "activations", started, event, h.nbytes)
        self.leaving.append((event, h, at))
        if len(self.leaving) > AHEAD:
            self._resolve()

    def prefetch(self, layer: int, micro: int) -> None:
        """Ask for an input; at most `AHEAD` may be on their way or in use."""
        at = layer * self.micro_batches + micro
        if self.place == "device" or layer < 0 or at in self.arrived:
            return
        while (
            self.leaving
        ):  # the host waits until all are in its memory, so no event is needed from here on
            self._resolve()
        self.turn = (self.turn + 1) % len(self.ring)
        memory = self.ring[self.turn][0][: self.numel[at]]
        used = self.ring[self.turn][1]
        if self.disk is not None:
            self.disk.read(at)
            self.disk.wait(at)
        if used is not None:
            self.device.hold("h2d", used)
        started = self.device.record("h2d")
        self.device.copy("h2d", memory, self._host(at)[: memory.numel()])
        event = self.device.record("h2d")
        self.timeline.span("h2d", "activations", started, event, memory.nbytes)
        self.arrived[at] = (self.turn, event)
        ahead = at - 2 * self.micro_batches
        if self.disk is not None and ahead >= 0:
            above = self.left_host.get(ahead + len(self.host))
            if above is not None:
                above.wait()
                self.disk.read(ahead)
            self.left_host[at] = event

    def load(self, layer: int, micro: int, shape: tuple[int, ...]) -> Tensor:
        """Return the input of a layer again; `done` says when it is no longer needed."""
        at = layer * self.micro_batches + micro
        if self.place == "device":
            return self.kept.pop(at)
        self.prefetch(layer, micro)
        turn, event = self.arrived[at]
        self.device.hold("compute", event)
        return self.ring[turn][0][: math.prod(shape)].view(shape)

    def done(self, layer: int, micro: int) -> None:
        """Release an input: what was computed until now is the last that reads it."""
        at = layer * self.micro_batches + micro
        if self.place != "device":
            turn, _ = self.arrived.pop(at)
            self.ring[turn] = (self.ring[turn][0], self.device.record("compute"))

    def _resolve(self) -> None:
        """The oldest input that leaves is on the host now, and goes on to the disk."""
        event, _, at = self.leaving.popleft()
        event.wait()
        if self.disk is not None:
            self.disk.write(at)

    def _host(self, at: int) -> Tensor:
        return self.host[at % len(self.host)]
