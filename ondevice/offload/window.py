"""The accelerator's units (SlideFormer section 3.2: pre-allocated cache units) and the thread that fills and empties
them.

Layer i lives in unit i modulo the window, in the forward as in the backward pass, so the layers that end the forward
pass are still there when the backward pass begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ondevice.offload.config import OffloadConfig
    from ondevice.offload.device import Device, Event
    from ondevice.offload.host import HostStore
    from ondevice.offload.report import Timeline
    from ondevice.offload.units import Unit, Units
    from ondevice.offload.updater import Updater
    from ondevice.offload.worker import Task, Worker


class Slot:
    """Memory of one unit on the accelerator. `used` is when the last computation that reads it ends."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: Event | None = None
        self.task: Task | None = None


def bind(unit: Unit, memory: Tensor, gradient: Tensor | None = None) -> None:
    """Let the model's parameters of `unit` be views of `memory`, and their gradients of `gradient`."""
    for piece in unit.pieces:
        span = slice(piece.offset, piece.offset + piece.numel)
        piece.parameter.grad = None
        piece.parameter.data = memory[span].view(piece.shape)
        piece.parameter.requires_grad_(gradient is not None)
        if gradient is not None:
            piece.parameter.grad = gradient[span].view(piece.shape)


class Window:
    """Cache units for layers, for the head and for the rest, each with its gradients, all made once."""

    def __init__(
        self,
        units: Units,
        store: HostStore,
        config: OffloadConfig,
        device: Device,
        timeline: Timeline,
        worker: Worker,
        updater: Updater,
    ) -> None:
        self.units, self.store, self.updater, self.device = units, store, updater, device
        self.worker, self.timeline, dtype = worker, timeline, store.dtype
        largest = max(unit.numel for unit in units.layers)
        self.layers = [Slot(device.empty(largest, dtype)) for _ in range(min(config.window, len(units.layers)))]
        self.gradients = [Slot(device.empty(largest, dtype)) for _ in range(2)]
        self.rest = Slot(device.empty(units.rest.numel, dtype))
        self.rest_gradient = Slot(device.empty(units.rest.numel, dtype))
        vocabulary, self.width = units.head.pieces[0].shape
        self.rows = -(-vocabulary // config.vocabulary_chunks)
        self.parts = [(low, min(low + self.rows, vocabulary)) for low in range(0, vocabulary, self.rows)]
        count = min(2, len(self.parts))
        self.head = [Slot(device.empty(self.rows * self.width, dtype)) for _ in range(count)]
        self.head_gradient = [Slot(device.empty(self.rows * self.width, dtype)) for _ in range(count)]
        self.held: list[int | None] = [None] * len(self.layers)
        self.norms = device.pinned(len(units.all) + len(self.parts), torch.float32)
        self.clipping = config.max_grad_norm is not None
        self.leaving: Task | None = None

    def fetch_layer(self, i: int) -> None:
        """Ask for layer `i`, unless its unit holds it."""
        at = i % len(self.layers)
        if self.held[at] != i:
            self.held[at] = i
            self._fetch(self.units.layers[i], self.layers[at], slice(0, self.units.layers[i].numel))

    def forget_layers(self) -> None:
        """What the units hold is out of date: the layers are updated between two steps."""
        self.held = [None] * len(self.layers)

    def layer(self, i: int) -> Slot:
        """The unit of layer `i`; computations that follow run once it is there."""
        return self.arrive(self.layers[i % len(self.layers)])

    def fetch_rest(self) -> None:
        self._fetch(self.units.rest, self.rest, slice(0, self.units.rest.numel))

    def fetch_head(self, part: int) -> None:
        """Ask for a part of the output head."""
        low, high = self.parts[part]
        span = slice(low * self.width, high * self.width)
        self._fetch(self.units.head, self.head[part % len(self.head)], span)

    def head_part(self, part: int) -> tuple[Slot, Tensor]:
        """The unit of that part, and its weight [rows, hidden]."""
        low, high = self.parts[part]
        slot = self.arrive(self.head[part % len(self.head)])
        return slot, slot.memory[: (high - low) * self.width].view(-1, self.width)

    def head_gradient_part(self, part: int) -> tuple[Slot, Tensor]:
        """Zeroed memory for the gradient of that part, [rows, hidden]."""
        low, high = self.parts[part]
        slot = self.arrive(self.head_gradient[part % len(self.head_gradient)])
        return slot, slot.memory[: (high - low) * self.width].zero_().view(-1, self.width)

    def layer_gradient(self, i: int) -> Slot:
        """Zeroed memory for a layer's gradients, once the one before it has left."""
        slot = self.arrive(self.gradients[i % 2])
        slot.memory.zero_()
        return slot

    def send_layer(self, i: int, slot: Slot) -> None:
        """Let the gradients of layer `i` leave, then update it."""
        unit, computed = self.units.layers[i], self.device.record("compute")
        square = self._square(unit.index, slot.memory[: unit.numel])

        def run() -> Event:
            buffer = self.updater.acquire(f"waiting for host memory for the gradients of {unit.name}")
            event = self._copy_out(unit.name, buffer[: unit.numel], slot.memory[: unit.numel], computed, square)
            self.updater.submit(unit, buffer, event, None if square is None else square[1], pooled=True)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_rest(self) -> None:
        """The same for what belongs to no layer."""
        unit, computed, slot = self.units.rest, self.device.record("compute"), self.rest_gradient
        square = self._square(unit.index, slot.memory)

        def run() -> Event:
            self.updater.wait(unit)
            event = self._copy_out(unit.name, self.updater.rest, slot.memory, computed, square)
            self.updater.submit(unit, self.updater.rest, event, None if square is None else square[1], pooled=False)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_head(self, part: int, slot: Slot) -> None:
        """The same for a part of the head; the update follows the last part, or for a tied head the embedding."""
        unit, computed = self.units.head, self.device.record("compute")
        low, high = (bound * self.width for bound in self.parts[part])
        memory = slot.memory[: high - low]
        square = None if self.units.tied else self._square(len(self.units.all) + part, memory)

        def run() -> Event:
            self.updater.wait(unit)
            event = self._copy_out(unit.name, self.updater.table[low:high], memory, computed, square)
            if part == len(self.parts) - 1 and not self.units.tied:
                total = self.norms[len(self.units.all) :] if self.clipping else None
                self.updater.submit(unit, self.updater.table, event, total, pooled=False)
            return event

        slot.task = self.worker.submit(unit.name, run)

    def send_rows(self, rows: Tensor, gradient: Tensor, host: Tensor) -> None:
        """The embedding's gradient: int64 [R], [R, hidden], and where it goes on the host."""
        unit, computed = self.units.embedding, self.device.record("compute")

        def run() -> None:
            if not self.units.tied:
                self.updater.wait(unit)
            event = self._copy_out(unit.name, host, gradient, computed, None)
            self.updater.submit_rows(rows, host, event)

        self.leaving = self.worker.submit(unit.name, run)  # keeps the rows until they have left

    def _fetch(self, unit: Unit, slot: Slot, span: slice) -> None:
        used = slot.used

        def run() -> Event:
            self.updater.wait(unit)
            source = self.store.outgoing(unit, span)
            if used is not None:
                self.device.hold("h2d", used)
            started = self.device.record("h2d")
            self.device.copy("h2d", slot.memory[: source.numel()], source)
            event = self.device.record("h2d")
            self.store.sent(event)
            self.timeline.span("h2d", unit.name, started, event, source.numel() * source.element_size())
            return event

        slot.task = self.worker.submit(unit.name, run)

    def arrive(self, slot: Slot) -> Slot:
        """Computations that follow run once what was asked of `slot` is done."""
        if slot.task is not None:
            self.device.hold("compute", slot.task.wait())
            slot.task = None
        return slot

    def _square(self, index: int, gradient: Tensor) -> tuple[Tensor, Tensor] | None:
        """The squared norm on the accelerator, and where it goes on the host."""
        if not self.clipping:
            return None
        square = torch.linalg.vector_norm(gradient, dtype=torch.float32).square().reshape(1)
        return square, self.norms[index : index + 1]

    def _copy_out(self, name: str, target: Tensor, source: Tensor, computed: Event, square: Any) -> Event:
        self.device.hold("d2h", computed)
        started = self.device.record("d2h")
        self.device.copy("d2h", target, source)
        if square is not None:
            self.device.copy("d2h", square[1], square[0])
        event = self.device.record("d2h")
        self.timeline.span("d2h", name, started, event, source.numel() * source.element_size())
        return event
