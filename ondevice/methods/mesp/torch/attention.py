"""Attention in a block: queries, keys and values, their norms and rotation, and the gate of its
output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch
from torch import Tensor

from ondevice.methods.mesp.torch.block import Block, BlockLayers, OnGradient
from ondevice.methods.mesp.torch.kernels import Position, Scores, attend_branches
from ondevice.nn.rows_apart import BranchesApart

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.kept import Kept

QKV = ("q_proj", "k_proj", "v_proj")
Projected = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""q, k, v and the gate of attention's output, or their gradients; k and v are None if they are
another block's."""


class Attended(NamedTuple):
    """What attention's backward pass wants.

    Attributes:
        q, k, v: rotated.
        o: before its gate, [N, H h], if it has one.
        kept: of `kernels.attend`.
        projected: q and k before their norms, if `rope` norms them.
        gate: before its sigmoid.
        borrowed: k and v are another block's.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor | None
    kept: Any
    projected: tuple[Tensor, Tensor | None] | None
    gate: Tensor | None
    borrowed: bool


class Attention(BlockLayers):
    """The stages of attention."""

    def project(self, block: Block, n: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute n -> q [B, T, H, h], k and v [B, T, K, h], not yet rotated, nor normed if `rope`
        does that."""
        q, k, v, _ = self.project_gated(block, n, rows)
        assert k is not None and v is not None  # noqa: S101 - no program shares keys
        return q, k, v

    def project_gated(self, block: Block, n: Tensor, rows: int) -> Projected:
        """Return what `project` does, and the gate of attention's output [N, H h], if it has one;
        k and v are None if they are another block's."""
        q, k, v, gate = self._projections(block, n)
        if not self.rotates_normed(block):
            q = self.normed(block, "q", q)
            k = None if k is None else self.normed(block, "k", k)
        v = None if v is None else self.normed(block, "v", v)
        if v is k and v is not None:
            v = v.clone()  # keys that are values too are rotated in their memory
        heads = [None if x is None else self._heads(block, x, rows) for x in (q, k, v)]
        assert heads[0] is not None  # noqa: S101 - it is q
        return heads[0], heads[1], heads[2], gate

    def _projections(self, block: Block, n: Tensor) -> Projected:
        """Return q, k, v and the gate, [N, heads * h] each."""
        dims = self.dims
        if not self.traits.has_keys(block.layer):
            return self.linear(block, "q_proj", n), None, None, None
        if self.traits.fused:
            widths = (
                dims.heads * dims.head_dim,
                dims.kv_heads * dims.head_dim,
                dims.kv_heads * dims.head_dim,
            )
            q, k, v = self.linear(block, "qkv_proj", n).split(widths, -1)
            return q, k, v, None
        parts = QKV if self.traits.has_values(block.layer) else QKV[:2]
        inner = self.inner(block, parts, n)
        pairs = zip(parts, inner, strict=True)
        projected = [self.linear(block, part, n, h=h) for part, h in pairs]
        q, k, v = (*projected, projected[1])[:3]
        if not self.traits.output_gate:
            return q, k, v, None
        # Behind each head's query is its gate.
        q, gate = q.view(len(n), dims.heads, -1).chunk(2, -1)
        return q.reshape(len(n), -1), k, v, gate.reshape(len(n), -1)

    def rotates_normed(self, block: Block) -> bool:
        """Return True if one kernel norms each head and rotates it."""
        weight = block.norms.get("q")
        return (
            self.kernels.fused
            and weight is not None
            and weight.shape[-1] == self.dims.head_width(block.layer)
            and self.traits.rotated(block.layer)
            and self.traits.rotary_width in (0, self.dims.head_dim)
        )

    @overload
    def rope(
        self, block: Block, q: Tensor, k: Tensor, position: Position
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def rope(
        self, block: Block, q: Tensor, k: Tensor | None, position: Position
    ) -> tuple[Tensor, Tensor | None]: ...

    def rope(
        self, block: Block, q: Tensor, k: Tensor | None, position: Position
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate q and k, in their memory; in new memory with their norms, if it does these too."""
        if self.rotates_normed(block):
            eps = self.dims.norm_eps
            q = self.kernels.rotate_normed(q, block.norms["q"], eps, position)
            if k is not None:
                k = self.kernels.rotate_normed(k, block.norms["k"], eps, position)
            return q, k
        return self.rotated(block, q, k, position)

    def rotated(
        self, block: Block, q: Tensor, k: Tensor | None, position: Position
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate q and k, in their memory."""
        if not self.traits.rotated(block.layer):
            return q, k
        if k is None:
            return self.kernels.rope(q, q[:, :, :0], position)[0], None
        return self.kernels.rope(q, k, position)

    def scores(self, block: Block, length_tokens: int) -> Scores:
        """Return how a block's scores are made; a window that holds all queries does not count."""
        window = self.traits.window(block.layer)
        scale = self.traits.score_scale or self.dims.head_width(block.layer) ** -0.5
        return Scores(scale, window if window < length_tokens else 0)

    def attend(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        """Return [N, H h], and what the backward pass wants."""
        scores = self.scores(block, q.shape[1])
        if isinstance(self.apart, BranchesApart) and not scores.window:
            o = attend_branches(q, k, v, self.apart.mask_B1TT, scores)
            return o.reshape(-1, q.shape[2] * q.shape[3]), None
        if self.apart is not None:
            q, k, v = (self.apart.take_apart(x) for x in (q, k, v))
            scores = self.scores(block, q.shape[1])
        o, kept = self.kernels.attend(q, k, v, scores)
        if self.apart is not None:
            o = self.apart.together(o)
        return o.reshape(-1, q.shape[2] * q.shape[3]), kept

    def attend_backward(
        self, block: Block, g: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of the rotated q and k, and of v."""
        if self.apart is None:
            return self.kernels.attend_backward(
                g.view(q.shape), q, k, v, kept, self.scores(block, q.shape[1])
            )
        g, q, k, v = (self.apart.take_apart(x) for x in (g.view(q.shape), q, k, v))
        gq, gk, gv = self.kernels.attend_backward(g, q, k, v, kept, self.scores(block, q.shape[1]))
        return self.apart.together(gq), self.apart.together(gk), self.apart.together(gv)

    def rope_backward(
        self,
        block: Block,
        gq: Tensor,
        gk: Tensor | None,
        position: Position,
        projected: tuple[Tensor, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate the gradients back, in their memory: the transpose of a rotation is that by the
        negative angle.

        Args:
            projected: q and k as `project` gave them, if `rope` norms them.
        """
        if projected is None:
            return self.rotated(block, gq, gk, (position[0], -position[1]))
        back = self.kernels.rotate_normed_backward
        eps = self.dims.norm_eps
        gq = back(projected[0], block.norms["q"], eps, position, gq)
        if gk is not None and projected[1] is not None:
            gk = back(projected[1], block.norms["k"], eps, position, gk)
        return gq, gk

    def project_backward(
        self,
        block: Block,
        n: Tensor,
        g: Projected,
        on_gradient: OnGradient,
        last: bool = False,
    ) -> Tensor | None:
        """Return the gradient of n from those of q, k, v and the gate; None if `last` says that
        nothing below is trained."""
        gq, gk, gv = (None if one is None else one.reshape(len(n), -1) for one in g[:3])
        assert gq is not None  # noqa: S101 - every block has queries
        of_heads = "q" in block.norms and not self.rotates_normed(block)
        if of_heads or "v" in block.norms:
            # What was normed is computed again: it was let go with the rest.
            q, k, v, _ = self._projections(block, n)
            if of_heads:
                gq = self.normed_backward(block, "q", q, gq)
                if k is not None and gk is not None:
                    gk = self.normed_backward(block, "k", k, gk)
            if v is not None and gv is not None:
                gv = self.normed_backward(block, "v", v, gv)
            del q, k, v
        if gk is not None and gv is not None and not self.traits.has_values(block.layer):
            gk = gk + gv
            gv = None
        if self.traits.fused:
            parts = {"qkv_proj": torch.cat([one for one in (gq, gk, gv) if one is not None], -1)}
        else:
            if g[3] is not None:
                heads = (len(n), self.dims.heads, -1)
                gq = torch.cat((gq.view(heads), g[3].view(heads)), -1).view(len(n), -1)
            pairs = zip(QKV, (gq, gk, gv), strict=True)
            parts = {part: one for part, one in pairs if one is not None}
        del gq, gk, gv, g
        return self.inputs_backward(block, n, parts, on_gradient, last)

    def _heads(self, block: Block, x: Tensor, rows: int) -> Tensor:
        return x.view(rows, x.shape[0] // rows, -1, self.dims.head_width(block.layer))

    # What `Blocks` calls; see `stages.Mixer`.

    def mix_attended(
        self, block: Block, x: Tensor, position: Position, rows: int, kept: Kept
    ) -> tuple[Tensor, Attended]:
        qkv = kept.take("qkv")
        q, k, v, gate = qkv or self.project_gated(block, self.norm(block, x), rows)
        projected = None
        if self.rotates_normed(block):
            projected = (q, k)
        if projected or qkv is None:  # a rotation alone is in the memory that was kept
            q, k = self.rope(block, q, k, position)
        k, v = self._shared(block, k, v)
        o, of_attention = kept.take("attended") or self.attend(block, q, k, v)
        borrowed = not self.traits.has_keys(block.layer)
        if gate is None:
            return o, Attended(q, k, v, None, of_attention, projected, None, borrowed)
        waits = Attended(q, k, v, o, of_attention, projected, gate, borrowed)
        return o * torch.sigmoid(gate), waits

    @staticmethod
    def keep_attended(kept: Kept, o: Tensor, waits: Attended) -> None:
        if kept.projections:
            q, k = waits.projected or (waits.q, waits.k)
            v = waits.v
            if waits.borrowed:
                k = v = None
            kept.tensors["qkv"] = (q, k, v, waits.gate)
        if kept.attention:
            attended = o if waits.o is None else waits.o
            kept.tensors["attended"] = (attended, waits.kept)

    def attended_backward(
        self, block: Block, g: Tensor, waits: Attended, position: Position
    ) -> Projected:
        """Return the gradients of what `project_gated` gave from that of o; those of another
        block's keys and values wait for it."""
        ggate = None
        if waits.gate is not None and waits.o is not None:
            opened = torch.sigmoid(waits.gate)
            ggate = g * waits.o * opened * (1.0 - opened)
            g = g * opened
        gq, *of_keys = self.attend_backward(block, g, waits.q, waits.k, waits.v, waits.kept)
        gk, gv = self._shared_backward(block, *of_keys)
        return *self.rope_backward(block, gq, gk, position, waits.projected), gv, ggate

    def _shared(self, block: Block, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the block attends to; others may read its own."""
        if k is None or v is None:
            assert block.shared is not None  # noqa: S101 - a block before has them
            return block.shared.taken()
        if block.shared is not None:
            block.shared.k = k
            block.shared.v = v
        return k, v

    def _shared_backward(
        self, block: Block, gk: Tensor, gv: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of the block's own keys and values, with those of the blocks that
        read them; None if they are another's."""
        if block.shared is None:
            return gk, gv
        block.shared.add(gk, gv)
        if not self.traits.has_keys(block.layer):
            return None, None
        sums = block.shared.gradients
        block.shared.gradients = None
        assert sums is not None  # noqa: S101 - `add` has just set them
        return sums
