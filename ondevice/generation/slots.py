"""Keys and values of several texts for one pass of a model: each text has a slot, from its first
token on the left.

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
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ondevice.models import LoadedModel
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.base import ROPE_TYPES

ATTENTION = "ondevice_slots"
GROWTH_TOKENS = 256
PADDED_ROWS = 8
"""Rows of a pass on a GPU, so that a text has the same bits in any company; a pass of one row takes
as long there."""


def can_share(loaded: LoadedModel) -> bool:
    """Return True if texts can share a pass: a known family, whose positions need no other text."""
    config = loaded.model.config
    is_known = not isinstance(loaded.family, AnyDecoder) and loaded.dims.rope_type in (
        *ROPE_TYPES,
        "none",
    )
    return is_known and config._attn_implementation == "sdpa" and not loaded.dims.classes


class Slots(Cache):
    """The cache of several texts, as a model's attention layers use it."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[DynamicLayer() for _ in range(layers)])
        self.lengths: list[int] = []
        """Tokens in each slot."""
        self._places: list[int] = []
        self._masks: dict[int, Tensor | None] = {}
        self._windows = [0] * layers

    def add(self, cache: Cache) -> None:
        """Add the cache of one text as the last slot."""
        length = cache.get_seq_length()
        self._make_room(max([length + 1, *self.lengths]))
        self.lengths.append(length)
        for number, (own, other) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if isinstance(other, DynamicSlidingWindowLayer):
                self._windows[number] = other.sliding_window
            for name in ("keys", "values"):
                new = getattr(other, name)
                slot = new.new_zeros(1, new.shape[1], self._room, new.shape[3])
                # A layer with a window has kept only the last tokens.
                slot[:, :, length - new.shape[2] : length] = new
                old = getattr(own, name)
                setattr(own, name, slot if old is None else torch.cat([old, slot]))

    def remove(self, index: int) -> None:
        """Remove a slot; those after it move up."""
        del self.lengths[index]
        stay = [number for number in range(len(self.lengths) + 1) if number != index]
        for layer in self.layers:
            layer.keys = layer.keys[stay]
            layer.values = layer.values[stay]

    @contextmanager
    def passing(self, config: Any, device: Any) -> Iterator[None]:
        """Let the model's attention use the slots for one pass, which adds a token to each."""
        global _slots
        self._make_room(max(self.lengths) + 1)
        self._places = [*self.lengths]
        self._masks = self._masks_of(device)
        before = config._attn_implementation
        config._attn_implementation = ATTENTION
        _slots = self
        try:
            yield
        finally:
            config._attn_implementation = before
            _slots = None
        self.lengths = [length + 1 for length in self.lengths]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add a token's keys and values to each slot; return all slots' of the layer."""
        layer: Any = self.layers[layer_idx]
        rows = range(len(self._places))
        layer.keys[rows, :, self._places] = key_states[: len(rows), :, 0]
        layer.values[rows, :, self._places] = value_states[: len(rows), :, 0]
        return layer.keys, layer.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest slot."""
        return max(self.lengths, default=0)

    def mask(self, layer: int) -> Tensor | None:
        """Return the places that each row's query sees in a layer, [rows, 1, 1, places]."""
        return self._masks[self._windows[layer]]

    @property
    def _room(self) -> int:
        keys = self.layers[0].keys
        if keys is None:
            return self._first_room
        return keys.shape[2]

    def _make_room(self, tokens: int) -> None:
        """Lengthen all slots if need be."""
        wanted = -(-tokens // GROWTH_TOKENS) * GROWTH_TOKENS
        self._first_room = wanted
        for layer in self.layers:
            if layer.keys is not None and layer.keys.shape[2] < wanted:
                more = (0, 0, 0, wanted - layer.keys.shape[2])
                layer.keys = torch.nn.functional.pad(layer.keys, more)
                layer.values = torch.nn.functional.pad(layer.values, more)

    def _masks_of(self, device: Any) -> dict[int, Tensor | None]:
        """Build the mask for each window of a layer."""
        places = torch.arange(self._room, device=device)
        last = torch.tensor(self._places, device=device)[:, None]
        seen = places <= last
        masks: dict[int, Tensor | None] = {}
        for window in {*self._windows}:
            near = seen
            if window:
                near = seen & (places > last - window)
            masks[window] = near[:, None, None, :]
        return masks


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
    """Read one more token of each slot; return the logits after them, float32 [slots, vocab]."""
    model: Any = loaded.model
    device = loaded.family.head_weight.device
    padding = 0
    if device.type == "cuda":
        padding = -len(ids) % PADDED_ROWS
    tokens = torch.tensor([*ids, *[0] * padding], device=device)[:, None]
    positions = torch.tensor([*slots.lengths, *[0] * padding], device=device)[:, None]
    with torch.no_grad(), slots.passing(model.config, device):
        output = model(
            tokens, position_ids=positions, past_key_values=slots, use_cache=True, logits_to_keep=1
        )
    return output.logits[: len(ids), -1].float()
