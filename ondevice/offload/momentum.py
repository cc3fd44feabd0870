"""The window of layers under Muon: momenta slide with their layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.offload import muon
from ondevice.offload.transfers import Slot
from ondevice.offload.window import Window

if TYPE_CHECKING:
    from ondevice.offload.device import Event
    from ondevice.offload.units import Unit


class MuonWindow(Window):
    """`Window` with the momentum of two layers: it comes for a layer's backward pass, and leaves
    with the update."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        kind = muon.TYPES[shared[2].moments]
        largest = max(unit.matrices for unit in self.units.layers)
        self.momentum = [Slot(self.device.empty(largest, kind)) for _ in range(2)]
        self.left: dict[int, Event] = {}
        """When the momentum of each layer is on the host again."""

    def layer_gradient(self, i: int) -> Slot:
        """Ask for the momentum, and return zeroed memory for the gradients of layer `i`."""
        unit = self.units.layers[i]
        slot = self.momentum[i % 2]
        target = slot.memory[: unit.matrices]
        source = self._host_momentum(unit)

        def run() -> Event:
            if i in self.left:
                self.device.hold("h2d", self.left[i])
            return self.transfers.to_device(unit, target, source, slot.used)

        slot.task = self.worker.submit(f"momentum of {unit.name}", run)
        return super().layer_gradient(i)

    @torch.no_grad()
    def send_layer(self, i: int, slot: Slot) -> None:
        """Replace the gradients of matrices by their updates, and send both and the momentum."""
        unit = self.units.layers[i]
        own = self.arrive(self.momentum[i % 2])
        started = self.device.record("compute")
        for piece in muon.matrices(unit):
            span = slice(piece.offset, piece.offset + piece.numel)
            gradient = slot.memory[span].view(piece.shape)
            kept = own.memory[span].view(piece.shape)
            momentum = kept.float()
            gradient.copy_(muon.orthogonal(muon.direct(gradient.float(), momentum)))
            kept.copy_(momentum)
        computed = self.device.record("compute")
        self.transfers.timeline.span("backward", f"{unit.name} update", started, computed)
        target = self._host_momentum(unit)
        memory = own.memory[: unit.matrices]

        def run() -> Event:
            self.updater.wait_written(unit)
            event = self.transfers.to_host(unit, target, memory, computed)
            self.left[i] = event
            own.used = event
            return event

        own.task = self.worker.submit(f"momentum of {unit.name}", run)
        super().send_layer(i, slot)

    def _host_momentum(self, unit: Unit) -> Tensor:
        momentum = self.store.states[unit.index].momentum
        assert momentum is not None  # noqa: S101  every layer has some
        return momentum
