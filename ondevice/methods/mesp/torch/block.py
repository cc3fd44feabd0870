"""The tensors that a block computes with, and a linear layer's products and gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.torch.kernels import Matrix, TorchKernels
from ondevice.nn.cross_entropy import cast, times
from ondevice.nn.experts import ExpertLora
from ondevice.nn.rows_apart import BranchesApart, RowsApart

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.traits import RoutingTraits

OnGradient = Callable[[str, Tensor, Tensor], None]
"""Takes a target and float32 gradients of its A [rank, inputs] and B [rank, outputs]: uses them and
keeps nothing."""
OtherMlp = Callable[[Tensor, Mapping[str, ExpertLora]], Tensor]


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b + scale (x A^T) B; without A and B if the layer has no adapter.

    Attributes:
        place: a vector that A and B lie in, the first element of each, and their rank.
    """

    matrix: Matrix
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    place: tuple[Tensor, int, int, int] | None = None

    def h(self, x: Tensor) -> Tensor:
        """Compute x A^T [N, rank]."""
        assert self.a is not None  # noqa: S101 - the layer has an adapter
        return functional.linear(x, cast(self.a, x.dtype))


@dataclass
class SharedKeys:
    """Keys and values that later blocks attend to as well, [B, T, K, h], from their block's forward
    pass to its backward pass; and the sums of their gradients from those blocks."""

    k: Tensor | None = None
    v: Tensor | None = None
    gradients: tuple[Tensor, Tensor] | None = None

    def add(self, gk: Tensor, gv: Tensor) -> None:
        """Add a later block's gradients."""
        if self.gradients is not None:
            gk = gk + self.gradients[0]
            gv = gv + self.gradients[1]
        self.gradients = (gk, gv)

    def taken(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the block that computed them."""
        assert self.k is not None and self.v is not None  # noqa: S101 - it ran before
        return self.k, self.v


@dataclass
class Routed:
    """What a block has of its mixture, what it gives its experts and takes from them.

    Attributes:
        router: R, [experts, D].
        active: experts of a token, K.
        traits: how they are chosen and weighted; the factor of a branch is in `traits.scale`.
        bias: of the experts' scores for the choice, [experts], if there is one.
        shared: `gate_proj`, `up_proj` and `down_proj` of the expert for all tokens; empty if there
            is none.
        shared_gate: [1, D]; the sigmoid of its product is that expert's weight.
        normed: n, [N, D], from the forward pass on.
        weights: w, [N, experts], from the forward pass on; 0 where a token did not choose an
            expert.
        gradients: of `normed` through the chosen experts, [N, D], and of `weights`, [N, experts],
            0 where `weights` is; for the backward pass.
        dense: the normed MLP next to the experts, [N, D], from the forward pass on, if there is
            one; `total` is then the sum of the experts, [N, D], for the backward pass.
    """

    router: Tensor
    active: int
    traits: RoutingTraits
    shared: Mapping[str, Matrix]
    shared_gate: Tensor | None = None
    bias: Tensor | None = None
    normed: Tensor | None = None
    weights: Tensor | None = None
    gradients: tuple[Tensor, Tensor] | None = None
    dense: Tensor | None = None
    total: Tensor | None = None

    def taken(self) -> tuple[Tensor, ...]:
        """Return `normed` and `weights`, and `dense` if there is one."""
        assert self.normed is not None and self.weights is not None  # noqa: S101 - it ran before
        mixed = (self.normed, self.weights)
        return mixed if self.dense is None else (*mixed, self.dense)


@dataclass(frozen=True)
class Block:
    """The tensors that one block computes with.

    Attributes:
        norms: factors of its norms by place (`BlockTraits.norms`), [D] each; of `q` and `k`
            [head_dim], or all heads.
        linears: by part (`ModelDims.block_linears`).
        layer: its number, which says its window and whether it rotates q and k.
        mlp: an MLP that is not the gated one, such as a mixture of experts, of tokens that are
            normed, [N, D], and adapters of its experts -> [N, D]; its gradient is autograd's, over
            only this MLP. If experts stand next to the gated MLP (`Beside`), these with their norms,
            of the block's middle.
        pairs: these adapters by target, float32.
        mixer: tensors of no linear layer and no norm (`ModelDims.mixer_tensors`), by part; `taps`
            is [channels, taps].
        shared: keys and values, if another block's are these, or this block's are another's.
        layer_input: what the block reads of its tokens' own embeddings, [N, W].
        routed: a mixture whose experts are computed elsewhere.
    """

    norms: dict[str, Tensor]
    linears: dict[str, Linear]
    layer: int = 0
    mlp: OtherMlp | None = None
    pairs: Mapping[str, ExpertLora] = field(default_factory=dict)
    mixer: Mapping[str, Tensor] = field(default_factory=dict)
    shared: SharedKeys | None = None
    layer_input: Tensor | None = None
    routed: Routed | None = None


class BlockLayers:
    """The linear layers (appendix A.1), norms and residuals of a block; its mixers and its MLP
    are made of them."""

    def __init__(self, dims: ModelDims, kernels: TorchKernels) -> None:
        self.dims = dims
        self.traits = dims.traits
        self.kernels = kernels
        self.apart: RowsApart | BranchesApart | None = None
        """Of the current batch, if its sequences have several rows each."""

    def linear(
        self,
        block: Block,
        target: str,
        x: Tensor,
        into: Tensor | None = None,
        h: Tensor | None = None,
    ) -> Tensor:
        """Return [N, inputs] -> [N, outputs]; with `into` the result is added there.

        Args:
            h: x A^T, if it is known.
        """
        layer = block.linears[target]
        y = self.kernels.frozen_linear(x, layer.matrix, layer.bias, into)
        if layer.b is None:
            return y
        if h is None:
            h = layer.h(x)
        return self.kernels.add_product(y, h, cast(layer.b, x.dtype), layer.scale)

    def inner(self, block: Block, targets: Sequence[str], x: Tensor) -> list[Tensor | None]:
        """Return h = x A^T of layers that have one input, by one product if that is quicker: x is
        read once. None: the layer has no adapter, or computes it by itself."""
        if not self.kernels.fused:
            return [None] * len(targets)
        return self._inner_at_once([block.linears[target] for target in targets], x)[1]

    @staticmethod
    def _inner_at_once(
        layers: Sequence[Linear], x: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return A of all layers, one below the other in new memory, and each layer's h."""
        adapted = [cast(layer.a, x.dtype) for layer in layers if layer.a is not None]
        if not adapted:
            return None, [None] * len(layers)
        a = torch.cat(adapted)
        parts = iter(functional.linear(x, a).split([len(one) for one in adapted], -1))
        return a, [None if layer.a is None else next(parts) for layer in layers]

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
        self, block: Block, target: str, x: Tensor, g: Tensor, gh: Tensor | None = None
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """Return gradients of A and B, float32, and that of h; None if the layer has no adapter.

        Args:
            gh: the gradient of h, if it is known.
        """
        layer = block.linears[target]
        if layer.a is None or layer.b is None:
            return None, None
        if gh is None:
            gh = self.lower(layer, g)
        ga = cast(torch.mm(gh.t(), x), torch.float32)  # Eq. 10: gh^T x
        return (ga, self.outer(layer, layer.h(x), g)), gh

    def lower(self, layer: Linear, g: Tensor) -> Tensor:
        """Return Eq. 11, scale g B^T: the gradient of h of a layer with an adapter."""
        assert layer.b is not None  # noqa: S101 - the layer has an adapter
        return functional.linear(g, cast(layer.b, g.dtype)) * layer.scale

    @staticmethod
    def outer(layer: Linear, h: Tensor, g: Tensor) -> Tensor:
        """Return Eq. 12, scale h^T g: the gradient of B, float32; scaled in float32, so that a
        half-precision sum of many tokens cannot underflow again."""
        return cast(torch.mm(h.t(), g), torch.float32) * layer.scale

    def input_backward(
        self, block: Block, target: str, g: Tensor, gh: Tensor | None, into: Tensor | None = None
    ) -> Tensor:
        """Compute g W + gh A, added to `into` if given."""
        layer = block.linears[target]
        into = self.kernels.frozen_backward(g, layer.matrix, into)
        if gh is None or layer.a is None:
            return into
        return self.kernels.add_product(into, gh, cast(layer.a, g.dtype))

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

    def norm(self, block: Block, x: Tensor) -> Tensor:
        """Return [N, D] -> [N, D]."""
        return self.normed(block, "before_attention", x)

    def norm_backward(self, block: Block, x: Tensor, gn: Tensor, g: Tensor) -> Tensor:
        """Compute g + the gradient of x from that of its norm; in g's memory."""
        return self.normed_backward(block, "before_attention", x, gn, g)

    def inputs_backward(
        self,
        block: Block,
        n: Tensor,
        g: Mapping[str, Tensor],
        on_gradient: OnGradient,
        last: bool,
    ) -> Tensor | None:
        """Return the gradient of n from those of the outputs of linear layers, by part; None if
        `last` says that nothing below is trained."""
        if self.kernels.fused:
            return self._inputs_backward_at_once(block, n, g, on_gradient, last)
        gn: Tensor | None = None
        for part, gradient in g.items():
            if not last:
                gn = self.linear_backward(block, part, n, gradient, on_gradient, gn)
            elif (gradients := self.lora_backward(block, part, n, gradient)[0]) is not None:
                on_gradient(part, *gradients)
        return gn

    def _inputs_backward_at_once(
        self,
        block: Block,
        n: Tensor,
        g: Mapping[str, Tensor],
        on_gradient: OnGradient,
        last: bool,
    ) -> Tensor | None:
        """See `inputs_backward`: the low-rank products of all layers are one each, so that n and
        its gradient are read once."""
        layers = {part: block.linears[part] for part in g}
        gn: Tensor | None = None
        if not last:
            for part, gradient in g.items():
                gn = self.kernels.frozen_backward(gradient, layers[part].matrix, gn)
        a, inner = self._inner_at_once(list(layers.values()), n)
        if a is None:
            return gn
        inners = {part: h for part, h in zip(layers, inner, strict=True) if h is not None}
        gh = torch.cat([self.lower(layers[part], g[part]) for part in inners], -1)
        ga = cast(torch.mm(gh.t(), n), torch.float32)
        if gn is not None:  # before the callbacks, which may change A
            gn = self.kernels.add_product(gn, gh, a)
        of_a = ga.split([h.shape[1] for h in inners.values()])
        for (part, h), one in zip(inners.items(), of_a, strict=True):
            on_gradient(part, one, self.outer(layers[part], h, g[part]))
        return gn
