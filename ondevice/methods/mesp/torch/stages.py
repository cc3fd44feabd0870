"""The stages of one block, forward and backward, derived by hand (appendix A); no automatic differentiation.

Activations are matrices: N = rows * tokens, D hidden, F the MLP's inner width. LoRA's A is float32 [rank, inputs], B
float32 [outputs, rank]; both are used in the dtype of activations, and their gradients are float32. A `_backward`
stage takes the gradient of the stage's output and gives that of its input; pairs learn through `Learn`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.torch import attention

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.kernels import Kernels
    from ondevice.models import ModelDims

Position = tuple[Tensor, Tensor]
"""cos and sin, each [tokens, head_dim / 2]."""
Learn = Callable[[str, Tensor, Tensor], None]
"""Takes a target and float32 gradients of its A and B: uses them and keeps nothing."""
QKV = ("q_proj", "k_proj", "v_proj")


class Matrix(Protocol):
    """A frozen weight [outputs, inputs], dense or to be made dense."""

    def dense(self) -> Tensor: ...


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b + scale (x A^T) B^T; without A and B where the layer carries no pair."""

    matrix: Matrix
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0

    def h(self, x: Tensor) -> Tensor | None:
        """x A^T [N, rank]; None without a pair."""
        return None if self.a is None else functional.linear(x, self.a.to(x.dtype))


@dataclass(frozen=True)
class Block:
    """What one block computes with.

    Attributes:
        norms: weights of the norm before attention and of that before the MLP, [D] each.
        linears: by target.
    """

    norms: tuple[Tensor, Tensor]
    linears: dict[str, Linear]


class Stages:
    """The stages by name; shapes of a call come with `rows`."""

    def __init__(self, dims: ModelDims, kernels: Kernels, store_h: bool = False) -> None:
        self.dims, self.kernels, self.store_h = dims, kernels, store_h
        self.stored: dict[str, Tensor] = {}

    # Linear layers, appendix A.1.

    def linear(self, block: Block, target: str, x: Tensor, into: Tensor | None = None, keep: bool = False) -> Tensor:
        """[N, inputs] -> [N, outputs]; with `into` the result is added there. `keep` stores h where asked for."""
        layer = block.linears[target]
        w = layer.matrix.dense()
        if into is None:
            into = functional.linear(x, w, layer.bias)
        else:
            into = torch.addmm(into, x, w.t(), out=into)
            into = into if layer.bias is None else into.add_(layer.bias)
        h = layer.h(x)
        if h is not None and layer.b is not None:
            into.addmm_(h, layer.b.to(x.dtype).t(), alpha=layer.scale)
            if keep and self.store_h:
                self.stored[target] = h
        return into

    def linear_backward(
        self, block: Block, target: str, x: Tensor, g: Tensor, learn: Learn, into: Tensor | None = None
    ) -> Tensor:
        """Gradient of the input (Eq. 13), added to `into` if given; then the pair learns from Eqs. 10 to 12.

        The pair may be another one once it has learned, so it does so last.
        """
        gradients, gh = self.pair_backward(block, target, x, g)
        into = self.input_backward(block, target, g, gh, into)
        if gradients is not None:
            learn(target, *gradients)
        return into

    def pair_backward(
        self, block: Block, target: str, x: Tensor, g: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """Gradients of A and B, float32, and that of h; None where the layer carries no pair."""
        layer = block.linears[target]
        if layer.a is None or layer.b is None:
            return None, None
        h = self.stored.pop(target, None)
        h = functional.linear(x, layer.a.to(x.dtype)) if h is None else h
        gh = (g @ layer.b.to(g.dtype)).mul_(layer.scale)
        return ((gh.t() @ x).float(), (g.t() @ h).float().mul_(layer.scale)), gh

    def input_backward(
        self, block: Block, target: str, g: Tensor, gh: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        """g W + gh A, added to `into` if given."""
        layer = block.linears[target]
        w = layer.matrix.dense()
        into = g @ w if into is None else torch.addmm(into, g, w, out=into)
        return into if gh is None or layer.a is None else into.addmm_(gh, layer.a.to(g.dtype))

    # Attention.

    def norm(self, block: Block, x: Tensor) -> Tensor:
        """[N, D] -> [N, D]."""
        return self.kernels.rms_norm(x, block.norms[0], self.dims.norm_eps)

    def project(self, block: Block, n: Tensor, rows: int, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """n -> q [B, T, H, h], k and v [B, T, K, h], not yet rotated."""
        q, k, v = (self._heads(self.linear(block, target, n, keep=keep), rows) for target in QKV)
        return q, k, v

    def rope(self, q: Tensor, k: Tensor, position: Position) -> None:
        """Rotate q and k in place."""
        self.kernels.rope(q, k, position)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
        """[N, H h], and what the backward pass wants."""
        o, kept = attention.attend(q, k, v)
        return o.reshape(-1, q.shape[2] * q.shape[3]), kept

    def out(self, block: Block, x: Tensor, o: Tensor, keep: bool = False) -> Tensor:
        """x + o Wo^T: the block's middle, [N, D]."""
        return self.linear(block, "o_proj", o, x.clone(), keep)

    def out_backward(self, block: Block, o: Tensor, g: Tensor, learn: Learn) -> Tensor:
        """Gradient of o from that of the middle."""
        return self.linear_backward(block, "o_proj", o, g, learn)

    def attend_backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the rotated q and k, and of v."""
        return attention.attend_backward(g.view(q.shape), q, k, v, kept)

    def rope_backward(self, gq: Tensor, gk: Tensor, position: Position) -> None:
        """Rotate the gradients back, in place."""
        self.kernels.rope(gq, gk, (position[0], -position[1]))

    def project_backward(
        self, block: Block, n: Tensor, g: tuple[Tensor, Tensor, Tensor], learn: Learn, last: bool = False
    ) -> Tensor | None:
        """Gradient of n; None where `last` says that nothing below is trained."""
        gn: Tensor | None = None
        for target, part in zip(QKV, g):
            part = part.reshape(n.shape[0], -1)
            if not last:
                gn = self.linear_backward(block, target, n, part, learn, gn)
            elif (found := self.pair_backward(block, target, n, part)[0]) is not None:
                learn(target, *found)
        return gn

    def norm_backward(self, block: Block, x: Tensor, gn: Tensor, g: Tensor) -> Tensor:
        """g + the gradient of x from that of its norm; in g's memory."""
        return self.kernels.rms_norm_backward(x, block.norms[0], self.dims.norm_eps, gn, g)

    # The MLP.

    def mlp_norm(self, block: Block, m: Tensor) -> Tensor:
        return self.kernels.rms_norm(m, block.norms[1], self.dims.norm_eps)

    def gate_up(self, block: Block, n: Tensor, keep: bool = False) -> tuple[Tensor, Tensor]:
        """[N, F] each."""
        return self.linear(block, "gate_proj", n, keep=keep), self.linear(block, "up_proj", n, keep=keep)

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) up, in new memory."""
        return self.kernels.swiglu(gate, up)

    def down(self, block: Block, m: Tensor, act: Tensor) -> Tensor:
        """m + act Wd^T, in m's memory."""
        return self.linear(block, "down_proj", act, m)

    def down_backward(self, block: Block, gate: Tensor, up: Tensor, g: Tensor, learn: Learn) -> Tensor:
        """Gradient of the activation; the activation itself is made for the pair's gradients and dropped first."""
        gradients, gh = None, None
        if block.linears["down_proj"].a is not None:
            gradients, gh = self.pair_backward(block, "down_proj", self.act(gate, up), g)
        gact = self.input_backward(block, "down_proj", g, gh)
        if gradients is not None:
            learn("down_proj", *gradients)
        return gact

    def act_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up, in the memory of up and g; gate is used up."""
        return self.kernels.swiglu_backward(gate, up, g)

    def gate_up_backward(self, block: Block, n: Tensor, ggate: Tensor, gup: Tensor, learn: Learn) -> Tensor:
        """Gradient of the MLP's norm."""
        gn = self.linear_backward(block, "gate_proj", n, ggate, learn)
        return self.linear_backward(block, "up_proj", n, gup, learn, gn)

    def mlp_norm_backward(self, block: Block, m: Tensor, gn: Tensor, g: Tensor) -> Tensor:
        """g + the gradient of m from that of its norm; in g's memory."""
        return self.kernels.rms_norm_backward(m, block.norms[1], self.dims.norm_eps, gn, g)

    def _heads(self, x: Tensor, rows: int) -> Tensor:
        return x.view(rows, x.shape[0] // rows, -1, self.dims.head_dim)
