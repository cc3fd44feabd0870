"""The passes of a decoder whose blocks are not known: transformers runs its own forward pass, and
each block in it is a unit that arrives, computes and leaves.

What stands before, between and after the blocks (`blocks`) is differentiated as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from ondevice.core.errors import ConfigError
from ondevice.core.session import IGNORE
from ondevice.offload.blocks import BlockPasses, Graph, there
from ondevice.offload.transfers import Slot

if TYPE_CHECKING:
    from ondevice.models.families.any_decoder import AnyDecoder
    from ondevice.nn.cross_entropy import Scale


class WholePasses(BlockPasses):
    """`Passes` over a model that runs whole; see the module."""

    def __init__(self, family: AnyDecoder, *ahead: Any) -> None:
        super().__init__(family, *ahead)
        if not self.plain and len(self.window.tiles) > 1:
            raise self.family.dims.unknown("loss_tiles above 1")
        self.left = self.rows = torch.zeros(0)
        self.head_gradient: Slot | None = None
        for module in family.model.modules():  # tables of positions, masks
            for name, value in module._buffers.items():
                module._buffers[name] = None if value is None else value.to(self.where)

    def forward(
        self, ids: np.ndarray, micro_batches: list[slice], keep: bool, every: np.ndarray
    ) -> list[Tensor]:
        """Return what the head is computed from: [rows, T, hidden] of each micro-batch, or logits
        if the head is more than a matrix; `keep` prepares a backward pass."""
        with self.running(ids, micro_batches, keep, every), torch.set_grad_enabled(keep):
            self.left = self.family.hidden(self._upload(ids))
        return [self.left[rows].detach() for rows in micro_batches]

    @contextmanager
    def running(
        self, ids: np.ndarray, micro_batches: list[slice], keep: bool, every: np.ndarray
    ) -> Iterator[None]:
        """Let the model's own forward pass run here, once, on `ids`; see `forward`.

        Raises:
            ConfigError: rows cannot be told from tokens.
            ModelError: the model does not call its blocks one after the other.
        """
        if len(micro_batches) > 1 and ids.shape[0] == ids.shape[1]:
            raise ConfigError(
                "micro-batches of a model whose blocks are not known need to tell rows from tokens",
                expected="a batch of another number of rows than a row has tokens",
                received=f"{ids.shape[0]} rows of {ids.shape[1]} tokens",
                hint="one row more or less in train.batch_size, or no method.micro_batch_size",
            )
        window = self.window
        window.forget_layers(ids.size)
        self.micro_batches = micro_batches
        self.entering = self._ask(every)
        window.fetch_rest()
        for i in range(len(window.layers)):
            window.fetch_layer(i)
        self._enter(keep)
        graph = Graph()
        self.graph = ref(graph)
        with self._patched(keep):
            yield
        if self.called != self.layers:
            raise self._not_in_order(self.called)

    def _enter(self, keep: bool) -> None:
        """Bind the rest of the model: the embedding's rows, the rest and, if the loss is computed from
        logits, the head, with their gradients."""
        window = self.window
        width = self.units.embedding.pieces[0].shape[1]
        count = len(self.unique)
        self.rows = window.arrive(there(self.entering)).memory[: count * width].view(-1, width)
        gradient = None
        if keep:
            gradient = window.arrive(window.rest_gradient)
            gradient.memory.zero_()
            self.rows = self.rows.detach().clone().requires_grad_(True)
        window.bind(self.units.rest, window.arrive(window.rest), gradient)
        self.called = 0
        self.head_gradient = None
        if not self.plain:
            self._bind_head(keep)

    def _bind_head(self, keep: bool) -> None:
        """Let the head's parameter be the memory that it arrives in, after the last block."""
        parameter = self.units.head.pieces[0].parameter
        parameter.grad = None
        parameter.data = self.window.head_tile(0)[1]
        learns = keep and self.units.head.pieces[0].trained
        parameter.requires_grad_(learns)
        if keep:
            self.head_gradient, gradient = self.window.head_gradient_tile(0)
            parameter.grad = gradient if learns else None

    @contextmanager
    def _patched(self, keep: bool) -> Iterator[None]:
        """Let the model's blocks, embedding and head be those of this pass."""
        embedding: Any = self.family.embedding
        padding = getattr(embedding, "padding_idx", None)
        for i, block in enumerate(self.blocks):
            block.forward = partial(self._block, i, keep)
        own = type(embedding).forward
        embedding.padding_idx = None  # of the table; its row's gradient is cleared at the end
        embedding.forward = partial(self._embed, embedding, own)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward
            del embedding.forward
            embedding.padding_idx = padding

    def _embed(self, module: nn.Module, own: Callable[..., Tensor], ids: Tensor) -> Tensor:
        """Look up rows of those that were fetched."""
        table = self._upload(self.unique)
        at = torch.searchsorted(table, ids)
        module.forward = partial(own, module)
        try:
            return functional_call(module, {"weight": self.rows}, (at,))
        finally:
            module.forward = partial(self._embed, module, own)

    def _for_head(self, h: list[Tensor]) -> list[Tensor]:
        """Return hidden states in the head's precision; some models add up theirs in float32."""
        return [x.to(self.dtype) for x in h]

    def score(self, h: list[Tensor], labels: list[np.ndarray]) -> Tensor:
        """See `Passes.score`."""
        with torch.no_grad():
            if self.plain:
                scores = self._scores(self._for_head(h), labels, 1.0)
                self._score_tiles(scores)
                losses = [score.tokens() for score in scores]
            else:
                losses = [self._logits_nll(x, rows)[0] for x, rows in zip(h, labels, strict=True)]
            pairs = zip(losses, labels, strict=True)
            return torch.cat([nll.view(len(rows), -1).sum(1) for nll, rows in pairs])

    def head(
        self, h: list[Tensor], labels: list[np.ndarray], scale: Scale
    ) -> tuple[list[Tensor], Tensor]:
        """See `Passes.head`; of logits the gradients are their own."""
        counts = [len(rows) for rows in labels]
        weigh = scale if callable(scale) else None
        same = 1.0 if callable(scale) else scale
        if self.plain:
            scores = self._scores(self._for_head(h), labels, same)
            total, of_hidden = self._head_backward(scores, counts, weigh)
            gradients = []
            for x, gradient in zip(h, of_hidden, strict=True):
                padded = torch.zeros_like(x)  # the last position has no next token
                padded[:, :-1] = gradient.view(len(x), -1, x.shape[-1])
                gradients.append(padded)
            return gradients, total
        pairs = [self._logits_nll(x, rows) for x, rows in zip(h, labels, strict=True)]
        losses = [nll.double() for nll, _ in pairs]
        each = torch.cat([x.view(n, -1).sum(1) for x, n in zip(losses, counts, strict=True)])
        weights = weigh(each) if weigh else torch.full_like(each, same)
        parts = zip(pairs, weights.split(counts), strict=True)
        return [
            gradient * own[:, None, None].to(gradient) for (_, gradient), own in parts
        ], each.sum().float()

    def _logits_nll(self, logits: Tensor, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the loss of each position but the last, float32 [N], and the gradient of their
        sum, of the logits' shape."""
        targets = self._upload(labels[:, 1:]).reshape(-1)
        gradient = torch.zeros_like(logits)
        losses = []
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        of_flat = []
        for low in range(0, len(flat), self.config.loss_chunk_tokens):
            span = slice(low, low + self.config.loss_chunk_tokens)
            active = targets[span] != IGNORE
            at = targets[span].clamp(min=0)[:, None]
            wide = flat[span].float()
            normed = wide.log_softmax(-1)
            losses.append(-normed.gather(1, at)[:, 0] * active)
            probability = normed.exp_()
            probability.scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
            of_flat.append((probability * active[:, None]).to(logits.dtype))
        gradient[:, :-1] = torch.cat(of_flat).view(len(logits), -1, logits.shape[-1])
        return torch.cat(losses), gradient

    def backward(
        self, gradients: list[Tensor], ids: np.ndarray, micro_batches: list[slice]
    ) -> None:
        """Differentiate the model; every block's gradients leave as soon as they are there."""
        torch.autograd.backward(self.left, torch.cat(gradients))
        self.left = torch.zeros(0)
        self.send_others()

    def send_others(self) -> None:
        """Send the gradients of the rest of the model, at the end of a backward pass."""
        window = self.window
        if self.head_gradient is not None:
            window.head_tile(0)[0].used = self.device.record("compute")
            self.units.head.pieces[0].parameter.grad = None
            window.send_head(0, self.head_gradient)
        rows = self.rows.grad
        if rows is None or not self.units.embedding.pieces[0].trained:
            rows = torch.zeros_like(self.rows)
        padding = getattr(self.family.embedding, "padding_idx", None)
        if padding is not None:
            rows[torch.from_numpy(self.unique == padding).to(self.where)] = 0
        window.send_rows(torch.from_numpy(self.unique), rows)
        window.send_rest()
