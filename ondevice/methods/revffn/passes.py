"""Forward and backward of a batch: all parts of it through each block before the next block is touched.

`on_unit` gets the gradients of the output head, of each block from the last to the first, and of the embedding, each as
soon as it is whole, and may change those parameters and free the gradients: no later part of the walk reads either.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.methods.revffn.scale import StreamOverflow
from ondevice.nn.cross_entropy import shift, token_nll

if TYPE_CHECKING:
    from ondevice.methods.revffn.walk import Reversible

Gradients = dict[str, Tensor]
OnUnit = Callable[[Gradients], None]
Walk = Generator[tuple[int, Gradients], None, Tensor]


class Passes:
    """The whole model around a reversible network.

    Args:
        network: the blocks.
        stored: keep all activations instead of rebuilding them.
        micro_batch_size: rows that are one part; None is all.
        loss_tiles: of the cross-entropy.
    """

    def __init__(self, network: Reversible, stored: bool, micro_batch_size: int | None, loss_tiles: int) -> None:
        self.network, self.family, self.stored = network, network.family, stored
        self.micro_batch_size, self.loss_tiles = micro_batch_size, loss_tiles
        self.blocks = [network.block_parameters(i) for i in range(network.blocks)]
        inside = {name for block in self.blocks for name in block}
        named = network.family.model.named_parameters()
        self.outer = {name: value for name, value in named if name not in inside}
        table = network.family.embedding.weight
        self.embedding = {name for name, value in self.outer.items() if value is table or ".wpe." in name}

    def run(self, ids_BT: Tensor, labels_BT: Tensor, on_unit: OnUnit) -> Tensor:
        """Forward and backward of int64 [B, T]; gives the mean loss a labelled token, float32 [].

        A forward pass that overflows makes the streams' scale coarser, and all parts begin again.
        """
        size = self.micro_batch_size or ids_BT.shape[0]
        ids, labels = ids_BT.split(size), labels_BT.split(size)
        tokens = (labels_BT[:, 1:] >= 0).sum().clamp(min=1)
        way = self._stored if self.stored else self._reversible
        return self._rescaled(lambda: way(ids, labels, tokens, on_unit))

    def _rescaled(self, forward_first: Callable[[], Tensor]) -> Tensor:
        """What the function gives once no stream overflows; until then it has told nobody of anything."""
        while True:
            try:
                return forward_first()
            except StreamOverflow as error:
                self.network.coarser(error)

    def _final_hidden(self, ids_BT: Tensor) -> Tensor:
        """The final norm's output, [B, T, hidden]; the scale of training stays what it is."""
        before = self.network.fraction_bits
        try:
            return self.family.final_norm(self._rescaled(lambda: self.network.hidden(self.network.forward(ids_BT))))
        finally:
            if before is not None:
                self.network.fraction_bits = before

    def _reversible(
        self, ids: tuple[Tensor, ...], labels: tuple[Tensor, ...], tokens: Tensor, on_unit: OnUnit
    ) -> Tensor:
        ends = [self.network.forward(part) for part in ids]
        outer = {name: value for name, value in self.outer.items() if value.requires_grad}
        head: Gradients = {}
        losses: list[Tensor] = []
        walks: list[Walk] = []
        for part in labels:
            end = ends.pop(0)
            hidden = self.network.hidden(end).requires_grad_()
            with torch.enable_grad():
                loss = self._loss(hidden, part, tokens)
            grad, *found = torch.autograd.grad(loss, [hidden, *outer.values()], allow_unused=True)
            add(head, dict(zip(outer, found, strict=True)), len(ids) > 1)
            losses.append(loss.detach())
            walks.append(self.network.walk(end, grad))
            del end, hidden, loss, grad, found
        embedding = {name: head.pop(name) for name in self.embedding if name in head}  # tied: complete at the end only
        self._tell(on_unit, head)
        for _ in self.blocks:
            total: Gradients = {}
            for walk in walks:
                _, block = next(walk)
                add(total, block, len(ids) > 1)
                block.clear()
            self._tell(on_unit, total)
        names = [name for name in self.embedding if name in outer]
        for part, walk in zip(ids, walks, strict=True):
            inputs = _result(walk)
            if names:
                with torch.enable_grad():
                    embedded = self.family.embed(part)
                grads = torch.autograd.grad(embedded, [outer[name] for name in names], inputs.to(embedded.dtype))
                add(embedding, dict(zip(names, grads, strict=True)), len(ids) > 1)
        self._tell(on_unit, embedding)
        return torch.stack(losses).sum()

    def _stored(self, ids: tuple[Tensor, ...], labels: tuple[Tensor, ...], tokens: Tensor, on_unit: OnUnit) -> Tensor:
        named = {**self.outer, **{name: p for block in self.blocks for name, p in block.items()}}
        named = {name: value for name, value in named.items() if value.requires_grad}
        losses, total = [], dict[str, Tensor]()
        for part, target in zip(ids, labels, strict=True):
            with torch.enable_grad():
                loss = self._loss(self.network.stored_hidden(part), target, tokens)
            found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
            add(total, dict(zip(named, found, strict=True)), len(ids) > 1)
            losses.append(loss.detach())
        units = [self.outer.keys() - self.embedding, *reversed(self.blocks), self.embedding]
        for unit in units:
            self._tell(on_unit, {name: total.pop(name) for name in named if name in unit})
        return torch.stack(losses).sum()

    @staticmethod
    def _tell(on_unit: OnUnit, gradients: Gradients) -> None:
        if gradients:
            on_unit(gradients)

    def _loss(self, hidden: Tensor, labels: Tensor, tokens: Tensor) -> Tensor:
        """The part's share of the mean loss."""
        states, targets = shift(self.family.final_norm(hidden), labels)
        return token_nll(states, self.family.head_weight, targets, self.loss_tiles).sum() / tokens

    @torch.inference_mode()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Negative log likelihood of each row's labelled tokens and their count, [rows] each."""
        states, targets = shift(self._final_hidden(ids_BT), labels_BT)
        nll = token_nll(states, self.family.head_weight, targets, self.loss_tiles)
        return nll.view(ids_BT.shape[0], -1).sum(1), (labels_BT[:, 1:] >= 0).sum(1)

    @torch.inference_mode()
    def next_token(self, ids_1T: Tensor) -> int:
        """The most likely token behind int64 [1, T]."""
        return int((self._final_hidden(ids_1T)[:, -1:] @ self.family.head_weight.T).argmax())


def add(total: Gradients, found: Mapping[str, Tensor | None], several: bool) -> None:
    """Add gradients into `total`: in float32 where there are several to add, else as they are."""
    for name, gradient in found.items():
        if gradient is None:
            continue
        if name in total:
            total[name] = total[name].float().add_(gradient)
        else:
            total[name] = gradient.float() if several else gradient


def _result(walk: Walk) -> Tensor:
    """What a walk that has been through all blocks gives: the gradient of the embedding's output."""
    try:
        next(walk)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the walk has more blocks than the model")
