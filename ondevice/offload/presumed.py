"""Updates that presume a step is not clipped, for `clip: global` (SuperOffload's speculation and
rollback, Lian et al. 2025, section 4.4).

The norm of all gradients is known only after the backward pass. Until then the update thread writes
new states of layers next to the old ones, without a scale. If the norm stays within the limit, the
new ones are taken; else they are dropped, and the old ones updated with the scale. No arithmetic is
undone, so the bits are those of a step that waits. Squares only add up: once those that have come
exceed the limit, the other layers wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ondevice.offload.groups import updates
from ondevice.runtime_ops.layer_adam import layer_adam, torch_adam

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.offload.config import EngineConfig
    from ondevice.offload.disk_states import DiskStates
    from ondevice.offload.gradients import Clipping
    from ondevice.offload.store import TieredStore
    from ondevice.offload.units import Unit
    from ondevice.runtime_ops.layer_adam import AdamStep, HostState


class Arrival:
    """What is noted once of a gradient that has come, by whichever thread looks first."""

    def __init__(self, note: Callable[[], None]) -> None:
        self.note = note
        self.noted = False


class Presumed:
    """New states of layers, and memory for `config.presumed` of them.

    Layers whose states are on a disk or partly frozen wait for the norm.
    """

    def __init__(
        self, store: TieredStore, config: EngineConfig, disk: DiskStates | None, clipping: Clipping
    ) -> None:
        self.clipping = clipping
        self.lock = threading.Lock()
        self.free: dict[int, list[HostState]] = {}
        """Memory for states, by their elements: a new state stays, and the old one is free."""
        self.written: dict[int, HostState] = {}
        self.units: set[int] = set()
        self.bytes = 0
        layers = [unit for unit in store.owned if unit.kind == "layer"]
        for unit in reversed(layers):  # as their gradients come
            on_disk = disk is not None and disk.holds(unit)
            if on_disk or not all(piece.trained for piece in unit.pieces):
                continue
            self.units.add(unit.index)
            if sum(map(len, self.free.values())) < config.presumed:
                state = store.blank(unit, config.moments)
                self.free.setdefault(unit.numel, []).append(state)
                self.bytes += sum(tensor.nbytes for tensor in state.tensors().values())

    def holds(self, unit: Unit) -> bool:
        """Return True if there may be memory for a unit's new state."""
        return unit.index in self.units and unit.numel in self.free

    def arrive(self, arrival: Arrival) -> None:
        """Take note of a gradient, unless it is noted."""
        with self.lock:
            self._note(arrival)

    def begin(self, unit: Unit, arrival: Arrival) -> HostState | None:
        """Take note of a gradient, and return memory for the unit's new state; None if it has to
        wait."""
        with self.lock:
            if arrival.noted:  # the backward pass has ended
                return None
            self._note(arrival)
            free = self.free[unit.numel]
            if self.clipping.exceeded or not free:
                return None
            return free.pop()

    def take(self, unit: Unit) -> HostState | None:
        """Return a unit's new state, if it was written, and forget it."""
        return self.written.pop(unit.index, None)

    def give(self, unit: Unit, state: HostState) -> None:
        """Let another unit write to a state that nobody reads."""
        with self.lock:
            self.free[unit.numel].append(state)

    def _note(self, arrival: Arrival) -> None:
        if not arrival.noted:
            arrival.noted = True
            arrival.note()


def write(
    unit: Unit,
    gradient: Tensor,
    state: HostState,
    into: HostState,
    adam: AdamStep,
    scratch: Tensor | None,
    threads: int,
) -> None:
    """Write the state after a step of `state` to `into`, with the bits of a step in place."""
    into.seed = state.seed
    pairs = zip(
        updates(unit, gradient, state, adam), updates(unit, gradient, into, adam), strict=True
    )
    for (part, old, settings), (_, new, _) in pairs:
        if scratch is None:
            layer_adam(part, old, settings, threads=threads, into=new)
            continue
        for name, tensor in old.tensors().items():
            new.tensors()[name].copy_(tensor)
        torch_adam(part, new, settings, scratch[: len(part)])
