"""Keys and values of several texts for one pass of a model: each text has a slot, from its first
token on the left. A layer that convolves keeps a slot's last tokens instead, and one with a delta
rule its state as well.

A pass gives every text one token. Its keys and values go to the slot's next place; a query sees its
own slot's tokens, and those within the layer's window. The rest of a slot is masked, so the others
change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ondevice.models import LoadedModel
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.configuration import ROPE_TYPES

ATTENTION = "ondevice_slots"
CONV = "conv"
RECURRENT = "recurrent"
GROWTH_TOKENS = 256
PADDED_ROWS = 8
PADDED_DEVICES = ("cuda",)
"""Where every pass has so many rows, so that a text has the same bits in any company; a pass of one
row takes as long there."""


def can_share(loaded: LoadedModel) -> bool:
    """Return True if texts can share a pass: a known family, whose positions need no other text,
    and whose layers each have a cache."""
    config = loaded.model.config
    is_known = not isinstance(loaded.family, AnyDecoder) and loaded.dims.rope_type in (
        *ROPE_TYPES,
        "none",
    )
    is_known = is_known and not loaded.dims.traits.key_layers
    return is_known and config._attn_implementation == "sdpa" and not loaded.dims.classes


class Slots(Cache):
    """The cache of several texts, as a model's attention layers use it."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(layers)])
        self.lengths: list[int] = []
        """Tokens in each slot."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        """Of each layer that attends, [slots, heads, places, width]."""
        self._states: dict[tuple[str, int], Tensor] = {}
        """Of each layer that convolves, its last tokens (`CONV`): [slots, width, taps]; of one with
        a delta rule also the state of its heads (`RECURRENT`): [slots, heads, key, value]."""
        self._passing: dict[tuple[str, int], Tensor] = {}
        """These with rows for what pads the pass, which the model changes."""
        self._windows = [0] * layers
        self._room = 0
        """Places of each slot."""
        self._masks: dict[int, Tensor] = {}
        self._next: tuple[Tensor, Tensor] | None = None
        """Of the pass that is computed now: slots, and their places for the token."""

    def add(self, cache: Cache) -> None:
        """Add the cache of one text as the last slot."""
        length = cache.get_seq_length()
        self._make_room(length + 1)
        for number, layer in enumerate(cache.layers):
            own: Any = layer
            if isinstance(layer, LinearAttentionLayer):
                _append(self._states, (CONV, number), own.conv_states[0])
                if own.is_recurrent_states_initialized[0]:
                    _append(self._states, (RECURRENT, number), own.recurrent_states[0])
                continue
            if isinstance(layer, DynamicSlidingWindowLayer):
                self._windows[number] = layer.sliding_window
            _append(self._keys, number, self._slot(own.keys, length))
            _append(self._values, number, self._slot(own.values, length))
        self.lengths.append(length)

    def remove(self, index: int) -> None:
        """Remove a slot; those after it move up, and all become as short as they can."""
        stay = [number for number in range(len(self.lengths)) if number != index]
        del self.lengths[index]
        self._room = min(self._room, _room_for(max(self.lengths, default=0) + 1))
        for kept in (self._keys, self._values):
            kept.update({layer: one[stay, :, : self._room] for layer, one in kept.items()})
        self._states = {key: state[stay] for key, state in self._states.items()}

    @contextmanager
    def passing(self, config: Any, device: Any, padding: int) -> Iterator[None]:
        """Let the model's layers use the slots for one pass, which adds a token to each; `padding`
        rows belong to no slot."""
        global _slots
        self._make_room(max(self.lengths) + 1)
        places = torch.tensor(self.lengths, device=device)
        self._next = (torch.arange(len(places), device=device), places)
        self._masks = self._masks_of(places)
        self._passing = {
            key: torch.cat([state, state.new_zeros(padding, *state.shape[1:])])
            for key, state in self._states.items()
        }
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        _slots = self
        try:
            yield
        finally:
            config._attn_implementation = before
            _slots = None
        count = len(self.lengths)
        self._states = {key: state[:count] for key, state in self._passing.items()}
        self.lengths = [length + 1 for length in self.lengths]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return a layer's last tokens of every row of the pass, which the model moves on."""
        return self._passing[CONV, layer_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Return the state of a layer's heads of every row of the pass."""
        return self._passing[RECURRENT, layer_idx]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Take the state behind the pass's token."""
        self._passing[RECURRENT, layer_idx] = recurrent_states
        return recurrent_states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a token's keys and values to each slot; return all slots' of the layer."""
        assert self._next is not None  # noqa: S101  `passing` set it
        slots, places = self._next
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[slots, :, places] = key_states[: len(slots), :, 0]
        values[slots, :, places] = value_states[: len(slots), :, 0]
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest slot."""
        return max(self.lengths, default=0)

    def mask(self, layer: int) -> Tensor:
        """Return the places that each row's query sees in a layer, [rows, 1, 1, places]."""
        return self._masks[self._windows[layer]]

    def _slot(self, states: Tensor, length: int) -> Tensor:
        """Return one text's keys or values in a slot; a layer with a window has only the last."""
        slot = states.new_zeros(1, states.shape[1], self._room, states.shape[3])
        slot[:, :, length - states.shape[2] : length] = states
        return slot

    def _make_room(self, tokens: int) -> None:
        """Lengthen all slots if need be."""
        if tokens <= self._room:
            return
        room = _room_for(tokens)
        more = (0, 0, 0, room - self._room)
        for kept in (self._keys, self._values):
            kept.update({i: torch.nn.functional.pad(one, more) for i, one in kept.items()})
        self._room = room

    def _masks_of(self, last: Tensor) -> dict[int, Tensor]:
        """Build the mask for each window of a layer; queries are at the places `last`."""
        places = torch.arange(self._room, device=last.device)
        last = last[:, None]
        seen = places <= last
        masks = {}
        for window in {*self._windows}:
            near = seen
            if window:
                near = seen & (places > last - window)
            masks[window] = near[:, None, None, :]
        return masks


def _append(kept: dict[Any, Tensor], key: Any, one: Tensor) -> None:
    """Add a slot to those of a layer."""
    slots = [kept[key], one] if key in kept else [one]
    kept[key] = torch.cat(slots)


def _room_for(tokens: int) -> int:
    return -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS


_slots: Slots | None = None
"""The slots of the pass that is computed now."""


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Attend within each slot; rows that only pad the pass get zeros."""
    assert _slots is not None  # noqa: S101  `passing` set it
    rows = len(key)
    mask = _slots.mask(module.layer_idx)
    result, _ = sdpa_attention_forward(module, query[:rows], key, value, mask, **options)
    if len(query) > rows:
        result = torch.cat([result, result.new_zeros(len(query) - rows, *result.shape[1:])])
    return result, None


AttentionInterface.register(ATTENTION, _attend)


def share_pass(loaded: LoadedModel, slots: Slots, ids: Sequence[int]) -> Tensor:
    """Read one more token of each slot; return the logits after them, float32 [slots, vocab]
    on the CPU."""
    model: Any = loaded.model
    device = loaded.family.head_weight.device
    padding = 0
    if device.type in PADDED_DEVICES:
        padding = -len(ids) % PADDED_ROWS
    tokens = torch.tensor([*ids, *[0] * padding], device=device)[:, None]
    positions = torch.tensor([*slots.lengths, *[0] * padding], device=device)[:, None]
    with torch.no_grad(), slots.passing(model.config, device, padding):
        output = model(
            tokens, position_ids=positions, past_key_values=slots, use_cache=True, logits_to_keep=1
        )
    return output.logits[: len(ids), -1].float().cpu()
