"""Frozen weights of a model as blocks take them, and its rotary embedding by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ondevice.core.dims import MoeDims
from ondevice.methods.mesp.check import check_resident
from ondevice.methods.mesp.torch.block import OtherMlp
from ondevice.methods.mesp.torch.kernels import Dense, Matrix, Position
from ondevice.nn.cross_entropy import wide
from ondevice.nn.layer_inputs import LayerInputs
from ondevice.nn.packed import Int8Matrix, Nf4Matrix, PackedLinear

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.models import Family, LoadedModel


@dataclass(frozen=True)
class Frozen:
    """One block's weights: the factors of its norms by place, and matrix and bias of each linear
    layer by its part in the block; `mlp` is an MLP that has other ones, `mixer` the other tensors of
    a mixer (`Block.mixer`)."""

    norms: dict[str, Tensor]
    linears: dict[str, tuple[Matrix, Tensor | None]]
    mlp: OtherMlp | None = None
    mixer: Mapping[str, Tensor] = field(default_factory=dict)


class Weights(Protocol):
    """All frozen weights of a model, wherever they are."""

    dims: ModelDims
    dtype: torch.dtype
    device: torch.device
    norm: Tensor
    """Factor of the norm before the head, [D]."""
    vocab: int

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Return int64 [B, T] -> [B * T, D], new memory."""
        ...

    def positions(self, length_tokens: int) -> Positions:
        """Return a function of a block's number to its cos and sin, [1, T, 1, head_dim / 2]
        each."""
        ...

    def layer_inputs(self, ids_BT: Tensor, x_ND: Tensor) -> OfLayer:
        """Return a function of a block's number to its `Block.layer_input`; `x_ND` is what `embed`
        gave."""
        ...

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        """Return block `i`, until the context ends; `then` is the block that will be asked for
        next."""
        ...

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return rows of the output head."""
        ...

    def close(self) -> None: ...


class Resident:
    """A loaded model's own tensors. With `bits` quantised matrices replace its own.

    Raises:
        ConfigError: 4 bits without a GPU.
        MissingPackageError: bitsandbytes is not installed.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device, bits: int | None = None) -> None:
        family: Family = loaded.family
        check_resident(str(device), bits)
        self.dims = loaded.dims
        self.device = device
        self.vocab = loaded.dims.vocab
        self.room = None
        if bits:
            self.room = room_for_matrices(self.dims, family.embedding.weight.dtype, device)
        self.blocks = [
            self._frozen_layer(family, i, device, bits) for i in range(loaded.dims.layers)
        ]
        self.room = None
        if family.head_weight.device != device:
            model: Any = loaded.model
            model.to(device)
        self.family = family
        self.table = family.embedding.weight
        self.dtype = self.table.dtype
        last: Any = family.module(family.last_norm)
        self.norm = factor(self.dims, last.weight.detach())
        self.inputs = None
        if self.dims.traits.layer_input:
            table, projection, norm = (
                family.model.get_parameter(name).detach() for name in family.input_tensors
            )
            self.inputs = LayerInputs(
                lambda ids_N, own: table[:, own][ids_N], projection, norm, self.dims.norm_eps
            )

    def _frozen_layer(
        self, family: Family, i: int, device: torch.device, bits: int | None
    ) -> Frozen:
        layer: Any = family.layer(i)
        if not bits:
            layer.to(device)
        linears: dict[str, tuple[Matrix, Tensor | None]] = {}
        for part, one in self.dims.block_linears(i).items():
            linear: Any = family.linear(i, one.target)
            bias = linear.bias
            if bias is not None:
                bias = bias.detach().to(device)
            if isinstance(linear, PackedLinear):
                matrix: Matrix = linear
            elif bits:
                matrix = packed(self._on_device(linear.weight.detach()), bits)
                family.set_linear(i, one.target, PackedLinear(matrix, bias))
            else:
                matrix = Dense(linear.weight.detach())
            linears[part] = (matrix, bias)
        traits = self.dims.traits
        weights = {place: layer.get_submodule(name).weight for place, name in traits.norms_of(i)}
        norms = {place: factor(self.dims, w.detach().to(device)) for place, w in weights.items()}
        norms |= plain_norms(self.dims, i, family.embedding.weight)
        mlp = None
        if isinstance(self.dims, MoeDims):
            layer.get_submodule(traits.path("mlp")).to(device)
            owner: Any = family
            mlp = partial(owner.experts_of if self.dims.beside else owner.mlp_of, i)
        mixer = {
            part: mixer_tensor(attrgetter(name)(layer).detach().to(device))
            for part, (name, _) in self.dims.mixer_tensors(i).items()
        }
        return Frozen(norms, linears, mlp, mixer)

    def _on_device(self, weight: Tensor) -> Tensor:
        if self.room is None or weight.device == self.room.device:
            return weight
        return self.room[: weight.numel()].view(weight.shape).copy_(weight)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return scaled(self.dims, self.table.detach()[ids_BT.reshape(-1)])

    def positions(self, length_tokens: int) -> Positions:
        return by_layer(self.family, length_tokens, self.device, self.dtype)

    def layer_inputs(self, ids_BT: Tensor, x_ND: Tensor) -> OfLayer:
        return of_layer(self.inputs, ids_BT, x_ND)

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        return nullcontext(self.blocks[i])

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        return self.family.head_weight.detach()[low:high]

    def close(self) -> None:
        """Leave the model to its owner."""


def packed(weight: Tensor, bits: int) -> Nf4Matrix | Int8Matrix:
    """Return a matrix in 4 or 8 bits."""
    if bits == 4:
        return Nf4Matrix.pack(weight, double=False)
    return Int8Matrix.pack(weight)


def room_for_matrices(dims: ModelDims, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return memory of the largest matrix: with one after the other in it, packed matrices do not
    lie between free parts."""
    layers = range(dims.layers)
    sizes = [one.inputs * one.outputs for i in layers for one in dims.block_linears(i).values()]
    return torch.empty(max(sizes), dtype=dtype, device=device)


Positions = Callable[[int], "Position"]
OfLayer = Callable[[int], Tensor | None]


def of_layer(inputs: LayerInputs | None, ids_BT: Tensor, x_ND: Tensor) -> OfLayer:
    """See `Weights.layer_inputs`; None if blocks read nothing of their own."""
    if inputs is None:
        return lambda i: None
    return inputs.of(ids_BT.reshape(-1), x_ND)


def plain_norms(dims: ModelDims, layer: int, like: Tensor) -> dict[str, Tensor]:
    """Return the factors of norms that have no weight, which are 1."""
    if not dims.traits.value_norm or not dims.traits.has_keys(layer):
        return {}
    return {"v": torch.ones(dims.head_width(layer), dtype=like.dtype, device=like.device)}


def by_layer(
    family: Family, length_tokens: int, device: torch.device, dtype: torch.dtype
) -> Positions:
    """Return a function of a block's number to its cos and sin."""
    tables = family.positions(length_tokens, device, dtype)
    made: dict[int, Position] = {}

    def of(i: int) -> Position:
        pair = family.layer_position(i, tables)
        if id(pair[0]) not in made:
            made[id(pair[0])] = halves(pair)
        return made[id(pair[0])]

    return of


def factor(dims: ModelDims, weight: Tensor) -> Tensor:
    """Return what a norm multiplies by: its weight, or 1 + w, in float32 at least."""
    if dims.traits.norm_offset:
        return 1.0 + wide(weight)
    return weight


def mixer_tensor(value: Tensor) -> Tensor:
    """Return a mixer's tensor as blocks take it: taps of a convolution without the dimension 1."""
    return value.squeeze(1) if value.ndim > 2 else value


def scaled(dims: ModelDims, rows: Tensor) -> Tensor:
    """Return rows of the embedding, in new memory, times the model's factor."""
    scale = dims.traits.embedding_scale
    if scale == 1.0:
        return rows
    # The factor is rounded as a weight would be; a copy from the host could not be in a graph.
    return rows.mul_(torch.full((), scale, dtype=rows.dtype, device=rows.device))


def halves(position: tuple[Tensor, Tensor]) -> Position:
    """Return transformers' cos and sin [1, T, head_dim] repeat their first half."""
    cos, sin = (tensor[:, :, None, : tensor.shape[-1] // 2].contiguous() for tensor in position)
    return cos, sin
