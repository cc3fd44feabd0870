"""The stages of one block, forward and backward, derived by hand (appendix A); no automatic
differentiation.

The same functions train in eager PyTorch and are the graph of an exported program; `kernels` says
how an operation is done. Activations are matrices: N = rows * tokens, D hidden, F the MLP's inner
width. LoRA's A is float32 [rank, inputs], B float32 [rank, outputs] (PEFT's, transposed); both are
used in the dtype of activations, and their gradients are float32. A `_backward` stage takes the
gradient of the stage's output and gives that of its input; the gradients of A and B go to a
callback the moment they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ondevice.core.traits import ATTENDS, CONVOLUTION, DELTA
from ondevice.methods.mesp.torch.attention import Attention
from ondevice.methods.mesp.torch.beside import Beside
from ondevice.methods.mesp.torch.block import Block, OnGradient
from ondevice.methods.mesp.torch.convolution import Convolution
from ondevice.methods.mesp.torch.delta import Delta
from ondevice.methods.mesp.torch.kept import Kept
from ondevice.methods.mesp.torch.kernels import Dense, Position
from ondevice.nn.cross_entropy import row_chunks


class Stages(Attention, Convolution, Delta, Beside):
    """The stages by name; shapes of a call come with `rows`."""

    def out(self, block: Block, x: Tensor, o: Tensor) -> Tensor:
        """Compute x + o Wo^T: the block's middle, [N, D], in new memory: the backward pass needs x
        again."""
        if self.kernels.in_place:
            x = x.clone()
        return self.join(block, self._out_part(block), "after_attention", x, o)

    def out_backward(self, block: Block, o: Tensor, g: Tensor, on_gradient: OnGradient) -> Tensor:
        """Return gradient of o from that of the middle."""
        part = self._out_part(block)
        g = self.branch_gradient(block, part, "after_attention", lambda: o, g)
        return self.linear_backward(block, part, o, g, on_gradient)

    def _out_part(self, block: Block) -> str:
        return self.traits.out_part(block.layer)


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


@dataclass(frozen=True)
class Mixer:
    """What mixes a block's tokens.

    Attributes:
        forward: of the block, its input, the position, the number of rows and what was kept
            (nothing in the forward pass): o [N, ...], and what `backward` wants.
        keep: puts both into what the forward pass keeps, as far as that says.
        backward: of the block, the gradient of o, what `backward` wants and the position: the
            gradients of what was projected from the normed input.
        projections_backward: of the block, the normed input, these gradients, the callback and
            whether nothing below is trained: the gradient of the normed input.
    """

    forward: Callable[[Block, Tensor, Position, int, Kept], tuple[Tensor, Any]]
    keep: Callable[[Kept, Tensor, Any], None]
    backward: Callable[[Block, Tensor, Any, Position], Any]
    projections_backward: Callable[[Block, Tensor, Any, OnGradient, bool], Tensor | None]


def keep_mixed(kept: Kept, o: Tensor, waits: Any) -> None:
    """Keep a mixer's output and what its backward pass wants together."""
    if kept.projections:
        kept.tensors["mixed"] = (o, waits)


class Blocks:
    """Forward and backward of one block over [N, D], N = rows * tokens.

    Args:
        chunk_tokens: tokens of the MLP at once, or a function of their number; None is all, as in a
            graph, in which a slice has memory of its own.
    """

    def __init__(self, stages: Stages, chunk_tokens: int | Callable[[int], int] | None) -> None:
        self.stages = stages
        self.chunk_tokens = chunk_tokens
        s = stages
        self.mixers: dict[str, Mixer] = {
            ATTENDS: Mixer(
                s.mix_attended, s.keep_attended, s.attended_backward, s.project_backward
            ),
            CONVOLUTION: Mixer(
                s.mix_convolved,
                keep_mixed,
                s.convolve_backward,
                s.convolved_projections_backward,
            ),
            DELTA: Mixer(
                s.mix_corrected, keep_mixed, s.correct_backward, s.corrected_projections_backward
            ),
        }

    def mixer(self, block: Block) -> Mixer:
        """Return the functions of what mixes the block's tokens."""
        return self.mixers[self.stages.traits.mixer(block.layer)]

    def forward(
        self, block: Block, x: Tensor, position: Position, rows: int, kept: Kept | None = None
    ) -> Tensor:
        """Return the block's output, in new memory."""
        s = self.stages
        kept = kept or Kept()
        mixer = self.mixer(block)
        o, waits = mixer.forward(block, x, position, rows, Kept())
        mixer.keep(kept, o, waits)
        del waits
        m = s.out(block, x, o)
        del o
        if kept.projections:
            kept.tensors["middle"] = m.clone()  # the MLP is added in its memory
        chunks = self._chunks(m)
        block = self._with_dense_mlp(block, len(chunks))
        inputs = self._layer_inputs(block, len(chunks))
        outputs = [
            s.behind(block, self._mlp(block, chunk, kept), p)
            for chunk, p in zip(chunks, inputs, strict=True)
        ]  # in m's memory
        return outputs[0] if len(chunks) == 1 else m

    def backward(
        self,
        block: Block,
        x: Tensor,
        g: Tensor,
        position: Position,
        rows: int,
        on_gradient: OnGradient,
        last: bool = False,
        kept: Kept | None = None,
    ) -> Tensor:
        """Return the gradient of `x` from that of the block's output, in g's memory.

        The block's output is not computed again: no gradient needs it. The MLP's backward pass is
        first, while q, k, v (or what another mixer is of) and o wait; so when attention's begins,
        the MLP's wide tensors are gone.

        Args:
            last: nothing below is trained; the result is then not a gradient.
            kept: of the forward pass; the rest is computed again, to the same bits.
        """
        s = self.stages
        kept = kept or Kept()
        mixer = self.mixer(block)
        o, waits = mixer.forward(block, x, position, rows, kept)
        m = kept.take("middle")
        if m is None:
            m = s.out(block, x, o)
        g = self._mlp_backward(block, m, g, on_gradient, kept)
        del m
        go = s.out_backward(block, o, g, on_gradient)
        del o
        projected = mixer.backward(block, go, waits, position)
        del go, waits
        n = s.norm(
            block, x
        )  # a second time: it was let go while the MLP and attention had the memory
        gn = mixer.projections_backward(block, n, projected, on_gradient, last)
        del n, projected
        if gn is None:
            return g
        return s.norm_backward(block, x, gn, g)

    def _mlp(self, block: Block, m: Tensor, kept: Kept | None = None) -> Tensor:
        """m + the MLP of it, in m's memory."""
        s = self.stages
        if s.has_beside(block):
            return s.beside(block, m)
        if block.routed is not None:
            return s.routed(block, m)
        if block.mlp is not None:
            return s.other_mlp(block, m)
        n = s.mlp_norm(block, m)
        if s.sums_parts(block):
            gate, up, parts = s.gate_up_apart(block, n)
            act = s.kernels.swiglu_parts(gate, up, parts)
        else:
            gate, up = s.gate_up(block, n)
            act = s.act(gate, up)
        del n
        if kept is not None and kept.mlp:
            kept.tensors.setdefault("gate_up", []).append((gate, up))
        del gate, up
        return s.down(block, m, act)

    def _mlp_backward(
        self,
        block: Block,
        m: Tensor,
        g: Tensor,
        on_gradient: OnGradient,
        kept: Kept | None = None,
    ) -> Tensor:
        """The gradient of the block's middle `m`, in g's memory."""
        chunks = self._chunks(m)
        block = self._with_dense_mlp(block, len(chunks))
        gradients = self._chunks(g)
        sums = GradientSums(on_gradient, len(chunks))
        gate_up = (kept or Kept()).take("gate_up") or [None] * len(chunks)
        inputs = self._layer_inputs(block, len(chunks))
        if len(chunks) == 1:
            return self._mlp_chunk_backward(block, m, g, sums, gate_up.pop(), inputs[0])
        for chunk, gradient, p in zip(chunks, gradients, inputs, strict=True):
            self._mlp_chunk_backward(block, chunk, gradient, sums, gate_up.pop(0), p)
        sums.finish()
        return g

    def _mlp_chunk_backward(
        self,
        block: Block,
        m: Tensor,
        g: Tensor,
        on_gradient: OnGradient,
        kept: tuple[Tensor, Tensor] | None,
        p: Tensor | None,
    ) -> Tensor:
        s = self.stages
        if s.has_beside(block):
            return s.beside_backward(block, m, p, g, on_gradient)
        if block.routed is not None:
            return s.routed_backward(block, m, g)
        if block.mlp is not None:
            if s.has_behind(block):
                y = s.other_mlp(block, m.clone())
                g = s.behind_backward(block, y, p, g, on_gradient)
            return s.other_mlp_backward(block, m, g, on_gradient)
        n = s.mlp_norm(block, m)
        if s.sums_parts(block):
            gate, up, parts = s.gate_up_apart(block, n, kept)
            ggate, gup = s.glu_down_backward(block, (gate, up), parts, g, on_gradient)
            del gate, up, parts, kept
        else:
            gate, up = kept or s.gate_up(block, n)
            if s.has_behind(block):
                y = s.down(block, m.clone(), s.act(gate, up))
                g = s.behind_backward(block, y, p, g, on_gradient)
                del y
            gact = s.down_backward(block, gate, up, g, on_gradient)
            ggate, gup = s.act_backward(gate, up, gact)
            del gate, up, gact, kept
        gn = s.gate_up_backward(block, n, ggate, gup, on_gradient)
        del ggate, gup, n
        return s.mlp_norm_backward(block, m, gn, g)

    def _with_dense_mlp(self, block: Block, chunks: int) -> Block:
        """Return the block with the MLP's packed matrices made dense, on a GPU if each would be for
        every one of many chunks of tokens; two cost less time than the memory is worth."""
        if chunks <= 2 or not self.stages.sums_parts(block):
            return block
        dense = {
            part: replace(block.linears[part], matrix=Dense(block.linears[part].matrix.dense()))
            for part in self.stages.mlp_parts()
        }
        return replace(block, linears=block.linears | dense)

    def _layer_inputs(self, block: Block, chunks: int) -> tuple[Tensor | None, ...]:
        """Return each chunk's part of `Block.layer_input`."""
        if block.layer_input is None:
            return (None,) * chunks
        return self._chunks(block.layer_input)

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        """Views of [N, D]."""
        size = self.chunk_tokens
        return row_chunks(x, size(x.shape[0]) if callable(size) else size)
