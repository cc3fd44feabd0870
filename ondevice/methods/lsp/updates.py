"""Path of a gradient: to the host, through AdamW in the subspace, and back as an update (Algorithm
3).

Three threads, one for each direction of the bus and one for the update, so that different layers
are in all of them at once. Each takes the most urgent task that is ready. Schedules:

- `layerwise`: first come, first served from the last layer down to the transition layer; below it
  the lowest layer
  first, since the next forward pass needs it first, and before all that came earlier.
- `zero`: ZeRO-Offload's (Algorithm 1): all updates run and return after the backward pass, in the
  order of arrival,
  and no forward pass begins before the last of them.

Of several ranks each updates its shards: gradients are summed on the accelerators before they
leave, updates gathered when they are needed. The computing thread asks for both, in the order of
the passes, because the order of the other threads differs between ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.core.errors import TrainingError
from ondevice.offload.gradients import Clipping, Step, square
from ondevice.offload.transfers import Slot, Transfers
from ondevice.offload.worker import Pool, Watch, Worker
from ondevice.runtime_ops.layer_adam import AdamStep, HostState, layer_adam, torch_adam

if TYPE_CHECKING:
    from ondevice.methods.lsp.config import LspConfig
    from ondevice.methods.lsp.projected import ProjectedUnit
    from ondevice.offload.device import Device, Event, Timeline
    from ondevice.offload.host import HostStore
    from ondevice.offload.units import Ranks, Unit, Units

LATER = 1 << 20
"""Added to the priority of tasks in the order of arrival: all urgent tasks go before them."""


class Ticket:
    """One gradient under way, which may leave after `ready`.

    Once `returned` is set, its update is in the accelerator's memory: this rank's shard of it."""

    def __init__(self, now: Step, ready: Event, doing: str) -> None:
        self.now = now
        self.ready = ready
        self.doing = doing
        self.returned = threading.Event()


class Updates:
    """Host memory for gradients and updates, the three threads, and clipping."""

    def __init__(
        self, units: Units, parts: list[ProjectedUnit], store: HostStore, config: LspConfig, device: Device,
        timeline: Timeline, watch: Watch, threads: int, ranks: Ranks,
    ) -> None:  # fmt: skip
        self.units = units
        self.parts = parts
        self.store = store
        self.config = config
        self.device = device
        self.timeline = timeline
        self.watch = watch
        self.threads = threads
        self.ranks = ranks
        self.transfers = Transfers(device, timeline, ranks)
        self.clipping = Clipping(config, units, ranks)
        narrow = max(part.own.numel for part in parts)
        exact = max(part.own_exact.numel for part in parts)
        layers = [part for part in parts if part.unit.kind == "layer"]
        count = min(config.gradient_buffers, len(layers))
        largest = max(part.here for part in layers)
        self.buffers = [
            device.pinned(largest, store.dtype) for _ in range(len(layers) if self.after else count)
        ]
        own = [part for part in parts if part.unit.kind != "layer"]
        self.own = {part.unit.index: device.pinned(part.here, store.dtype) for part in own}
        self.pool = Pool(list(self.buffers), watch)
        self.host_updates = {
            part.unit.index: device.pinned(part.own.numel, store.dtype) for part in parts
        }
        self.arrivals = {part.unit.index: device.empty(part.start, store.dtype) for part in parts}
        self.steps = torch.zeros(narrow)
        self.scratch = None
        if not store.native:
            self.scratch = torch.empty(max(narrow, exact))
        self.norms = device.pinned(len(units.all), torch.float32)
        self.tickets: dict[int, Ticket] = {}
        self.waiting: list[tuple[ProjectedUnit, Ticket, Tensor, Tensor]] = []
        self.transition = 0
        self.workers = [Worker(name, watch) for name in ("offload", "update", "upload")]
        self.offload, self.update, self.upload = self.workers

    @property
    def bytes(self) -> int:
        """Of host memory."""
        moments = [t for part in self.parts for t in part.moments.tensors().values()]
        tensors = [
            *self.buffers,
            *self.own.values(),
            *self.host_updates.values(),
            *moments,
            self.steps,
        ]
        return sum(t.nbytes for t in tensors)

    @property
    def after(self) -> bool:
        """True if updates wait for the end of the backward pass."""
        return self.config.schedule == "zero" or self.clipping.exact

    def send(self, part: ProjectedUnit, slot: Slot, exact: Tensor, norm: Tensor | None) -> None:
        """Let a gradient leave.

        Args:
            slot: its memory on the accelerator, [numel]; `slot.task` is set to when it has left.
            exact: target of the exact parameters' update, flat, in the compute dtype.
            norm: its squared norm, float32 [1]; None without clipping, or with several ranks (see
                `_sum`).
        """
        unit = part.unit
        ready = self.device.record("compute")
        host = self.norms[unit.index : unit.index + 1]
        if self.ranks.single:
            sources = [slot.memory[: part.numel]]
        else:
            sources = [slot.memory[span] for span in self._own(part)]
            ready = self._sum(part, slot.memory, sources, host, ready)
        ticket = self.tickets[unit.index] = Ticket(
            self.clipping.now, ready, f"the update of {unit.name}"
        )
        pair = None
        if norm is not None:
            pair = (norm, host)

        def run() -> Event:
            buffer = self._buffer(part)
            low = 0
            event = ready
            for source in filter(torch.Tensor.numel, sources):
                target = buffer[low : (low := low + source.numel())]
                event = self.transfers.to_host(unit, target, source, ready, pair)
            event.wait()
            if self.clipping.limit is not None:
                ticket.now.squares[unit.index] = float(host)
            if self.after:
                self.waiting.append((part, ticket, buffer, exact))
            else:
                self._submit(part, ticket, buffer, exact)
            return event

        # A gradient that is not computed yet would block the lane for those that are.
        slot.task = self.offload.submit(
            unit.name, run, self._priority(part), ready.done, ready.wait
        )

    def together(self, unit: Unit, after: Event, run: Callable[[], object]) -> Event:
        """Do what all ranks do in this order, after `after`, on the thread that computes.

        Raises:
            TrainingError: another rank is gone; the message names the layer.
        """
        try:
            return self.transfers.together(unit, after, run)
        except TrainingError as error:
            message = f"transfer of {unit.name}: {error.message}"
            raise TrainingError(message, received=error.received, hint=error.hint) from error

    def _own(self, part: ProjectedUnit) -> tuple[slice, slice]:
        """Elements of the run that this rank updates: of the changes, and of the exact
        parameters."""
        low = part.start + part.own_exact.low
        size = part.own_exact.numel
        return slice(part.own.low, part.own.low + part.own.numel), slice(low, low + size)

    def _sum(
        self, part: ProjectedUnit, memory: Tensor, own: list[Tensor], host: Tensor, computed: Event
    ) -> Event:
        """Sum a gradient over the ranks; its squared norm goes to `host` if it is clipped."""

        def run() -> None:
            for low, unit in ((0, part.subspace), (part.start, part.exact)):
                if unit.numel:
                    bounds = self.ranks.bounds(unit)
                    self.ranks.reduce(memory[low : low + bounds[-1]], bounds)
            if self.clipping.limit is not None:
                total = square(own[0]) + square(own[1])
                self.ranks.all_reduce(total)
                self.device.copy("comm", host, total)

        return self.together(part.unit, computed, run)

    def gather(
        self, part: ProjectedUnit, exact: Tensor, after: Event, changes: bool = True
    ) -> None:
        """Gather an update from all ranks: exact parameters and, if `changes`, the changes.
        Computations that follow see it."""
        if self.ranks.single:
            return
        runs = []
        if changes:
            runs = [(part.subspace, self.arrivals[part.unit.index])]

        def run() -> None:
            for unit, memory in (*runs, (part.exact, exact)):
                if unit.numel:
                    self.ranks.gather(memory, self.ranks.bounds(unit))

        self.device.hold("compute", self.together(part.unit, after, run))

    def end_backward(self) -> None:
        """End the backward pass: every gradient of the step was sent."""
        if not self.after:
            return

        sent = len(self.tickets)

        def all_here() -> bool:
            """Ready tasks go before others, so without this it would go before pending
            gradients."""
            return len(self.waiting) == sent

        def run() -> None:
            waiting = self.waiting
            self.waiting = []
            for entry in waiting:
                self._submit(*entry)

        self.offload.submit("the end of the backward pass", run, 2 * LATER, all_here)

    def wait(self, part: ProjectedUnit, exact: Tensor) -> Step | None:
        """Wait until the update is on the accelerator; return its step, None if no update is
        pending.

        Args:
            exact: as for `send`.
        """
        ticket = self.tickets.pop(part.unit.index, None)
        if ticket is None:
            return None
        self.watch.until(ticket.returned.wait, ticket.doing)
        self.gather(part, exact, ticket.ready)
        return ticket.now

    def plan(self, backward_s: float, layer_s: dict[str, float], layers: int) -> None:
        """Set the transition layer (section 4.2) from the last step's times.

        Args:
            layer_s: seconds of a layer's offload, upload and update.
        """
        slowest = max(layer_s.values())
        chain = sum(layer_s.values())
        if slowest > 0:
            self.transition = min(layers, max(0, round(layers - (backward_s - chain) / slowest)))

    def flush(self) -> None:
        """Wait until every update has arrived."""
        for ticket in list(self.tickets.values()):
            self.watch.until(ticket.returned.wait, ticket.doing)

    def close(self) -> bool:
        """End the threads; False if one hangs."""
        return all([worker.close() for worker in self.workers])

    def _priority(self, part: ProjectedUnit) -> int:
        if self.config.schedule == "zero":
            return 0
        order = part.unit.order
        if order >= self.transition:
            return LATER
        return order

    def _submit(self, part: ProjectedUnit, ticket: Ticket, buffer: Tensor, exact: Tensor) -> None:
        unit = part.unit
        priority = self._priority(part)

        def update() -> None:
            started = time.perf_counter()
            self._step(part, ticket.now, buffer)
            self.timeline.add("update", unit.name, started, time.perf_counter())
            if unit.index not in self.own:
                self.pool.give(buffer)
            self.upload.submit(unit.name, upload, priority)

        def upload() -> None:
            copies: list[tuple[Tensor, Tensor]] = []
            if part.narrow:
                copies.append(
                    (self.arrivals[unit.index][self._own(part)[0]], self.host_updates[unit.index])
                )
            if part.exact.numel:
                copies.append(self.outgoing(part, exact))
            events = [
                self.transfers.to_device(unit, target, source, None) for target, source in copies
            ]
            if part.exact.numel:
                self.store.sent(events[-1])
            for event in events[-1:]:  # the lane's last, so all
                event.wait()
            ticket.returned.set()

        self.update.submit(unit.name, update, priority)

    def outgoing(self, part: ProjectedUnit, exact: Tensor) -> tuple[Tensor, Tensor]:
        """Return target and source of this rank's shard of the exact parameters; then call
        `store.sent`."""
        own = part.own_exact
        return exact[own.low : own.low + own.numel], self.store.outgoing(own, slice(0, own.numel))

    def _step(self, part: ProjectedUnit, now: Step, buffer: Tensor) -> None:
        """AdamW: of the changes a step of length one, which the accelerator multiplies by the
        learning rate. What the memory held decays to nothing in it, so it is written once."""
        adam = self.clipping.apply(now, part.unit)
        narrow = part.own.numel
        if narrow:
            change = self.host_updates[part.unit.index]
            half = change.dtype != torch.float32
            if half:
                steps = self.steps[:narrow]
                high = change.view(torch.uint16)
            else:
                steps = change
                high = None
            state = HostState(steps, high, None, part.moments, part.unit.index)
            self._adam(buffer[:narrow], state, replace(adam, learning_rate=1.0, weight_decay=1.0))
        if part.exact.numel:
            self._adam(buffer[narrow : part.here], self.store.states[part.unit.index], adam)

    def _adam(self, gradient: Tensor, state: HostState, adam: AdamStep) -> None:
        if self.scratch is not None:
            torch_adam(gradient, state, adam, self.scratch[: gradient.numel()])
        else:
            layer_adam(gradient, state, adam, threads=self.threads)

    def _buffer(self, part: ProjectedUnit) -> Tensor:
        """Host memory for a gradient: one of the layers' buffers, or the table's own, free since
        the forward pass."""
        own = self.own.get(part.unit.index)
        if own is None:
            return self.pool.borrow(
                f"waiting for host memory for the gradients of {part.unit.name}"
            )
        return own
