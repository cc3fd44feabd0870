"""The head of a block program: losses, gradients and logits, tile by tile over the vocabulary or in
one function of this project's ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ondevice.core.program import FUSED, LOWEST
from ondevice.core.session import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.manifest import ProgramSpec

Call = Callable[[str, "dict[str, Tensor]", int], "dict[str, Tensor]"]
"""Runs a function with inputs by role, of the tile that begins at a row; gives outputs by role."""
HeadGradient = Callable[[np.ndarray], "Tensor"]
"""Takes a weight for each row, float64; gives the gradient of x of the rows' negative log
likelihoods times their weights."""


@dataclass(frozen=True)
class _HeadRows:
    """Positions that went through the head together.

    Attributes:
        places: in the flattened batch, int64 [at most `Head.rows`].
        targets: their labels, int64 [rows]; -1 behind the last.
        sums: maximum, total and label's logit over all tiles, float32 [rows] each.
    """

    places: np.ndarray
    targets: np.ndarray
    sums: list[Tensor]


class Head:
    """Runs the head's functions; see `BlocksSession`.

    Args:
        fused: take the functions in this project's ops, if the program has them.

    Attributes:
        rows: positions that go through the head together.
        tiles: (first row, first row that no tile before had) of each tile of the vocabulary; all
            have the same number of rows.
    """

    def __init__(self, spec: ProgramSpec, call: Call, fused: bool) -> None:
        self.spec = spec
        self.call = call
        self.fused = fused
        inputs = spec.methods["head_sums"].inputs
        self.rows = inputs[0].shape[0]
        tile = inputs[-1].shape[0]
        starts = range(0, spec.vocab, tile)
        self.tiles = [(min(start, spec.vocab - tile), start) for start in starts]

    def step(self, x: Tensor, labels: np.ndarray) -> tuple[np.ndarray, HeadGradient]:
        """Return each row's summed negative log likelihood, and what computes the gradient."""
        return self._fused(x, labels) if self.fused else self._tiled(x, labels)

    def losses(self, x: Tensor, labels: np.ndarray) -> np.ndarray:
        """Return each row's summed negative log likelihood."""
        if not self.fused:
            return self._tiled(x, labels)[0]
        name = f"{FUSED}losses_{labels.shape[0]}x{labels.shape[1]}"
        losses = self.call(name, self._fused_inputs(x, labels), 0)["losses"]
        return losses.numpy().reshape(labels.shape).sum(1)

    def logits(self, hidden: Tensor) -> np.ndarray:
        """Return logits float32 [vocab] of one position's hidden state [1, D]."""
        if self.fused and f"{FUSED}logits" in self.spec.methods:
            return self.call("logits", {"hidden": hidden}, 0)["logits"].numpy()[0]
        logits = np.empty(self.spec.vocab, np.float32)
        for low, _ in self.tiles:
            values = self.call("head_logits", {"hidden": hidden}, low)["logits"].numpy()[0]
            logits[low : low + values.size] = values
        return logits

    def _tiled(self, x: Tensor, labels: np.ndarray) -> tuple[np.ndarray, HeadGradient]:
        """Only positions with a label go through the head, `rows` at a time; the last of them are
        filled up with rows of weight 0."""
        targets = _targets(labels)
        nll = np.zeros(labels.shape[0], np.float32)
        parts = []
        (where,) = np.nonzero(targets.reshape(-1) != IGNORE)
        for start in range(0, where.size, self.rows):
            places = where[start : start + self.rows]
            wanted = np.full(self.rows, -1, np.int64)
            wanted[: places.size] = targets.reshape(-1)[places]
            sums = [
                x.new_full((self.rows,), LOWEST),
                x.new_zeros(self.rows),
                x.new_zeros(self.rows),
            ]
            given = {"hidden": self._labelled(x, places), "targets": _tensor(wanted)}
            for tile in self.tiles:
                sums = list(self._tile("head_sums", given, sums, tile).values())
            maximum, total, logit = (value.numpy() for value in sums)
            # In float64, so that every host rounds it alike: numpy's float32 logarithm differs
            # between processors.
            logarithm = np.log(total.astype(np.float64)).astype(np.float32)
            rows = (maximum + logarithm - logit)[: places.size]
            np.add.at(nll, places // labels.shape[1], rows)
            parts.append(_HeadRows(places, wanted, sums))
        return nll, lambda weights: self._gradient(x, parts, weights, labels.shape[1])

    def _gradient(
        self, x: Tensor, parts: list[_HeadRows], weights: np.ndarray, length_tokens: int
    ) -> Tensor:
        g = x.new_zeros(x.shape)
        for part in parts:
            scale = np.zeros(self.rows, np.float32)
            scale[: part.places.size] = weights[part.places // length_tokens]
            given = {
                "hidden": self._labelled(x, part.places),
                "targets": _tensor(part.targets),
                "token_scale": _tensor(scale),
                "gradient": x.new_zeros(self.rows, x.shape[1]),
            }
            for tile in self.tiles:
                given["gradient"] = self._tile("head_gradient", given, part.sums, tile)["gradient"]
            g[part.places] = given["gradient"][: part.places.size]
        return g

    def _labelled(self, x: Tensor, places: np.ndarray) -> Tensor:
        """The hidden states of some positions, [rows, D], filled up with zeros."""
        hidden = x.new_zeros(self.rows, x.shape[1])
        hidden[: places.size] = x[places]
        return hidden

    def _tile(
        self, name: str, given: dict[str, Tensor], sums: list[Tensor], tile: tuple[int, int]
    ) -> dict[str, Tensor]:
        first, start = tile
        names = [port.name for port in self.spec.methods["head_sums"].outputs]
        places = {
            "tile_first": _tensor(np.array([first])),
            "tile_skip": _tensor(np.array([start - first])),
        }
        so_far = {f"tile_sums {key}": value for key, value in zip(names, sums)}
        return self.call(name, {**given, **places, **so_far}, first)

    def _fused(self, x: Tensor, labels: np.ndarray) -> tuple[np.ndarray, HeadGradient]:
        """The same in one pass: each token's gradient, which a row's weight then multiplies."""
        given = self._fused_inputs(x, labels)
        given["token_scale"] = x.new_ones(labels.size)
        outputs = self.call(f"{FUSED}head_{labels.shape[0]}x{labels.shape[1]}", given, 0)

        def gradient(weights: np.ndarray) -> Tensor:
            by_row = outputs["gradient"].numpy().reshape(*labels.shape, x.shape[1])
            scaled = by_row * weights.astype(np.float32)[:, None, None]
            return _tensor(scaled.reshape(x.shape))

        return outputs["losses"].numpy().reshape(labels.shape).sum(1), gradient

    def _fused_inputs(self, x: Tensor, labels: np.ndarray) -> dict[str, Tensor]:
        targets = _targets(labels).reshape(-1)
        return {"hidden": x, "targets": _tensor(np.where(targets == IGNORE, -1, targets))}


def _targets(labels: np.ndarray) -> np.ndarray:
    """The label of each position's next token, int64 like `labels`."""
    targets = np.full(labels.shape, IGNORE, np.int64)
    targets[:, :-1] = labels[:, 1:]
    return targets


def _tensor(value: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(value)
