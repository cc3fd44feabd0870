"""The window of layers under Muon: momenta slide with their layers, of several ranks each its
shard's."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.offload import muon
from ondevice.offload.transfers import Slot
from ondevice.offload.window import Window

if TYPE_CHECKING:
    from ondevice.offload.device import Event
    from ondevice.offload.units import Bounds, Piece, Unit


class MuonWindow(Window):
    """`Window` with the momentum of two layers: it comes for a layer's backward pass, and leaves
    with the update."""

    def __init__(self, *shared: Any) -> None:
        super().__init__(*shared)
        kind = muon.TYPES[shared[2].moments]
        self.shards = [self.ranks.shard(unit) for unit in self.units.layers]
        largest = max(shard.matrices for shard in self.shards)
        self.momentum = [Slot(self.device.empty(largest, kind)) for _ in range(2)]
        self.left: dict[int, Event] = {}
        """When the momentum of each layer is on the host again."""

    def layer_gradient(self, i: int) -> Slot:
        """Ask for the momentum, and return zeroed memory for the gradients of layer `i`."""
        shard = self.shards[i]
        slot = self.momentum[i % 2]
        target = slot.memory[: shard.matrices]
        source = self._host_momentum(shard)

        def run() -> Event:
            if i in self.left:
                self.device.hold("h2d", self.left[i])
            return self.transfers.to_device(shard, target, source, slot.used)

        if source is not None:
            slot.task = self.worker.submit(f"momentum of {shard.name}", run)
        return super().layer_gradient(i)

    def send_layer(self, i: int, slot: Slot) -> None:
        """Replace the gradients of matrices by their updates, and send both and the momentum."""
        self.arrive(self.momentum[i % 2])
        if self.ranks.single:
            started = self.device.record("compute")
            unit = self.units.layers[i]
            self._direct(unit, slot.memory, self.momentum[i % 2].memory)
            _orthogonal(unit, slot.memory, slice(0, unit.numel))
            computed = self.device.record("compute")
            self.transfers.timeline.span("backward", f"{unit.name} update", started, computed)
            leave = partial(self._send_momentum, i, computed)
            self.momentum[i % 2].task = self.worker.submit(f"momentum of {unit.name}", leave)
        super().send_layer(i, slot)

    def _summed(
        self, i: int, memory: Tensor, bounds: Bounds, computed: Event, norm: Any
    ) -> tuple[Tensor, Event]:
        """Do as `Window` does; of several ranks with the updates of matrices for their
        gradients."""
        if self.ranks.single:
            return super()._summed(i, memory, bounds, computed, norm)
        unit = self.units.layers[i]
        here = self.ranks.own(bounds)

        def update() -> None:
            self.ranks.reduce(memory, bounds)
            self._direct(self.shards[i], memory[here], self.momentum[i % 2].memory)
            self.ranks.gather(memory, bounds)
            _orthogonal(unit, memory, here)

        ready = self.transfers.together(unit, computed, update)
        self._send_momentum(i, ready)
        return memory[here], ready

    def _send_momentum(self, i: int, computed: Event) -> Event:
        """Send the momentum back after `computed`; on the transfer thread."""
        shard = self.shards[i]
        slot = self.momentum[i % 2]
        target = self._host_momentum(shard)
        if target is None:
            return computed
        self.updater.wait_written(shard)
        event = self.transfers.to_host(shard, target, slot.memory[: shard.matrices], computed)
        self.left[i] = event
        slot.used = event
        return event

    @torch.no_grad()
    def _direct(self, unit: Unit, gradients: Tensor, momenta: Tensor) -> None:
        """Take the gradients of a unit's matrices into the momenta; they become directions."""
        for piece in muon.matrices(unit):
            gradient, kept = _view(piece, gradients), _view(piece, momenta)
            momentum = kept.float()
            gradient.copy_(muon.direct(gradient.float(), momentum))
            kept.copy_(momentum)

    def _host_momentum(self, shard: Unit) -> Tensor | None:
        """Return None for a rank that has no part of a matrix."""
        return self.store.states[shard.index].momentum


@torch.no_grad()
def _orthogonal(unit: Unit, directions: Tensor, here: slice) -> None:
    """Replace the directions of matrices by their updates: of those with elements in `here`."""
    for piece in muon.matrices(unit):
        if piece.offset < here.stop and here.start < piece.offset + piece.numel:
            matrix = _view(piece, directions)
            matrix.copy_(muon.orthogonal(matrix))


def _view(piece: Piece, memory: Tensor) -> Tensor:
    return memory[piece.offset : piece.offset + piece.numel].view(piece.shape)
