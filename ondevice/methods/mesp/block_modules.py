"""The modules that functions of one block share: the embedding, and a block for rows of one
length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ondevice.methods.mesp.block_functions import EMBEDDING, BlockFunctions
from ondevice.methods.mesp.integer import IntegerKernels
from ondevice.methods.mesp.torch.kernels import GraphKernels
from ondevice.methods.mesp.torch.model import halves
from ondevice.methods.mesp.torch.stages import Block, Blocks, Stages
from ondevice.nn.cross_entropy import times


def seen(length_tokens: int, window: int = 0) -> Tensor:
    """Return the additive mask [tokens, tokens]: 0 if a query sees a key, else minus infinity."""
    every = torch.ones(length_tokens, length_tokens, dtype=torch.bool)
    hidden = every.triu(1)
    if window:
        hidden |= every.tril(-window)
    return torch.zeros(length_tokens, length_tokens).masked_fill(hidden, float("-inf"))


class Embed(nn.Module):
    """int64 [rows, tokens] -> [N, D]."""

    def __init__(self, functions: BlockFunctions) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, ids_BT: Tensor, *table: Tensor) -> Tensor:
        functions = self.functions
        given = dict(zip((one.name for one in functions.table), table, strict=True))
        rows = functions.table_form.rows(EMBEDDING, given, ids_BT.reshape(-1))
        return times(rows, functions.dims.traits.embedding_scale)


class OneBlock(nn.Module):
    """A function of one block for rows of one length; `layer` is one of the kind."""

    def __init__(
        self, functions: BlockFunctions, rows: int, length_tokens: int, layer: int = 0
    ) -> None:
        super().__init__()
        self.functions = functions
        self.rows = rows
        self.layer = layer
        family = functions.loaded.family
        tables = family.positions(length_tokens, "cpu", torch.float32)
        cos, sin = halves(family.layer_position(layer, tables))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("mask", seen(length_tokens, functions.dims.traits.window(layer)))
        # Parameters, not buffers: an export leaves out those that the function does not use.
        constants = functions.constants.items()
        self.names = {name: f"constant_{number}" for number, (name, _) in enumerate(constants)}
        for name, value in constants:
            self.register_parameter(self.names[name], nn.Parameter(value, requires_grad=False))

    @property
    def blocks(self) -> Blocks:
        kernels = IntegerKernels if self.functions.markers else GraphKernels
        # A type checker takes a buffer for a tensor or a module; this one is a tensor.
        return Blocks(Stages(self.functions.dims, kernels(self.mask)), None)  # type: ignore[arg-type]

    def block(self, adapter: Tensor, frozen: tuple[Tensor, ...]) -> Block:
        constants: dict[str, Tensor] = {
            name: self.get_parameter(place) for name, place in self.names.items()
        }
        return replace(self.functions.block(adapter, frozen, constants), layer=self.layer)
