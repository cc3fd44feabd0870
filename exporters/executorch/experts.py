"""The experts of a block program: gathers the rows of tokens that chose an expert, calls the
expert's function with its weights, and adds the rows up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ondevice.core.manifest import EXPERT

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.manifest import ProgramSpec

Call = Callable[[str, dict[str, Any], int, int], dict[str, Any]]
"""Runs a function with inputs by role, of a layer and an expert; gives its outputs by role."""


class Experts:
    """Runs the experts that tokens choose, each in the smallest function that takes its rows.

    Args:
        call: runs a function of the program.
        expert_bytes: of one expert in the weights file.

    Attributes:
        count: experts of a layer.
        layers: those that have experts.
        all: experts of all layers.
        read: layer and number of each expert whose weights a function was given since `begin`.
    """

    def __init__(self, spec: ProgramSpec, call: Call, expert_bytes: int) -> None:
        self.call = call
        self.expert_bytes = expert_bytes
        begins = f"{EXPERT}forward_"
        names = [name.removeprefix(begins) for name in spec.methods if name.startswith(begins)]
        self.sizes = sorted(map(int, names))
        self.count = spec.experts
        self.layers = spec.expert_layers
        self.all = len(self.layers) * spec.experts
        self.read: set[tuple[int, int]] = set()

    def begin(self) -> None:
        """Forget which experts were read."""
        self.read.clear()

    def figures(self, tokens: int) -> dict[str, float]:
        """Return what was read since `begin`: experts of `all`, their bytes, and the bytes
        for each of so many tokens."""
        bytes_read = len(self.read) * self.expert_bytes
        return {
            "read": len(self.read),
            "all": self.all,
            "bytes": bytes_read,
            "bytes_per_token": bytes_read / max(1, tokens),
        }

    def forward(self, layer: int, outputs: dict[str, Tensor], tokens: int | None = None) -> Tensor:
        """Add the experts to a block's hidden states, in their memory.

        Args:
            outputs: of the block's function: hidden, normed and routing.
            tokens: the first so many are real; the others get no experts.
        """
        return self._add(layer, outputs, outputs["hidden"], tokens)

    def total(self, layer: int, outputs: dict[str, Tensor], tokens: int | None = None) -> Tensor:
        """Return the sum of the experts of each token, [N, D]; see `forward`."""
        import torch

        return self._add(layer, outputs, torch.zeros_like(outputs["normed"]), tokens)

    def _add(
        self, layer: int, outputs: dict[str, Tensor], hidden: Tensor, tokens: int | None
    ) -> Tensor:
        normed = outputs["normed"]
        for expert, rows, weights in self._chosen(outputs["routing"][:tokens]):
            given = {"hidden": normed[rows], "routing": weights}
            for part, output in self._parts("forward", layer, expert, given):
                hidden.index_add_(0, rows[part], output["hidden"])
        return hidden

    def backward(self, layer: int, outputs: dict[str, Tensor], g: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a block's normed tokens through their experts, [N, D], and of the
        experts' weights, [N, experts], from that of the block's output."""
        import torch

        normed = outputs["normed"]
        gn = torch.zeros_like(normed)
        gweights = torch.zeros_like(outputs["routing"])
        for expert, rows, weights in self._chosen(outputs["routing"]):
            given = {"hidden": normed[rows], "gradient": g[rows], "routing": weights}
            for part, output in self._parts("backward", layer, expert, given):
                gn.index_add_(0, rows[part], output["gradient"])
                gweights[rows[part], expert] = output["routing_gradient"]
        return gn, gweights

    def _chosen(self, routing: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Give each expert that has tokens, in their order: its number, its tokens' places, int64
        [R], and its weights of them, float32 [R]."""
        for expert in range(self.count):
            rows = routing[:, expert].nonzero()[:, 0]
            if rows.numel():
                yield expert, rows, routing[rows, expert]

    def _parts(
        self, what: str, layer: int, expert: int, given: dict[str, Tensor]
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        """Run an expert's function on all its rows, as many at once as it takes; give the range of
        the rows and the function's outputs of them."""
        self.read.add((layer, expert))
        count = given["hidden"].shape[0]
        start = 0
        while start < count:
            left = count - start
            size = next((size for size in self.sizes if size >= left), self.sizes[-1])
            part = slice(start, min(count, start + size))
            filled = {key: _filled(value[part], size) for key, value in given.items()}
            outputs = self.call(f"{EXPERT}{what}_{size}", filled, layer, expert)
            real = part.stop - part.start
            yield part, {key: value[:real] for key, value in outputs.items()}
            start = part.stop


def _filled(rows: Tensor, size: int) -> Tensor:
    """Return the rows, filled up with zeros."""
    if rows.shape[0] == size:
        return rows
    filled = rows.new_zeros(size, *rows.shape[1:])
    filled[: rows.shape[0]] = rows
    return filled
