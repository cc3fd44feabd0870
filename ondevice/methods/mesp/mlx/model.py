"""A frozen model with its pairs: embedding, blocks one after the other, loss, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.methods.mesp.mlx import schedule
from ondevice.methods.mesp.mlx.head import ModelStages
from ondevice.methods.mesp.mlx.machine import Functions, Machine
from ondevice.methods.mesp.mlx.settings import Settings, bounds
from ondevice.methods.mesp.mlx.weights import Weights

Take = Callable[[int, str, Any, Any], None]
"""Takes layer, target, and the gradients of A and of B."""


class Model:
    """What all ways to a gradient share.

    Args:
        settings: the run's shape.
        weights: frozen.
        loss_tiles: of the vocabulary.
        loss_chunk_tokens: labelled tokens whose logits exist at once; None is all.
        functions: the stages, if not Python's.
        fixed_chunks: pad each chunk of labelled tokens to `loss_chunk_tokens`.
        clear: give back what MLX's allocator keeps after every evaluation.

    Attributes:
        adapter: A and B of each layer by target: `q_proj.A`, float32.
    """

    def __init__(
        self,
        settings: Settings,
        weights: Weights,
        *,
        loss_tiles: int = 8,
        loss_chunk_tokens: int | None = None,
        functions: Functions | None = None,
        fixed_chunks: bool = False,
        clear: bool = True,
    ) -> None:
        self.settings, self.weights = settings, weights
        self.machine = Machine(functions or ModelStages(settings), clear=clear)
        self.tiles = bounds(settings.dims.vocab, loss_tiles)
        self.chunk_tokens, self.fixed_chunks = loss_chunk_tokens, fixed_chunks
        self.adapter: list[dict[str, Any]] = [{} for _ in range(settings.dims.layers)]

    @property
    def layers(self) -> int:
        return self.settings.dims.layers

    def embed(self, ids: np.ndarray) -> Any:
        """int64 [B, T] -> x [B, T, D]."""
        rows = self.weights.embedding_rows(ids.reshape(-1))
        x = self.machine.run(schedule.embed(self.settings), rows, self.weights.table, {})["x"]
        return x.reshape(*ids.shape, -1)

    def forward(self, layer: int, x: Any) -> Any:
        """One block; `x` may be kept."""
        self.weights.announce(layer + 1)
        calls = schedule.forward(self.settings, x.shape[1])
        return self.machine.run(calls, {"x": x}, self.weights.blocks[layer], self.adapter[layer])["x"]

    def backward(self, layer: int, x: Any, g: Any, take: Take) -> Any:
        """The gradient of a block's input from that of its output; pairs go to `take` as they arise."""
        self.weights.announce(layer - 1)
        calls = schedule.backward(self.settings, x.shape[1])
        given = {"x": x, "g": g}
        del x, g
        run = self.machine.run(
            calls, given, self.weights.blocks[layer], self.adapter[layer], lambda t, a, b: take(layer, t, a, b)
        )
        return run["g"]

    def gradients(self, ids: np.ndarray, labels: np.ndarray, labelled: int, take: Take) -> float:
        """The summed loss of some rows; the gradients of (sum / `labelled`) go to `take`, last block first."""
        inputs = [self.embed(ids)]
        for layer in range(self.layers):
            inputs.append(self.forward(layer, inputs[-1]))
        loss, g = self.loss(inputs.pop(), labels, labelled)
        if g is None:
            return 0.0
        for layer in reversed(range(self.layers)):
            g = self.backward(layer, inputs.pop(), g, take)
        return loss

    def loss(self, x: Any, labels: np.ndarray, labelled: int) -> tuple[float, Any]:
        """The summed loss, and the gradient of x for (sum / `labelled`); None where no token is labelled."""
        where, wanted = targets(labels)
        if not len(where):
            return 0.0, None
        hn = self._final_norm(x)
        ghn, total = mx.zeros(hn.shape, dtype=mx.float32), 0.0
        for low, high in self._chunks(len(where)):
            place, given = self._gather(hn, where[low:high])
            given["weight"] = mx.where(mx.arange(place.size) < high - low, 1 / labelled, 0.0)
            found = self._loss(given, wanted[low:high], gradient=True)
            rows = {"ghn": ghn, "place": place, "gh": found.pop("gh")}
            ghn = self.machine.functions.call("scatter_rows", rows)["ghn"]
            mx.eval(ghn)
            total += float(mx.sum(found.pop("nll")[: high - low]))
            del given, rows
        del hn
        given = {"x": x, "ghn": ghn.reshape(x.shape)}
        del ghn, x
        return total, self.machine.run(schedule.final_norm_backward(), given, self.weights.final, {})["g"]

    def row_nll(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row's negative log likelihood float32 [rows], and labelled tokens int64 [rows]."""
        x = self.embed(ids)
        for layer in range(self.layers):
            x = self.forward(layer, x)
        return self.row_nll_of(x, labels)

    def row_nll_of(self, x: Any, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`row_nll` from the last block's output."""
        where, wanted = targets(labels)
        rows, count = where // labels.shape[1], len(labels)
        sums = np.zeros(count, dtype=np.float64)
        if len(where):
            hn = self._final_norm(x)
            for low, high in self._chunks(len(where)):
                found = self._loss(self._gather(hn, where[low:high])[1], wanted[low:high], gradient=False)
                nll = np.array(found["nll"], dtype=np.float64)[: high - low]
                sums += np.bincount(rows[low:high], nll, count)
        return sums.astype(np.float32), np.bincount(rows, minlength=count).astype(np.int64)

    def _final_norm(self, x: Any) -> Any:
        hn = self.machine.run(schedule.final_norm(), {"x": x}, self.weights.final, {})["hn"]
        return hn.reshape(-1, hn.shape[-1])

    def _gather(self, hn: Any, where: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Places of some labelled tokens, int32, and their hidden states."""
        place = mx.array(self._padded(where))
        return place, self.machine.functions.call("gather_rows", {"all": hn, "place": place})

    def _padded(self, values: np.ndarray) -> np.ndarray:
        """With zeros behind, where every chunk has the same size."""
        if not self.fixed_chunks or self.chunk_tokens is None:
            return values
        return np.pad(values, (0, self.chunk_tokens - len(values)))

    def _loss(self, given: dict[str, Any], wanted: np.ndarray, gradient: bool) -> dict[str, Any]:
        mx.eval(given)
        given |= self.weights.head_rows(self._padded(wanted))
        return self.machine.run(schedule.loss(self.settings, self.tiles, gradient), given, self.weights.head, {})

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        size = self.chunk_tokens or count
        return [(low, min(low + size, count)) for low in range(0, count, size)]


def targets(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in the flattened batch whose next token is labelled, int32 [n], and these labels, int64 [n]."""
    following = np.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]
    where = np.flatnonzero(following >= 0)
    return where.astype(np.int32), following.reshape(-1)[where]
