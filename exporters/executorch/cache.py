"""What the blocks of a program keep of the tokens that were read: keys and values by position, and
states of convolutions and of delta rules, which every pass replaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.manifest import ProgramSpec, TensorPort

WRITTEN = ("keys", "values")
"""Roles of tensors that are kept by position."""
REPLACED = ("conv_state", "delta_state")
"""Roles of what only goes on: it is of all tokens before the next one."""


class Cache:
    """The kept tensors of every layer.

    Attributes:
        layers: of each layer, by role; layers that attend to another's keys and values share them.
        marked: tokens that were read when the states were copied last.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        import torch

        own: dict[tuple[str, int], Tensor] = {}
        self.layers: list[dict[str, Tensor]] = [{} for _ in range(spec.layers)]
        for layer, port in kept_ports(spec):
            # Zeros: masked values are still multiplied, and garbage may be NaN.
            key = (str(port.role), owner(port, layer))
            if key not in own:
                own[key] = torch.zeros(port.shape)
            self.layers[layer][key[0]] = own[key]
        self.states = [(one, role) for one in self.layers for role in one if role in REPLACED]
        self.marked = 0
        self._copies: list[Tensor] = []

    def write(self, layer: int, outputs: Mapping[str, Tensor], read: int, count: int) -> None:
        """Keep what a block gave: keys and values of its first `count` tokens at `read`, or its new
        states."""
        cache = self.layers[layer]
        for role in cache.keys() & outputs.keys():
            if role == "keys":
                cache[role][:, :, read : read + count] = outputs[role][:, :, :count]
            elif role == "values":
                cache[role][:, read : read + count] = outputs[role][:, :count]
            else:
                cache[role] = outputs[role]

    def mark(self, read: int) -> None:
        """Copy the states, so that `rewind` can go back to this place."""
        self.marked = read
        self._copies = [one[role] for one, role in self.states]

    def rewind(self, read: int, tokens: int) -> int:
        """Forget all but the first `tokens` of the tokens that were read, or more; return how many
        are left."""
        if not self.states or tokens >= read:
            return min(tokens, read)
        if self._copies and self.marked <= tokens:
            for (one, role), copy in zip(self.states, self._copies, strict=True):
                one[role] = copy
            return self.marked
        for one, role in self.states:
            one[role] = one[role].new_zeros(one[role].shape)
        self._copies = []
        return 0


def kept_ports(spec: ProgramSpec) -> Iterator[tuple[int, TensorPort]]:
    """Give every layer's ports of the state that it keeps or borrows."""
    for name, method in spec.methods.items():
        if name.startswith("block_prefill"):
            for layer in spec.layers_of(name):
                yield from (
                    (layer, port) for port in method.inputs if port.role in (*WRITTEN, *REPLACED)
                )


def owner(port: TensorPort, layer: int) -> int:
    """Return the layer whose keys or values a port of that layer is."""
    number = port.name.partition(" ")[2]
    return int(number) if number else layer


def kept_bytes(spec: ProgramSpec) -> int:
    """Return the bytes of a conversation of as many tokens as the context has; 0 if the program
    keeps none."""
    own = {(port.role, owner(port, layer)): port for layer, port in kept_ports(spec)}
    return sum(4 * prod(port.shape) for port in own.values())
