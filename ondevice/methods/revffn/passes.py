"""Forward and backward of a batch: all micro-batches through each block before the next block is
touched.

`on_unit` gets the gradients of the output head, of each block from the last to the first, and of
the embedding, each as soon as it is whole, and may change those parameters and free the gradients:
nothing computed later reads either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.methods.revffn.inversion import report
from ondevice.methods.revffn.streams import StreamOverflow
from ondevice.nn.cross_entropy import WeighedRows, shift, token_nll

if TYPE_CHECKING:
    from ondevice.methods.revffn.reversible import (
        BlockGradients,
        Gradients,
        Reversible,
        Saved,
        Tree,
    )

OnUnit = Callable[["Gradients"], None]
Reduce = Callable[[Tensor], Tensor]
"""Losses of a micro-batch's tokens, [rows, tokens], to its share of the loss."""


class Passes:
    """The whole model around a reversible network.

    Args:
        network: the blocks.
        kept: blocks, the last ones, that keep their graphs instead of being computed again.
        micro_batch_size: rows that are computed at once; None is all.
        loss_tiles: of the cross-entropy.
    """

    def __init__(
        self, network: Reversible, kept: int, micro_batch_size: int | None, loss_tiles: int
    ) -> None:
        self.network = network
        self.family = network.family
        self.kept = kept
        self.micro_batch_size = micro_batch_size
        self.loss_tiles = loss_tiles
        self.unreported = any(step.crossed for step in network.steps)
        """True until a first forward pass has reported how the iterations converge."""
        self.blocks = [network.block_parameters(i) for i in range(network.blocks)]
        inside = {name for block in self.blocks for name in block}
        named = network.family.model.named_parameters()
        self.outer = {name: value for name, value in named if name not in inside}
        table = network.family.embedding.weight
        self.embedding = {
            name for name, value in self.outer.items() if value is table or ".wpe." in name
        }

    def run(
        self,
        ids_BT: Tensor,
        labels_BT: Tensor,
        on_unit: OnUnit,
        weighed: WeighedRows | None = None,
    ) -> Tensor:
        """Run forward and backward over int64 [B, T]; gives the mean loss a labelled token, float32
        [], or the sum of the weighed rows' losses. Rows in several parts are computed once more
        before.

        A forward pass that overflows makes the streams' scale coarser, and all micro-batches begin
        again.
        """
        size = self.micro_batch_size or ids_BT.shape[0]
        ids = ids_BT.split(size)
        labels = labels_BT.split(size)
        if weighed is None:
            tokens = (labels_BT[:, 1:] >= 0).sum().clamp(min=1)
            reduces: list[Reduce] = [lambda nll_BT: nll_BT.sum() / tokens] * len(ids)
        elif len(ids) > 1:
            found = [self.row_nll(*part)[0] for part in zip(ids, labels, strict=True)]
            weights = weighed(torch.cat(found).double()).split(size)
            reduces = [weighted(lambda nll_B, part=part: part) for part in weights]
        else:
            reduces = [weighted(weighed)]
        return self._rescaled(lambda: self._computed(ids, labels, reduces, on_unit))

    def _rescaled(self, compute: Callable[[], Tensor]) -> Tensor:
        """The value of `compute`, called again with coarser streams until none overflows; its
        forward passes come before all that cannot be repeated."""
        while True:
            try:
                return compute()
            except StreamOverflow as error:
                self.network.coarsen(error)

    def _forward(self, ids_BT: Tensor, tree: Tree | None = None, kept: int = 0) -> Saved:
        if self.unreported:
            report(self.network, ids_BT)
            self.unreported = False
        return self.network.forward(ids_BT, tree=tree, kept=kept)

    def final_hidden(self, ids_BT: Tensor, tree: Tree | None = None) -> Tensor:
        """Return the final norm's output, [B, T, hidden]; the scale of training does not change.

        Args:
            tree: of prompts with their continuations, where each token is.
        """
        before = self.network.fraction_bits
        try:
            return self.family.final_norm(
                self._rescaled(lambda: self.network.hidden(self._forward(ids_BT, tree)))
            )
        finally:
            if before is not None:
                self.network.fraction_bits = before

    def _computed(
        self,
        ids: tuple[Tensor, ...],
        labels: tuple[Tensor, ...],
        reduces: list[Reduce],
        on_unit: OnUnit,
    ) -> Tensor:
        forwards = [self._forward(rows, kept=self.kept) for rows in ids]
        outer = {name: value for name, value in self.outer.items() if value.requires_grad}
        head: Gradients = {}
        losses: list[Tensor] = []
        backwards: list[BlockGradients] = []
        for targets, reduce in zip(labels, reduces, strict=True):
            saved = forwards.pop(0)
            hidden = self.network.hidden(saved).requires_grad_()
            saved.leave_end()
            with torch.enable_grad():
                loss = self._loss(hidden, targets, reduce)
            grad, *of_outer = torch.autograd.grad(
                loss, [hidden, *outer.values()], allow_unused=True
            )
            accumulate(head, dict(zip(outer, of_outer, strict=True)), len(ids) > 1)
            losses.append(loss.detach())
            backwards.append(self.network.backward_by_block(saved, grad))
            del (
                saved,
                hidden,
                loss,
                grad,
                of_outer,
            )  # else they would live on next to the backward pass
        embedding = {
            name: head.pop(name) for name in self.embedding if name in head
        }  # tied: complete at the end only
        self._hand_over(on_unit, head)
        for _ in self.blocks:
            total: Gradients = {}
            for backward in backwards:
                _, of_block = next(backward)
                accumulate(total, of_block, len(ids) > 1)
                of_block.clear()
            self._hand_over(on_unit, total)
        names = [name for name in self.embedding if name in outer]
        for part, backward in zip(ids, backwards, strict=True):
            inputs = _returned(backward)
            if names:
                with torch.enable_grad():
                    embedded = self.family.embed(part)
                grads = torch.autograd.grad(
                    embedded, [outer[name] for name in names], inputs.to(embedded.dtype)
                )
                accumulate(embedding, dict(zip(names, grads, strict=True)), len(ids) > 1)
        self._hand_over(on_unit, embedding)
        return torch.stack(losses).sum()

    @staticmethod
    def _hand_over(on_unit: OnUnit, gradients: Gradients) -> None:
        if gradients:
            on_unit(gradients)

    def _loss(self, hidden: Tensor, labels: Tensor, reduce: Reduce) -> Tensor:
        """A micro-batch's share of the loss."""
        states, targets = shift(self.family.final_norm(hidden), labels)
        nll = token_nll(states, self.family.head_weight, targets, self.loss_tiles)
        return reduce(nll.view(len(labels), -1))

    @torch.inference_mode()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return negative log likelihood of each row's labelled tokens and their count, [rows]
        each."""
        states, targets = shift(self.final_hidden(ids_BT), labels_BT)
        nll = token_nll(states, self.family.head_weight, targets, self.loss_tiles)
        return nll.view(ids_BT.shape[0], -1).sum(1), (labels_BT[:, 1:] >= 0).sum(1)

    @torch.inference_mode()
    def next_token(self, ids_1T: Tensor) -> int:
        """Return the most likely token behind int64 [1, T]."""
        return int((self.final_hidden(ids_1T)[:, -1:] @ self.family.head_weight.T).argmax())


def weighted(weights: Callable[[Tensor], Tensor]) -> Reduce:
    """Return the sum of rows' losses, each times what `weights` says of them, a constant."""

    def reduce(nll_BT: Tensor) -> Tensor:
        nll_B = nll_BT.sum(1)
        return (nll_B * weights(nll_B.detach().double()).to(nll_B)).sum()

    return reduce


def accumulate(total: Gradients, gradients: Mapping[str, Tensor | None], several: bool) -> None:
    """Add gradients into `total`: in float32 if there are several to add, else as they are."""
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        if name in total:
            total[name] = total[name].float().add_(gradient)
        else:
            total[name] = gradient
            if several:
                total[name] = gradient.float()


def _returned(backward: BlockGradients) -> Tensor:
    """The value of a backward pass that has been through all blocks: the gradient of the
    embedding's output."""
    try:
        next(backward)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the backward pass has more blocks than the model")
