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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.torch.kernels import Matrix, Position, Scores, TorchKernels
from ondevice.nn.cross_entropy import cast, row_chunks, times
from ondevice.nn.experts import ExpertLora, peft_layout

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims


@dataclass(frozen=True)
class RowsApart:
    """Where the tokens of packed sequences [B, T] are among rows [R, L].

    Attributes:
        tokens: int64 [n], places in B * T of the tokens whose rows have more than one; padding is
            not among them.
        apart: int64 [n], the same tokens' places in R * L.
        rows: R; `length` is L, tokens of the longest row.
        shape: (B, T).
    """

    tokens: Tensor
    apart: Tensor
    rows: int
    length: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, position_ids_BT: Tensor) -> RowsApart:
        """Find the rows of int64 [B, T]; a row begins where the position is 0."""
        batch, length = position_ids_BT.shape
        after = torch.cat((position_ids_BT[:, 1:], position_ids_BT.new_zeros(batch, 1)), 1)
        tokens = ((position_ids_BT > 0) | (after > 0)).reshape(-1).nonzero().squeeze(1)
        places = position_ids_BT.reshape(-1)[tokens]
        number = (places == 0).cumsum(0) - 1
        longest = int(places.max()) + 1
        return cls(tokens, number * longest + places, int(number[-1]) + 1, longest, (batch, length))

    def take_apart(self, x_BTHh: Tensor) -> Tensor:
        """Return [R, L, H, h], zero for padding."""
        out = x_BTHh.new_zeros(self.rows * self.length, *x_BTHh.shape[2:])
        out[self.apart] = x_BTHh.flatten(0, 1)[self.tokens]
        return out.view(self.rows, self.length, *x_BTHh.shape[2:])

    def together(self, x_RLHh: Tensor) -> Tensor:
        """Return [B, T, H, h], contiguous; zero for padding."""
        batch, length = self.shape
        out = x_RLHh.new_zeros(batch * length, *x_RLHh.shape[2:])
        out[self.tokens] = x_RLHh.flatten(0, 1)[self.apart]
        return out.view(batch, length, *x_RLHh.shape[2:])


OnGradient = Callable[[str, Tensor, Tensor], None]
"""Takes a target and float32 gradients of its A [rank, inputs] and B [rank, outputs]: uses them and
keeps nothing."""
OtherMlp = Callable[[Tensor, Mapping[str, ExpertLora]], Tensor]
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b + scale (x A^T) B; without A and B if the layer has no adapter."""

    matrix: Matrix
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    def h(self, x: Tensor) -> Tensor:
        """Compute x A^T [N, rank]."""
        assert self.a is not None  # noqa: S101 - the layer has an adapter
        return functional.linear(x, cast(self.a, x.dtype))


@dataclass(frozen=True)
class Block:
    """The tensors that one block computes with.

    Attributes:
        norms: factors of its norms by place (`BlockTraits.norms`), [D] each; of `q` and `k`
            [head_dim], or all heads.
        linears: by target.
        layer: its number, which says its window and whether it rotates q and k.
        mlp: an MLP that is not the gated one, such as a mixture of experts, of tokens that are
            normed, [N, D], and adapters of its experts -> [N, D]; its gradient is autograd's, over
            only this MLP.
        pairs: these adapters by target, float32.
    """

    norms: dict[str, Tensor]
    linears: dict[str, Linear]
    layer: int = 0
    mlp: OtherMlp | None = None
    pairs: Mapping[str, ExpertLora] = field(default_factory=dict)


class Stages:
    """The stages by name; shapes of a call come with `rows`."""

    def __init__(self, dims: ModelDims, kernels: TorchKernels) -> None:
        self.dims = dims
        self.traits = dims.traits
        self.kernels = kernels
        self.apart: RowsApart | None = None
        """Of the current batch, if its sequences have several rows each."""

    # Linear layers, appendix A.1.

    def linear(self, block: Block, target: str, x: Tensor, into: Tensor | None = None) -> Tensor:
        """Return [N, inputs] -> [N, outputs]; with `into` the result is added there."""
        layer = block.linears[target]
        y = self.kernels.frozen_linear(x, layer.matrix, layer.bias, into)
        if layer.b is None:
            return y
        return self.kernels.add_product(y, layer.h(x), cast(layer.b, x.dtype), layer.scale)

    def linear_backward(
        self,
        block: Block,
        target: str,
        x: Tensor,
        g: Tensor,
        on_gradient: OnGradient,
        into: Tensor | None = None,
    ) -> Tensor:
        """Return gradient of the input (Eq. 13), added to `into` if given; those of A and B (Eqs.
        10 to 12) are called back.

        The callback may change A and B at once, and the gradient of the input is of the old ones:
        so it comes last.
        """
        gradients, gh = self.lora_backward(block, target, x, g)
        into = self.input_backward(block, target, g, gh, into)
        if gradients is not None:
            on_gradient(target, *gradients)
        return into

    def lora_backward(
        self, block: Block, target: str, x: Tensor, g: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """Return gradients of A and B, float32, and that of h; None if the layer has no adapter."""
        layer = block.linears[target]
        if layer.a is None or layer.b is None:
            return None, None
        h = layer.h(x)
        gh = functional.linear(g, cast(layer.b, g.dtype)) * layer.scale  # Eq. 11: scale g B^T
        ga = cast(torch.mm(gh.t(), x), torch.float32)  # Eq. 10: gh^T x
        # Eq. 12: scale h^T g; scaled in float32, so that a half-precision sum of many tokens cannot
        # underflow again.
        return (ga, cast(torch.mm(h.t(), g), torch.float32) * layer.scale), gh

    def input_backward(
        self, block: Block, target: str, g: Tensor, gh: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        """Compute g W + gh A, added to `into` if given."""
        layer = block.linears[target]
        into = self.kernels.frozen_backward(g, layer.matrix, into)
        if gh is None or layer.a is None:
            return into
        return self.kernels.add_product(into, gh, cast(layer.a, g.dtype))

    # Norms and residuals.

    def normed(self, block: Block, place: str, x: Tensor) -> Tensor:
        """Return [N, D] -> [N, D]; `x` itself if the block has no such norm."""
        weight = block.norms.get(place)
        if weight is None:
            return x
        y = self.kernels.rms_norm(self._last(x, weight), weight, self.dims.norm_eps)
        return y if y.shape == x.shape else y.reshape(x.shape)

    def normed_backward(
        self, block: Block, place: str, x: Tensor, gn: Tensor, g: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of x from that of its norm, added to g in g's memory if given."""
        weight = block.norms.get(place)
        if g is None and weight is None:
            return gn
        if g is None:
            g = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if weight is None:
            return g.add_(gn)
        parts = (
            self._last(x, weight),
            weight,
            self.dims.norm_eps,
            self._last(gn, weight),
            self._last(g, weight),
        )
        g = self.kernels.rms_norm_backward(*parts)
        return g if g.shape == x.shape else g.reshape(x.shape)

    def join(self, block: Block, target: str, place: str, into: Tensor, x: Tensor) -> Tensor:
        """Compute into + the branch's last linear layer of x, with its norm and factor, in the
        memory of `into`."""
        if place not in block.norms and self.traits.residual_scale == 1.0:
            return self.linear(block, target, x, into)
        y = self.normed(block, place, self.linear(block, target, x))
        scale = self.traits.residual_scale
        if self.kernels.in_place:
            return into.add_(y, alpha=scale)
        return into + times(y, scale)

    def branch_gradient(
        self, block: Block, target: str, place: str, x: Callable[[], Tensor], g: Tensor
    ) -> Tensor:
        """Return the gradient of the branch's last linear layer from that of the sum; `x` makes the
        layer's input."""
        g = times(g, self.traits.residual_scale)
        if place not in block.norms:
            return g
        return self.normed_backward(block, place, self.linear(block, target, x()), g)

    @staticmethod
    def _last(x: Tensor, weight: Tensor) -> Tensor:
        """Split heads if the norm is over single heads."""
        width = weight.shape[-1]
        return x if x.shape[-1] == width else x.reshape(-1, width)

    # Attention.

    def norm(self, block: Block, x: Tensor) -> Tensor:
        """Return [N, D] -> [N, D]."""
        return self.normed(block, "before_attention", x)

    def project(self, block: Block, n: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute n -> q [B, T, H, h], k and v [B, T, K, h], not yet rotated."""
        q, k, v = self._projections(block, n)
        q = self.normed(block, "q", q)
        k = self.normed(block, "k", k)
        return self._heads(q, rows), self._heads(k, rows), self._heads(v, rows)

    def _projections(self, block: Block, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.traits.fused:
            dims = self.dims
            widths = (
                dims.heads * dims.head_dim,
                dims.kv_heads * dims.head_dim,
                dims.kv_heads * dims.head_dim,
            )
            q, k, v = self.linear(block, "qkv_proj", n).split(widths, -1)
            return q, k, v
        q, k, v = (self.linear(block, target, n) for target in QKV)
        return q, k, v

    def rope(self, block: Block, q: Tensor, k: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        """Rotate q and k, in their memory."""
        if not self.traits.rotated(block.layer):
            return q, k
        return self.kernels.rope(q, k, position)

    def scores(self, block: Block, length_tokens: int) -> Scores:
        """Return how a block's scores are made; a window that holds all queries does not count."""
        window = self.traits.window(block.layer)
        scale = self.traits.score_scale or self.dims.head_dim**-0.5
        return Scores(scale, window if window < length_tokens else 0)

    def attend(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        """Return [N, H h], and what the backward pass wants."""
        if self.apart is not None:
            q, k, v = (self.apart.take_apart(x) for x in (q, k, v))
        o, kept = self.kernels.attend(q, k, v, self.scores(block, q.shape[1]))
        if self.apart is not None:
            o = self.apart.together(o)
        return o.reshape(-1, q.shape[2] * q.shape[3]), kept

    def out(self, block: Block, x: Tensor, o: Tensor) -> Tensor:
        """Compute x + o Wo^T: the block's middle, [N, D], in new memory: the backward pass needs x
        again."""
        if self.kernels.in_place:
            x = x.clone()
        return self.join(block, "o_proj", "after_attention", x, o)

    def out_backward(self, block: Block, o: Tensor, g: Tensor, on_gradient: OnGradient) -> Tensor:
        """Return gradient of o from that of the middle."""
        g = self.branch_gradient(block, "o_proj", "after_attention", lambda: o, g)
        return self.linear_backward(block, "o_proj", o, g, on_gradient)

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
        self, block: Block, gq: Tensor, gk: Tensor, position: Position
    ) -> tuple[Tensor, Tensor]:
        """Rotate the gradients back, in their memory: the transpose of a rotation is that by the
        negative angle."""
        return self.rope(block, gq, gk, (position[0], -position[1]))

    def project_backward(
        self,
        block: Block,
        n: Tensor,
        g: tuple[Tensor, Tensor, Tensor],
        on_gradient: OnGradient,
        last: bool = False,
    ) -> Tensor | None:
        """Return the gradient of n; None if `last` says that nothing below is trained."""
        gn: Tensor | None = None
        by_target = [gradient.reshape(n.shape[0], -1) for gradient in g]
        if "q" in block.norms:  # what was normed is computed again: it was let go with the rest
            q, k, _ = self._projections(block, n)
            by_target[0] = self.normed_backward(block, "q", q, by_target[0])
            by_target[1] = self.normed_backward(block, "k", k, by_target[1])
            del q, k
        if self.traits.fused:
            by_target = [torch.cat(by_target, -1)]
        for target, gradient in zip(("qkv_proj",) if self.traits.fused else QKV, by_target):
            if not last:
                gn = self.linear_backward(block, target, n, gradient, on_gradient, gn)
            elif (gradients := self.lora_backward(block, target, n, gradient)[0]) is not None:
                on_gradient(target, *gradients)
        return gn

    def norm_backward(self, block: Block, x: Tensor, gn: Tensor, g: Tensor) -> Tensor:
        """Compute g + the gradient of x from that of its norm; in g's memory."""
        return self.normed_backward(block, "before_attention", x, gn, g)

    # The MLP.

    def mlp_norm(self, block: Block, m: Tensor) -> Tensor:
        return self.normed(block, "before_mlp", m)

    def gate_up(self, block: Block, n: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N, F] each."""
        if self.traits.fused:
            gate, up = self.linear(block, "gate_up_proj", n).chunk(2, -1)
            return gate, up
        return self.linear(block, "gate_proj", n), self.linear(block, "up_proj", n)

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) up, or with the activation that the block has, in new memory."""
        return self.kernels.glu(self.traits.activation, gate, up)

    def down(self, block: Block, m: Tensor, act: Tensor) -> Tensor:
        """Compute m + act Wd^T, in m's memory."""
        return self.join(block, "down_proj", "after_mlp", m, act)

    def down_backward(
        self, block: Block, gate: Tensor, up: Tensor, g: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Return gradient of the activation.

        The activation itself is computed only for the gradients of A and B, and freed before its
        gradient exists: of [N, F] there are never more than gate, up and one more.
        """
        gradients = None
        gh = None
        g = self.branch_gradient(block, "down_proj", "after_mlp", lambda: self.act(gate, up), g)
        if block.linears["down_proj"].a is not None:
            gradients, gh = self.lora_backward(block, "down_proj", self.act(gate, up), g)
        gact = self.input_backward(block, "down_proj", g, gh)
        if gradients is not None:
            on_gradient("down_proj", *gradients)
        return gact

    def act_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of gate and up, in the memory of up and g; gate is used up."""
        return self.kernels.glu_backward(self.traits.activation, gate, up, g)

    def gate_up_backward(
        self, block: Block, n: Tensor, ggate: Tensor, gup: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Return gradient of the MLP's norm."""
        if self.traits.fused:
            return self.linear_backward(
                block, "gate_up_proj", n, torch.cat((ggate, gup), -1), on_gradient
            )
        gn = self.linear_backward(block, "gate_proj", n, ggate, on_gradient)
        return self.linear_backward(block, "up_proj", n, gup, on_gradient, gn)

    def other_mlp(self, block: Block, m: Tensor) -> Tensor:
        """Compute m + an MLP that is not the gated one, in m's memory."""
        assert block.mlp is not None  # noqa: S101 - the caller looked
        y = block.mlp(self.mlp_norm(block, m), block.pairs)
        if self.kernels.in_place:
            return m.add_(y)
        return m + y

    def other_mlp_backward(
        self, block: Block, m: Tensor, g: Tensor, on_gradient: OnGradient
    ) -> Tensor:
        """Compute g + the gradient of m through such an MLP, in g's memory; a router's weights have
        their part.

        Gradients of the experts' pairs are called back as PEFT lays them out: A [experts * rank,
        inputs], B [rank * experts, outputs].
        """
        assert block.mlp is not None  # noqa: S101 - the caller looked
        n = self.mlp_norm(block, m)
        with torch.enable_grad():
            leaf = n.detach().requires_grad_(True)
            pairs = {name: pair.leaf() for name, pair in block.pairs.items()}
            leaves = [tensor for pair in pairs.values() for tensor in (pair.a_ERI, pair.b_EOR)]
            gn, *learned = torch.autograd.grad(block.mlp(leaf, pairs), [leaf, *leaves], g)
        for number, target in enumerate(pairs):
            on_gradient(target, *peft_layout(*learned[2 * number : 2 * number + 2]))
        return self.mlp_norm_backward(block, m, gn, g)

    def mlp_norm_backward(self, block: Block, m: Tensor, gn: Tensor, g: Tensor) -> Tensor:
        """Compute g + the gradient of m from that of its norm; in g's memory."""
        return self.normed_backward(block, "before_mlp", m, gn, g)

    def _heads(self, x: Tensor, rows: int) -> Tensor:
        return x.view(rows, x.shape[0] // rows, -1, self.dims.head_dim)


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
        if gn is None:
            return g
        return s.norm_backward(block, x, gn, g)

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
        return row_chunks(x, self.chunk_tokens)
