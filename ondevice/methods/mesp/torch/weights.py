"""Frozen weights that stay in memory: the model's own tensors, or its matrices in NF4."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ondevice.errors import ConfigError
from ondevice.nn.packed import Nf4Matrix, PackedLinear

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.stages import Matrix, Position
    from ondevice.models import Family, LoadedModel, ModelDims


@dataclass(frozen=True)
class Frozen:
    """One block's weights: the norms before attention and MLP, and matrix and bias of each linear layer."""

    norms: tuple[Tensor, Tensor]
    linears: dict[str, tuple[Matrix, Tensor | None]]


class Weights(Protocol):
    """All frozen weights of a model, wherever they are."""

    dims: ModelDims
    dtype: torch.dtype
    device: torch.device
    norm: Tensor
    """Weight of the norm before the head, [D]."""
    vocab: int

    def embed(self, ids_BT: Tensor) -> Tensor:
        """int64 [B, T] -> [B * T, D], new memory."""
        ...

    def positions(self, length_tokens: int) -> Position:
        """cos and sin, [T, head_dim / 2] each."""
        ...

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        """Block `i`, until the context ends; `then` is the block that will be asked for next."""
        ...

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        """Rows of the output head."""
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
                hint="weights: streamed needs less memory still",
            )
        self.dims, self.device, self.vocab = loaded.dims, device, loaded.dims.vocab
        self.blocks = [self._take(family, i, device, bits) for i in range(loaded.dims.layers)]
        if family.head_weight.device != device:
            model: Any = loaded.model
            model.to(device)
        self.family, self.table = family, family.embedding.weight
        self.dtype, self.norm = self.table.dtype, family.model.model.norm.weight

    def _take(self, family: Family, i: int, device: torch.device, bits: int | None) -> Frozen:
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
        norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        return Frozen((norms[0].detach().to(device), norms[1].detach().to(device)), linears)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return self.table.detach()[ids_BT.reshape(-1)]

    def positions(self, length_tokens: int) -> Position:
        return halves(self.family.positions(length_tokens, self.device, self.dtype))

    def block(self, i: int, then: int | None) -> AbstractContextManager[Frozen]:
        return nullcontext(self.blocks[i])

    def tile(self, low: int, high: int, then: tuple[int, int] | None = None) -> Tensor:
        return self.family.head_weight.detach()[low:high]

    def close(self) -> None:
        """The model stays its owner's."""


def halves(position: tuple[Tensor, Tensor]) -> Position:
    """transformers' cos and sin [1, T, head_dim] repeat their first half."""
    cos, sin = (part[0, :, : part.shape[-1] // 2].contiguous() for part in position)
    return cos, sin
