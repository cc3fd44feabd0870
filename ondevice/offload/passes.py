"""The accelerator's computation in a step: forward, head, backward, one layer after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.offload.gradients import Accumulator, ChunkedLoss
from ondevice.offload.liger import LigerLoss

if TYPE_CHECKING:
    from ondevice.models import Family
    from ondevice.nn.cross_entropy import Scale
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.device import Device, Event, Timeline
    from ondevice.offload.graphs import Compute
    from ondevice.offload.transfers import Activations, Slot
    from ondevice.offload.units import Units
    from ondevice.offload.window import Window

AHEAD = 3
"""Layers that may be in the queue before the accelerator has computed the first of them."""
LENGTHS = 8
"""Lengths whose positions are kept."""


class Passes:
    """Forward, head and backward over all micro-batches of a step, on the thread that calls."""

    def __init__(
        self,
        family: Family,
        units: Units,
        config: EngineConfig,
        device: Device,
        timeline: Timeline,
        window: Window,
        activations: Activations,
        where: torch.device,
        liger: bool,
    ) -> None:
        self.family = family
        self.units = units
        self.config = config
        self.device = device
        self.timeline = timeline
        self.window = window
        self.dtype = window.dtype
        self.activations = activations
        self.where = where
        self.liger = liger
        self.queue: deque[Event] = deque()
        self.layers = len(units.layers)
        self.unique = np.zeros(0, dtype=np.int64)
        self.kept_positions: dict[int, tuple[Tensor, Tensor]] = {}
        self.entering: Slot | None = None
        self.masks: list[tuple[Tensor, ...]] = []
        """Each micro-batch's mask, of its padding or its tree; empty if it is the causal mask."""
        self.tree: tuple[np.ndarray, np.ndarray] | None = None
        """Positions and branches of what `branches_nll` computes, int64 [B, T] each."""
        self.sums, self.rest_sums = (Accumulator(device, self.dtype) for _ in range(2))

    @torch.no_grad()
    def forward(
        self, ids: np.ndarray, micro_batches: list[slice], keep: bool, every: np.ndarray
    ) -> list[Tensor]:
        """Return the last layer's output of each micro-batch, [rows, T, hidden]; `keep` saves each
        layer's input.

        `every` has the rows of all ranks together; `ids` itself for a single one.
        """
        window = self.window
        window.forget_layers(ids.size)
        entering = self._ask(every)
        window.fetch_rest()
        for i in range(len(window.layers)):
            window.fetch_layer(i)
        embedded = self._pick(ids, entering)
        self.entering = entering
        window.bind(self.units.rest, window.arrive(window.rest))
        h, positions = self._placed(embedded, ids, micro_batches)
        if keep:
            self.activations.begin(self.layers, len(micro_batches), h[0])
        for i, unit in enumerate(self.units.layers):
            slot = window.layer(i)
            window.bind(unit, slot)
            self._gate()
            for m, entered in enumerate(h):
                if keep:
                    self.activations.save(i, m, entered)
                position = positions[m]
                forward = self._forward(i, position)
                inputs = (entered, *self.masks[m])
                with self._computing("forward", unit.name):
                    if keep:
                        (left,) = window.run("forward", i, None, position, inputs, forward)
                    else:
                        (left,) = forward(*inputs)
                h[m] = left
            slot.used = self._end()
            if i + len(window.layers) < self.layers:
                window.fetch_layer(i + len(window.layers))
            if i == max(0, self.layers - len(window.layers)) and not self.family.dims.classes:
                window.fetch_head(0)
        return h

    @torch.no_grad()
    def score(self, h: list[Tensor], labels: list[np.ndarray]) -> Tensor:
        """Return negative log likelihood of each row, float32 [B]."""
        if self.family.dims.classes:
            pairs = zip(h, labels, strict=True)
            return torch.cat(
                [self.family.class_nll(x[:, 0], self._upload(rows[:, 1])) for x, rows in pairs]
            )
        scores = self._scores([self.family.final_norm(x) for x in h], labels, 1.0)
        self._score_tiles(scores)
        nll = [
            score.tokens().view(len(rows), -1).sum(1)
            for score, rows in zip(scores, labels, strict=True)
        ]
        return torch.cat(nll)

    @torch.no_grad()
    def branches_nll(
        self,
        ids: np.ndarray,
        tree: tuple[np.ndarray, np.ndarray],
        micro_batches: list[slice],
        every: np.ndarray,
        sources: np.ndarray,
        labels: np.ndarray,
    ) -> Tensor:
        """Return each label's negative log likelihood, float32 [N]; see `core.session.Branching`.

        Args:
            tree: positions and branches of each token, int64 [B, T].
        """
        self.tree = tree
        try:
            h = torch.cat(self.forward(ids, micro_batches, False, every))
        finally:
            self.tree = None
        normed = self.family.final_norm(h.flatten(0, 1)[self._upload(sources)])
        size = self.config.loss_chunk_tokens
        score = ChunkedLoss(normed, self._upload(labels), 1.0, size)
        self._score_tiles([score])
        return score.tokens()

    def head(
        self, h: list[Tensor], labels: list[np.ndarray], scale: Scale
    ) -> tuple[list[Tensor], Tensor]:
        """Return gradients of the last layer's outputs, and the summed loss; the head's own
        gradients leave.

        A `scale` that is a function gets the losses of all rows, which takes a pass over the head
        before.
        """
        leaving = self.window.arrive(self.window.rest_gradient)
        leaving.memory.zero_()
        self.window.bind(self.units.rest, self.window.rest, leaving)
        if self.family.dims.classes:
            assert not callable(scale)  # noqa: S101  answers to prefer come from decoders
            return self._classify(h, labels, scale)
        entered = [x.detach().requires_grad_(True) for x in h]
        normed = [self.family.final_norm(x) for x in entered]
        self._gate()
        same = 1.0 if callable(scale) else scale
        scores = self._scores([x.detach() for x in normed], labels, same)
        total, normed_gradients = self._head_backward(
            scores, [len(rows) for rows in labels], scale if callable(scale) else None
        )
        gradients: list[Tensor] = []
        self.rest_sums.begin(len(h))
        for x, normal, gradient in zip(entered, normed, normed_gradients, strict=True):
            padded = torch.zeros_like(normal)  # the last position has no next token
            padded[:, :-1] = gradient.view(padded.shape[0], -1, padded.shape[-1])
            torch.autograd.backward(normal, padded)
            self.rest_sums.add(leaving.memory)
            gradients.append(_gradient(x))
        self._end()
        return gradients, total

    def _classify(
        self, h: list[Tensor], labels: list[np.ndarray], scale: float
    ) -> tuple[list[Tensor], Tensor]:
        """Do as `head` does, for a classification head, one of the rest; the embedding gets no
        gradient here."""
        gradients = list[Tensor]()
        total = torch.zeros((), device=self.where)
        self._gate()
        self.rest_sums.begin(len(h))
        for x, rows in zip(h, labels, strict=True):
            entered = x.detach().requires_grad_(True)
            with self._computing("backward", "head"):
                nll = self.family.class_nll(entered[:, 0], self._upload(rows[:, 1])).sum()
                torch.autograd.backward(nll * scale)
                self.rest_sums.add(self.window.rest_gradient.memory)
            total += nll.detach()
            gradients.append(_gradient(entered))
        for tile in range(len(self.window.tiles)):
            leaving, _ = self.window.head_gradient_tile(tile)
            self.window.send_head(tile, leaving)
        self._end()
        return gradients, total

    def backward(
        self, gradients: list[Tensor], ids: np.ndarray, micro_batches: list[slice]
    ) -> None:
        """Go down through the layers; every unit's gradients leave as soon as they are there."""
        window = self.window
        activations = self.activations
        position = self._positions(ids.shape[1])
        micro = range(len(micro_batches))
        order = [(i, m) for i in reversed(range(self.layers)) for m in micro]
        for i, unit in reversed(list(enumerate(self.units.layers))):
            window.fetch_layer(i)
            slot = window.layer(i)
            leaving = window.layer_gradient(i)
            window.bind(unit, slot, leaving)
            self._gate()
            backward = self._backward(i, position)
            self.sums.begin(len(micro))
            for m in micro:
                entered = activations.load(i, m, tuple(gradients[m].shape))
                at = (self.layers - 1 - i) * len(micro_batches) + m
                if at + 1 < len(order):
                    activations.prefetch(*order[at + 1])
                with self._computing("backward", unit.name):
                    inputs = (entered, gradients[m], *self.masks[m])
                    (gradients[m],) = window.run("backward", i, leaving, position, inputs, backward)
                    self.sums.add(leaving.memory)
                activations.done(i, m)
            self.sums.finish(leaving.memory)
            slot.used = self._end()
            window.send_layer(i, leaving)
            if i >= len(window.layers):
                window.fetch_layer(i - len(window.layers))
        self._send_embedding(gradients, ids, micro_batches)
        self.rest_sums.finish(window.rest_gradient.memory)
        window.send_rest()

    def _placed(
        self, embedded: Tensor, ids: np.ndarray, micro_batches: list[slice]
    ) -> tuple[list[Tensor], list[Any]]:
        """Return what the first block takes of each micro-batch, and its positions; `masks` become
        theirs."""
        if self.tree is None:
            self.masks = [self._mask(ids[rows]) for rows in micro_batches]
            h = [self.family.place(embedded[rows]) for rows in micro_batches]
            return h, [self._positions(ids.shape[1])] * len(h)
        h = []
        positions = []
        self.masks = []
        for rows in micro_batches:
            position_ids, branches = (self._upload(part[rows]) for part in self.tree)
            h.append(self.family.place(embedded[rows], position_ids))
            position, mask = self.family.branched(h[-1], position_ids, branches)
            positions.append(position)
            self.masks.append((mask,))
        return h, positions

    def _forward(self, i: int, position: tuple[Tensor, Tensor]) -> Compute:
        return lambda h, *mask: (self.family.block(i, h, position, *mask),)

    def _backward(self, i: int, position: tuple[Tensor, Tensor]) -> Compute:
        """From a layer's input and its output's gradient: the input's gradient. Parameters' are
        added."""

        def run(entered: Tensor, gradient: Tensor, *mask: Tensor) -> tuple[Tensor]:
            entered = entered.detach().requires_grad_(True)
            with torch.enable_grad():
                left = self.family.block(i, entered, position, *mask)
            torch.autograd.backward(left, gradient)
            return (_gradient(entered),)

        return run

    def _ask(self, every: np.ndarray) -> Slot:
        """Fetch the embedding's rows that all ranks read, each once, before the layers."""
        self.unique = np.unique(every)
        return self.window.fetch_rows(torch.from_numpy(self.unique), every.size)

    def _pick(self, ids: np.ndarray, shared: Slot) -> Tensor:
        """This rank's rows out of those of all, [B, T, hidden]."""
        at = self._upload(np.searchsorted(self.unique, ids))
        width = self.family.dims.hidden
        return self.window.arrive(shared).memory[: len(self.unique) * width].view(-1, width)[at]

    def _send_embedding(
        self, gradients: list[Tensor], ids: np.ndarray, micro_batches: list[slice]
    ) -> None:
        """Gradient of the embedding: one row for each distinct token, summed over its positions."""
        unique = self.unique
        inverse = np.searchsorted(self.unique, ids)
        width = self.family.dims.hidden
        rows = len(unique)
        dtype = self.dtype
        if len(micro_batches) > 1:
            dtype = torch.float32
        row_gradients = torch.zeros(rows, width, dtype=dtype, device=self.where)
        for rows_of, gradient in zip(micro_batches, gradients, strict=True):
            entered = self._rows(ids[rows_of], gradient).detach().requires_grad_(True)
            placed = self.family.place(entered)
            if placed is not entered:
                torch.autograd.backward(placed, gradient)
                self.rest_sums.add(self.window.rest_gradient.memory)
                if entered.grad is not None:
                    gradient = entered.grad
            at = self._upload(inverse[rows_of])
            row_gradients += torch.ops.aten.embedding_dense_backward(gradient, at, rows, -1, False)
        row_gradients = row_gradients.to(self.dtype)
        padding = self.family.embedding.padding_idx
        if padding is not None:
            row_gradients[torch.from_numpy(unique == padding).to(self.where)] = 0
        self.window.send_rows(torch.from_numpy(unique), row_gradients)

    def _rows(self, ids: np.ndarray, gradient: Tensor) -> Tensor:
        """The embedding's rows of `ids` if a norm follows; else zeros, as positions are only
        added."""
        if self.entering is None or not self.family.dims.classes:
            return torch.zeros_like(gradient)
        return self._pick(ids, self.entering)

    def _scores(
        self, normed: list[Tensor], labels: list[np.ndarray], scale: float
    ) -> list[ChunkedLoss]:
        """Each position paired with the label of the next token."""
        scores = []
        for x, rows in zip(normed, labels, strict=True):
            targets = self._upload(rows[:, 1:]).reshape(-1)
            flat = x[:, :-1].reshape(-1, x.shape[-1])
            scores.append(ChunkedLoss(flat, targets, scale, self.config.loss_chunk_tokens))
        return scores

    def _score_tiles(self, scores: list[ChunkedLoss]) -> None:
        """The first pass over the head's tiles."""
        for tile, (low, _) in enumerate(self.window.tiles):
            slot, weight = self._head_tile(tile)
            with self._computing("forward", "head"):
                for score in scores:
                    score.forward(weight, low)
            slot.used = self.device.record("compute")

    def _head_backward(
        self, scores: list[ChunkedLoss], rows: list[int], weigh: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The summed loss, and the gradients of the normed hidden states; those of the head
        leave."""
        window = self.window
        single_tile = len(self.window.tiles) == 1 and weigh is None
        fused: list[Any] = (
            [LigerLoss(score.hidden, score.labels, score.scale) for score in scores]
            if self.liger
            else scores
        )
        total = torch.zeros((), device=self.where)
        if not single_tile:
            self._score_tiles(scores)
            window.fetch_head(0)
        if weigh is not None:
            nll = [score.row_nll(count) for score, count in zip(scores, rows, strict=True)]
            for score, weights in zip(scores, weigh(torch.cat(nll)).split(rows), strict=True):
                score.weigh(weights)
        for tile, (low, _) in enumerate(window.tiles):
            slot, weight = self._head_tile(tile)
            leaving, gradient = window.head_gradient_tile(tile)
            self.sums.begin(len(scores))
            with self._computing("backward", "head"):
                losses = []
                for score in fused if single_tile else scores:
                    if single_tile:
                        losses.append(score.forward_backward(weight, gradient))
                    else:
                        score.backward(weight, low, gradient)
                    self.sums.add(gradient.view(-1))
                self.sums.finish(gradient.view(-1))
                total += torch.stack(losses).sum() if single_tile else 0.0
            slot.used = self.device.record("compute")
            window.send_head(tile, leaving)
        if not single_tile:
            total += torch.stack([score.tokens().sum() for score in scores]).sum()
        return total, [score.grad_hidden for score in (fused if single_tile else scores)]

    def _head_tile(self, tile: int) -> tuple[Slot, Tensor]:
        if tile + 1 < len(self.window.tiles):
            self.window.fetch_head(tile + 1)
        return self.window.head_tile(tile)

    def _positions(self, length: int) -> tuple[Tensor, Tensor]:
        """The family's, kept: making them waits for the accelerator."""
        if length not in self.kept_positions:
            if len(self.kept_positions) >= LENGTHS:
                del self.kept_positions[next(iter(self.kept_positions))]
            self.kept_positions[length] = self.family.positions(length, self.where, self.dtype)
        return self.kept_positions[length]

    def _mask(self, ids: np.ndarray) -> tuple[Tensor, ...]:
        if not self.family.dims.classes:
            return ()
        mask = self.family.padding_mask(self._upload(ids), self.dtype)
        if mask is None:
            return ()
        return (mask,)

    def _upload(self, values: np.ndarray) -> Tensor:
        """Copy int64 values to the accelerator without waiting for its work."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        if self.where.type == "cpu":
            return source
        return source.pin_memory().to(self.where, non_blocking=True)

    def _gate(self) -> None:
        """Begin a layer, at most `AHEAD` before the accelerator."""
        if len(self.queue) >= AHEAD:
            self.queue.popleft().wait()

    @contextmanager
    def _computing(self, lane: str, name: str) -> Iterator[None]:
        """A span of computation on the accelerator, which begins once the work's inputs are
        there."""
        started = self.device.record("compute")
        yield
        self.timeline.span(lane, name, started, self.device.record("compute"))

    def _end(self) -> Event:
        event = self.device.record("compute")
        self.queue.append(event)
        return event


def _gradient(x: Tensor) -> Tensor:
    """Return the gradient of `x`, zeros if the backward pass did not reach it."""
    if x.grad is None:
        return torch.zeros_like(x)
    return x.grad
