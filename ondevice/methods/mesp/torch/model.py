"""A batch through all blocks: forward keeps block inputs, the head gives the loss and its gradient,
backward goes down block by block.

A block's forward pass keeps nothing; its backward pass computes it again stage by stage, the MLP
first and attention after it, and each tensor goes at its last use. Of the MLP's wide tensors only a
chunk of tokens exists at a time, so that attention's own and the residual stream bound long rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.core.dims import EXPERTS
from ondevice.core.session import IGNORE
from ondevice.methods.mesp.memory import MLP_CHUNK_TOKENS, MLP_CHUNK_TOKENS_GPU
from ondevice.methods.mesp.torch.kernels import choose
from ondevice.methods.mesp.torch.loss import AnswerHead, Loss
from ondevice.methods.mesp.torch.rows import RowsApart
from ondevice.methods.mesp.torch.stages import Block, Linear, Stages
from ondevice.nn.cross_entropy import label_columns
from ondevice.nn.experts import pair_of
from ondevice.nn.row_mask import of_rows
from ondevice.offload.device import Timeline
from ondevice.offload.engine import open_device
from ondevice.offload.transfers import Activations

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.kernels import Position
    from ondevice.methods.mesp.torch.optimizer import Optimizer
    from ondevice.methods.mesp.torch.stages import OnGradient
    from ondevice.methods.mesp.torch.weights import Frozen, Positions, Weights


class GradientSums:
    """Gradients of the MLP's A and B over all chunks of tokens; with one chunk nothing is
    summed."""

    def __init__(self, on_gradient: OnGradient, chunks: int) -> None:
        self.on_gradient = on_gradient
        self.several = chunks > 1
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, target: str, ga: Tensor, gb: Tensor) -> None:
        if not self.several:
            self.on_gradient(target, ga, gb)
        elif target in self.sums:
            self.sums[target][0].add_(ga)
            self.sums[target][1].add_(gb)
        else:
            self.sums[target] = (ga, gb)

    def finish(self) -> None:
        """Pass the sums on; all chunks are through."""
        while self.sums:
            target, (ga, gb) = self.sums.popitem()
            self.on_gradient(target, ga, gb)


class Blocks:
    """Forward and backward of one block over [N, D], N = rows * tokens.

    Args:
        chunk_tokens: tokens of the MLP at once; None is all, as in a graph, in which a slice has
            memory of its own.
    """

    def __init__(self, stages: Stages, chunk_tokens: int | None) -> None:
        self.stages = stages
        self.chunk_tokens = chunk_tokens

    def forward(self, block: Block, x: Tensor, position: Position, rows: int) -> Tensor:
        """Return the block's output, in new memory."""
        s = self.stages
        q, k, v = s.project(block, s.norm(block, x), rows)
        q, k = s.rope(block, q, k, position)
        o, _ = s.attend(block, q, k, v)
        del q, k, v
        m = s.out(block, x, o)
        del o
        chunks = self._chunks(m)
        if len(chunks) == 1:
            return self._mlp(block, m)
        for chunk in chunks:
            self._mlp(block, chunk)  # in m's memory
        return m

    def backward(
        self,
        block: Block,
        x: Tensor,
        g: Tensor,
        position: Position,
        rows: int,
        on_gradient: OnGradient,
        last: bool = False,
    ) -> Tensor:
        """Return the gradient of `x` from that of the block's output, in g's memory.

        The block's output is not computed again: no gradient needs it. The MLP's backward pass is
        first, while q, k, v and o wait; so when attention's begins, the MLP's wide tensors are
        gone.

        Args:
            last: nothing below is trained; the result is then not a gradient.
        """
        s = self.stages
        n = s.norm(block, x)
        q, k, v = s.project(block, n, rows)
        del n
        q, k = s.rope(block, q, k, position)
        o, kept = s.attend(block, q, k, v)
        m = s.out(block, x, o)
        g = self._mlp_backward(block, m, g, on_gradient)
        del m
        go = s.out_backward(block, o, g, on_gradient)
        del o
        gq, gk, gv = s.attend_backward(block, go, q, k, v, kept)
        del go, q, k, v, kept
        gq, gk = s.rope_backward(block, gq, gk, position)
        n = s.norm(
            block, x
        )  # a second time: it was let go while the MLP and attention had the memory
        gn = s.project_backward(block, n, (gq, gk, gv), on_gradient, last)
        del n, gq, gk, gv
        return g if gn is None else s.norm_backward(block, x, gn, g)

    def _mlp(self, block: Block, m: Tensor) -> Tensor:
        """m + the MLP of it, in m's memory."""
        s = self.stages
        if block.mlp is not None:
            return s.other_mlp(block, m)
        n = s.mlp_norm(block, m)
        gate, up = s.gate_up(block, n)
        del n
        act = s.act(gate, up)
        del gate, up
        return s.down(block, m, act)

    def _mlp_backward(self, block: Block, m: Tensor, g: Tensor, on_gradient: OnGradient) -> Tensor:
        """The gradient of the block's middle `m`, in g's memory."""
        chunks = self._chunks(m)
        gradients = self._chunks(g)
        sums = GradientSums(on_gradient, len(chunks))
        if len(chunks) == 1:
            return self._mlp_chunk_backward(block, m, g, sums)
        for chunk, gradient in zip(chunks, gradients):
            self._mlp_chunk_backward(block, chunk, gradient, sums)
        sums.finish()
        return g

    def _mlp_chunk_backward(
        self, block: Block, m: Tensor, g: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        s = self.stages
        if block.mlp is not None:
            return s.other_mlp_backward(block, m, g, on_gradient)
        n = s.mlp_norm(block, m)
        gate, up = s.gate_up(block, n)
        gact = s.down_backward(block, gate, up, g, on_gradient)
        ggate, gup = s.act_backward(gate, up, gact)
        del gate, up, gact
        gn = s.gate_up_backward(block, n, ggate, gup, on_gradient)
        del ggate, gup, n
        return s.mlp_norm_backward(block, m, gn, g)

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of [N, D]."""
        size = self.chunk_tokens or x.shape[0]
        return (x,) if x.shape[0] <= size else x.split(size)


class Model:
    """A frozen model with its trained parameters; nothing here is kept from one call to the
    next."""

    def __init__(self, weights: Weights, optimizer: Optimizer, config: MespConfig) -> None:
        self.weights = weights
        self.optimizer = optimizer
        self.config = config
        self.dims = weights.dims
        kernels = choose(config.kernels, weights.device.type)
        stages = Stages(weights.dims, kernels)
        usual = MLP_CHUNK_TOKENS if weights.device.type == "cpu" else MLP_CHUNK_TOKENS_GPU
        self.blocks = Blocks(stages, config.mlp_chunk_tokens or usual)
        loss = (
            weights.norm,
            weights.dims.norm_eps,
            kernels,
            config.loss_tiles,
            config.loss_chunk_tokens,
        )
        self.loss = Loss(weights, *loss, scale=weights.dims.traits.logit_scale)
        self.answer_loss = None
        if config.answers:
            head = AnswerHead(weights, config.answers)
            self.answer_loss = Loss(head, *loss, scale=weights.dims.traits.logit_scale)
        device = open_device(str(weights.device))
        self.timeline = Timeline(device)
        self.inputs = Activations(device, self.timeline, config.activations, None)

    @torch.no_grad()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]."""
        x = self.weights.embed(ids_BT)
        positions = self.positions(ids_BT, None)
        for i in range(self.dims.layers):
            with self.weights.block(i, self.above(i)) as frozen:
                x = self.blocks.forward(self.block(i, frozen), x, positions(i), ids_BT.shape[0])
        loss, labels = self.loss_of(labels_BT)
        return loss.row_nll(x, labels)

    @torch.no_grad()
    def forward_backward(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: float, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss, float32 []; `scale` times its gradients go to the optimizer as
        they arise.

        Args:
            ids_BT: int64 [rows, tokens], all of them computed at once.
            position_ids_BT: int64 [rows, tokens], if these are sequences of several rows: see
                `Packing.packed_step`.
        """
        x = self.weights.embed(ids_BT)
        positions = self.positions(ids_BT, position_ids_BT)
        layers = self.dims.layers
        rows = ids_BT.shape[0]
        self.inputs.begin(layers, 1, x)
        for i in range(layers):
            self.inputs.save(i, 0, x)
            with self.weights.block(i, self.above(i)) as frozen:
                x = self.blocks.forward(self.block(i, frozen), x, positions(i), rows)
        loss, labels = self.loss_of(labels_BT)
        total, g = loss.backward(x, labels, scale)
        del x
        for i in reversed(range(layers)):
            x = self.inputs.load(i, 0, tuple(g.shape))
            self.inputs.prefetch(i - 1, 0)
            with self.weights.block(i, i - 1 if i else None) as frozen:
                block = self.block(i, frozen)
                g = self.blocks.backward(
                    block, x, g, positions(i), rows, self.on_gradient(i), last=i == 0
                )
            self.optimizer.flush()
            self.inputs.done(i, 0)
            del x
        self.timeline.drain()
        return total

    def positions(self, ids_BT: Tensor, position_ids_BT: Tensor | None) -> Positions:
        """Return a function of a block's number to its cos and sin, and keep rows apart in
        attention, or not."""
        of_block = self.weights.positions(ids_BT.shape[1])
        self.blocks.stages.apart = None
        if position_ids_BT is None:
            return of_block
        self.blocks.stages.apart = RowsApart.of(position_ids_BT)
        made: dict[int, Position] = {}

        def packed(i: int) -> Position:
            cos, sin = of_block(i)
            if id(cos) not in made:
                made[id(cos)] = of_rows(cos, position_ids_BT), of_rows(sin, position_ids_BT)
            return made[id(cos)]

        return packed

    def loss_of(self, labels_BT: Tensor) -> tuple[Loss, Tensor]:
        """Return the loss over the answers, with their indices as labels, if all labels are
        answers; else that over the vocabulary."""
        if self.answer_loss is not None:
            answers = torch.tensor(self.config.answers, device=labels_BT.device)
            places = label_columns(labels_BT.reshape(-1), answers).view(labels_BT.shape)
            if bool(((places != IGNORE) == (labels_BT != IGNORE)).all()):
                return self.answer_loss, places
        return self.loss, labels_BT

    def above(self, i: int) -> int | None:
        """Return the block that is needed after block `i` in a forward pass."""
        return i + 1 if i + 1 < self.dims.layers else None

    def on_gradient(self, layer: int) -> OnGradient:
        """Return a callback that gives gradients of one layer's A and B to the optimizer."""
        parameters = self.optimizer.parameters
        apply = self.optimizer.apply
        return lambda target, ga, gb: apply(parameters[(layer, target)], ga, gb.t())

    def block(self, i: int, frozen: Frozen) -> Block:
        """Return a block's frozen tensors with its A and B."""
        linears = {}
        for target, (matrix, bias) in frozen.linears.items():
            lora = self.optimizer.parameters.get((i, target))
            a = None
            b = None
            if lora is not None:
                a = self.optimizer.tensors[lora.a_name]
                b = self.optimizer.tensors[lora.b_name].t()
            linears[target] = Linear(matrix, bias, a, b, self.config.scale)
        pairs = {}
        for target in EXPERTS if frozen.mlp is not None else ():
            if (lora := self.optimizer.parameters.get((i, target))) is not None:
                a = self.optimizer.tensors[lora.a_name]
                b = self.optimizer.tensors[lora.b_name]
                pairs[target] = pair_of(a, b, lora.experts, self.config.scale)
        return Block(frozen.norms, linears, i, frozen.mlp, pairs)
