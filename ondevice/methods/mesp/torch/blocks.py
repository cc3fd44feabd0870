"""A block's forward pass, which keeps nothing, and its backward pass, which computes it again stage by stage.

The backward pass goes through the MLP first and attention after it; each tensor goes at its last use. Of the MLP's
wide tensors only a chunk of tokens exists at a time, so that attention's own and the residual stream bound long rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ondevice.methods.mesp.torch.stages import Block, Learn, Position, Stages


class Sums:
    """Gradients of the MLP's pairs over all chunks; with one chunk nothing is summed."""

    def __init__(self, learn: Learn, chunks: int) -> None:
        self.learn, self.several = learn, chunks > 1
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, target: str, ga: Tensor, gb: Tensor) -> None:
        if not self.several:
            self.learn(target, ga, gb)
        elif target in self.sums:
            self.sums[target][0].add_(ga)
            self.sums[target][1].add_(gb)
        else:
            self.sums[target] = (ga, gb)

    def give(self) -> None:
        """All chunks are through."""
        while self.sums:
            target, (ga, gb) = self.sums.popitem()
            self.learn(target, ga, gb)


class Blocks:
    """Forward and backward of one block over [N, D], N = rows * tokens.

    Args:
        chunk_tokens: tokens of the MLP at once.
    """

    def __init__(self, stages: Stages, chunk_tokens: int) -> None:
        self.stages, self.chunk_tokens = stages, chunk_tokens

    def forward(self, block: Block, x: Tensor, position: Position, rows: int) -> Tensor:
        """The block's output, in new memory."""
        s = self.stages
        m = self._attention(block, x, position, rows)
        for part in self._chunks(m.shape[0]):
            n = s.mlp_norm(block, m[part])
            gate, up = s.gate_up(block, n)
            del n
            act = s.act(gate, up)
            del gate, up
            s.down(block, m[part], act)
            del act
        return m

    def backward(
        self, block: Block, x: Tensor, g: Tensor, position: Position, rows: int, learn: Learn, last: bool = False
    ) -> Tensor:
        """The gradient of `x` from that of the block's output, in g's memory.

        Args:
            last: nothing below is trained; what is given then is no gradient.
        """
        s = self.stages
        n = s.norm(block, x)
        q, k, v = s.project(block, n, rows, keep=True)
        del n
        s.rope(q, k, position)
        o, kept = s.attend(q, k, v)
        m = s.out(block, x, o, keep=True)
        self._mlp_backward(block, m, g, learn)
        del m
        go = s.out_backward(block, o, g, learn)
        del o
        gq, gk, gv = s.attend_backward(go, q, k, v, kept)
        del go, q, k, v, kept
        s.rope_backward(gq, gk, position)
        n = s.norm(block, x)
        gn = s.project_backward(block, n, (gq, gk, gv), learn, last)
        del n, gq, gk, gv
        return g if gn is None else s.norm_backward(block, x, gn, g)

    def _attention(self, block: Block, x: Tensor, position: Position, rows: int) -> Tensor:
        s = self.stages
        q, k, v = s.project(block, s.norm(block, x), rows)
        s.rope(q, k, position)
        o, _ = s.attend(q, k, v)
        del q, k, v
        return s.out(block, x, o)

    def _mlp_backward(self, block: Block, m: Tensor, g: Tensor, learn: Learn) -> None:
        """g becomes the gradient of the block's middle `m`."""
        s, parts = self.stages, list(self._chunks(m.shape[0]))
        sums = Sums(learn, len(parts))
        for part in parts:
            n = s.mlp_norm(block, m[part])
            gate, up = s.gate_up(block, n, keep=True)
            gact = s.down_backward(block, gate, up, g[part], sums)
            ggate, gup = s.act_backward(gate, up, gact)
            del gate, up, gact
            gn = s.gate_up_backward(block, n, ggate, gup, sums)
            del ggate, gup, n
            s.mlp_norm_backward(block, m[part], gn, g[part])
        sums.give()

    def _chunks(self, tokens: int) -> Iterator[slice]:
        for low in range(0, tokens, self.chunk_tokens):
            yield slice(low, min(low + self.chunk_tokens, tokens))
