"""The window of layers of a mixture: a layer comes without its experts, and those that tokens are
sent to follow when its router has chosen.

Their gradients leave; the others' are zeros, which the host writes itself. So an expert that no
token reached is updated as AdamW in memory would: its moments decay, and its master moves by them.
The bits are those of a layer that moves whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ondevice.core.errors import ConfigError, ModelError
from ondevice.offload.config import copied_share
from ondevice.offload.window import Window
from ondevice.offload.worker import FIRST

if TYPE_CHECKING:
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Event
    from ondevice.offload.transfers import Slot
    from ondevice.offload.units import Unit, Units


@dataclass(frozen=True)
class Experts:
    """The elements of a layer's unit that belong to each expert.

    Attributes:
        module: name of what holds the experts' matrices [experts, ...].
        each: spans of each expert; `body` those of the rest of the layer.
    """

    module: str
    each: tuple[tuple[slice, ...], ...]
    body: tuple[slice, ...]

    @classmethod
    def of(cls, unit: Unit) -> Experts | None:
        """Return None for a layer without experts."""
        modules = {piece.name.rpartition(".")[0] for piece in unit.pieces if piece.stacked}
        if len(modules) != 1:
            return None
        (module,) = modules
        pieces = [piece for piece in unit.pieces if piece.name.rpartition(".")[0] == module]
        count = pieces[0].shape[0]
        sizes = [(piece.offset, piece.numel // count) for piece in pieces]
        each = tuple(
            tuple(slice(low + e * size, low + (e + 1) * size) for low, size in sizes)
            for e in range(count)
        )
        held = [slice(piece.offset, piece.offset + piece.numel) for piece in pieces]
        return cls(module, each, tuple(_between(held, unit.numel)))

    def spans(self, experts: Iterable[int], body: bool = False) -> list[slice]:
        """Return the elements of these experts, and of the rest of the layer if `body`."""
        found = [span for e in experts for span in self.each[e]]
        return _joined([*found, *(self.body if body else ())])

    def others(self, experts: set[int]) -> list[slice]:
        """Return the elements of all experts but these."""
        return self.spans(set(range(len(self.each))) - experts)


class ExpertWindow(Window):
    """`Window` for layers with experts; see the module.

    Attributes:
        streams: this pass fetches only the experts that it uses.
        used: experts of each layer that this pass has used.
    """

    def __init__(self, chosen: int, *shared: Any) -> None:
        super().__init__(*shared)
        config: EngineConfig = shared[2]
        self.setting = config.fetched_experts
        self.chosen = chosen
        whole = self.store.disk  # masters in a file are read as one
        self.parts = [
            None if whole and whole.holds_master(unit) else Experts.of(unit)
            for unit in self.units.layers
        ]
        self.streams = False
        self.used: list[set[int]] = []
        self.present: list[set[int]] = []

    def forget_layers(self, tokens: int) -> None:
        """Begin a pass of so many tokens."""
        super().forget_layers(tokens)
        self.used = [set() for _ in self.parts]
        self.present = [set() for _ in self.layers]
        counts = [len(part.each) for part in self.parts if part is not None]
        self.streams = bool(counts) and (
            copied_share(self.setting, counts[0], self.chosen, tokens) < 1 or self.setting == "used"
        )

    def fetch_layer(self, i: int) -> None:
        """Ask for a layer without experts, or in the backward pass with those that it used."""
        parts = self._parts(i)
        at = i % len(self.layers)
        if parts is None or self.loaded[at] == i:
            super().fetch_layer(i)
            return
        self.loaded[at] = i
        self.present[at] = set(self.used[i])
        self._fetch_spans(i, parts.spans(self.used[i], body=True), 0)

    def need(self, i: int, experts: Tensor) -> None:
        """Let the experts that tokens are sent to be there; computations that follow see them.

        Args:
            experts: their numbers, which may have a number for none.
        """
        parts = self._parts(i)
        if parts is None:
            return
        asked = {e for e in experts.unique().tolist() if e < len(parts.each)}
        at = i % len(self.layers)
        missing = asked - self.present[at]
        self.used[i] |= asked
        self.present[at] |= missing
        if missing:
            self._fetch_spans(i, parts.spans(missing), FIRST)
            self.arrive(self.layers[at])

    def _parts(self, i: int) -> Experts | None:
        """Return None for a layer that moves whole, or stays."""
        if not self.streams or i < self.kept_layers:
            return None
        return self.parts[i]

    def _fetch_spans(self, i: int, spans: list[slice], priority: int) -> None:
        unit = self.units.layers[i]
        slot: Slot = self.layers[i % len(self.layers)]
        used = slot.used

        def run() -> Event | None:
            self.updater.wait(unit)
            event = None
            for span in spans:
                source = self.store.outgoing(unit, span)
                event = self.transfers.to_device(unit, slot.memory[span], source, used)
                self.store.sent(event)
            return event

        slot.task = self.worker.submit(unit.name, run, priority)

    def _leaving(self, i: int) -> tuple[list[slice], list[slice]]:
        parts = self._parts(i)
        if parts is None:
            return super()._leaving(i)
        return parts.spans(self.used[i], body=True), parts.others(self.used[i])


def open_window(family: Any, units: Units, *shared: Any) -> Window:
    """Return the window of a mixture under AdamW, which streams experts if one process can.

    Raises:
        ConfigError: `experts: used` with several ranks, which gather whole layers.
    """
    store, config = shared[:2]
    if store.ranks.single:
        return ExpertWindow(family.dims.active_experts, units, *shared)
    if config.fetched_experts == "used":
        raise ConfigError(
            "several processes gather layers with all of their experts",
            expected="experts: auto or all, or one process",
            received=f"experts: used, {store.ranks.world} processes",
        )
    return Window(units, *shared)


def listen(family: Any, window: ExpertWindow) -> Callable[[], None]:
    """Tell a window which experts each layer asks for; returns what ends that."""
    if hasattr(family, "on_routing"):
        family.on_routing = window.need
        return partial(setattr, family, "on_routing", None)
    hooks = []
    for i, part in enumerate(window.parts):
        if part is not None:
            module = family.model.get_submodule(part.module)
            hook = partial(_tell, window, i)
            hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def stop() -> None:
        for hook in hooks:
            hook.remove()

    return stop


def _tell(
    window: ExpertWindow, i: int, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Find the numbers of experts among what a module of experts is called with."""
    for value in (*given, *named.values()):
        if isinstance(value, Tensor) and not value.is_floating_point():
            window.need(i, value)
            return
    raise ModelError(
        f"the experts of layer {i} are not told which of them the tokens use",
        expected="the experts' numbers among their inputs",
        received=type(module).__name__,
        hint="method.experts: all",
    )


def _between(held: list[slice], size: int) -> list[slice]:
    """Return the rest of `size` elements."""
    left = []
    at = 0
    for span in sorted(held, key=lambda span: span.start):
        if span.start > at:
            left.append(slice(at, span.start))
        at = span.stop
    if at < size:
        left.append(slice(at, size))
    return left


def _joined(spans: list[slice]) -> list[slice]:
    """Return spans in order, those that touch as one: each is a copy."""
    found: list[slice] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and found[-1].stop == span.start:
            span = slice(found.pop().start, span.stop)
        found.append(span)
    return found
