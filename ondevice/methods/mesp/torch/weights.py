"""Frozen weights in memory: the model's own tensors, or its matrices in NF4; `streamed` has those in files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ondevice.core.errors import ConfigError
from ondevice.models.families.moe import MoeFamily
from ondevice.nn.cross_entropy import wide
from ondevice.nn.packed import Nf4Matrix, PackedLinear

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.torch.kernels import Matrix, Position
    from ondevice.methods.mesp.torch.stages import OtherMlp
    from ondevice.models import Family, LoadedModel


@dataclass(frozen=True)
class Frozen:
    """One block's weights: the factors of its norms by place, and matrix and bias of each linear
    layer; `mlp` is an MLP that has other ones."""

    norms: dict[str, Tensor]
    linears: dict[str, tuple[Matrix, Tensor | None]]
    mlp: OtherMlp | None = None


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

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        """Return block `i`, until the context ends; `then` is the block that will be asked for
        next."""
        ...

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Return rows of the output head."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Dense:
    """A matrix as it is."""

    weight: Tensor

    def dense(self) -> Tensor:
        return self.weight


class Resident:
    """A loaded model's own tensors. With `bits` its matrices are quantised and its own are let go.

    Raises:
        ConfigError: 4 bits without a GPU.
        MissingPackageError: bitsandbytes is not installed.
    """

    def __init__(self, loaded: LoadedModel, device: torch.device, bits: int | None = None) -> None:
        family: Family = loaded.family
        if bits and device.type != "cuda":
            raise ConfigError(
                "method.bits: 4 needs a GPU in torch",
                expected="--backend mlx, or model.device: cuda",
                received=str(device),
                hint="weight_placement: streamed needs less memory still",
            )
        self.dims = loaded.dims
        self.device = device
        self.vocab = loaded.dims.vocab
        self.blocks = [
            self._frozen_layer(family, i, device, bits) for i in range(loaded.dims.layers)
        ]
        if family.head_weight.device != device:
            model: Any = loaded.model
            model.to(device)
        self.family = family
        self.table = family.embedding.weight
        self.dtype = self.table.dtype
        self.norm = factor(self.dims, family.model.model.norm.weight.detach())

    def _frozen_layer(
        self, family: Family, i: int, device: torch.device, bits: int | None
    ) -> Frozen:
        layer: Any = family.layer(i)
        if not bits:
            layer.to(device)
        linears: dict[str, tuple[Matrix, Tensor | None]] = {}
        for target in family.linear_targets:
            linear: Any = family.linear(i, target)
            bias = None if linear.bias is None else linear.bias.detach().to(device)
            if isinstance(linear, PackedLinear):
                matrix: Matrix = linear
            elif bits:
                matrix = Nf4Matrix.pack(linear.weight.detach().to(device), double=False)
                linear.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            else:
                matrix = Dense(linear.weight.detach())
            linears[target] = (matrix, bias)
        weights = {
            place: layer.get_submodule(name).weight for place, name in self.dims.traits.norms
        }
        norms = {place: factor(self.dims, w.detach().to(device)) for place, w in weights.items()}
        mlp = None
        if isinstance(family, MoeFamily):
            layer.mlp.to(device)
            mlp = partial(family.mlp_of, i)
        return Frozen(norms, linears, mlp)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return scaled(self.dims, self.table.detach()[ids_BT.reshape(-1)])

    def positions(self, length_tokens: int) -> Positions:
        return by_layer(self.family, length_tokens, self.device, self.dtype)

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        return nullcontext(self.blocks[i])

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        return self.family.head_weight.detach()[low:high]

    def close(self) -> None:
        """Leave the model to its owner."""


Positions = Callable[[int], "Position"]


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
    return 1.0 + wide(weight) if dims.traits.norm_offset else weight


def scaled(dims: ModelDims, rows: Tensor) -> Tensor:
    """Return rows of the embedding, in new memory, times the model's factor."""
    scale = dims.traits.embedding_scale
    return rows if scale == 1.0 else rows.mul_(rows.new_tensor(scale))


def halves(position: tuple[Tensor, Tensor]) -> Position:
    """Return transformers' cos and sin [1, T, head_dim] repeat their first half."""
    cos, sin = (tensor[:, :, None, : tensor.shape[-1] // 2].contiguous() for tensor in position)
    return cos, sin
