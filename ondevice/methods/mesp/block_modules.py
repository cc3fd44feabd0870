"""The modules that functions of one block share: the embedding, and a block for rows of one
length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ondevice.methods.mesp.block_functions import EMBEDDING, BlockFunctions
from ondevice.methods.mesp.integer import IntegerKernels
from ondevice.methods.mesp.torch.block import Block, SharedKeys
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.methods.mesp.torch.weights import halves
from ondevice.nn.cross_entropy import times
from ondevice.nn.layer_inputs import combine


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


class LayerInput(nn.Module):
    """int64 [rows, tokens] and the first block's input [N, D] -> what a layer reads of its tokens,
    [N, W]."""

    def __init__(self, functions: BlockFunctions) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, ids_BT: Tensor, x: Tensor, *parts: Tensor) -> Tensor:
        functions = self.functions
        table, projection, norm = functions.loaded.family.input_tensors
        given = dict(zip((one.name for one in functions.layer_input), parts, strict=True))
        rows = functions.table_form.rows(f"{table}.{{layer}}", given, ids_BT.reshape(-1))
        matrix = functions.projection_form.matrix(f"{projection}.{{layer}}", given)
        return combine(rows, x, matrix.dense(), given[norm], functions.dims.norm_eps)


class OneBlock(nn.Module):
    """A function of one block for rows of one length; `layer` is one of the kind."""

    def __init__(
        self, functions: BlockFunctions, rows: int, length_tokens: int, layer: int = 0
    ) -> None:
        super().__init__()
        self.functions = functions
        self.rows = rows
        self.length_tokens = length_tokens
        self.layer = layer
        family = functions.loaded.family
        tables = family.positions(length_tokens, "cpu", torch.float32)
        cos, sin = halves(family.layer_position(layer, tables))
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("mask", seen(length_tokens, functions.dims.traits.window(layer)))
        # Parameters, not buffers: an export leaves out those that the function does not use.
        constants = functions.constants(layer).items()
        self.names = {name: f"constant_{number}" for number, (name, _) in enumerate(constants)}
        for name, value in constants:
            self.register_parameter(self.names[name], nn.Parameter(value, requires_grad=False))

    @property
    def blocks(self) -> Blocks:
        kernels = IntegerKernels if self.functions.holds_matrices else GraphKernels
        # A type checker takes a buffer for a tensor or a module; this one is a tensor.
        return Blocks(Stages(self.functions.dims, kernels(self.mask)), None)  # type: ignore[arg-type]

    def block(self, adapter: Tensor, frozen: tuple[Tensor, ...]) -> Block:
        constants: dict[str, Tensor] = {
            name: self.get_parameter(place) for name, place in self.names.items()
        }
        return self.functions.block(adapter, frozen, constants, self.layer)

    def read(
        self, tensors: tuple[Tensor, ...], gradients: bool
    ) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Take what the block reads in addition to its input from the front of `tensors`, as fields
        of `Block`; with `gradients` also the sums of those of keys and values."""
        traits = self.functions.dims.traits
        rest = [*tensors]
        fields: dict[str, Any] = {}
        if traits.layer_input:
            fields["layer_input"] = rest.pop(0)
        borrows = not traits.has_keys(self.layer)
        if borrows or traits.lends_keys(self.layer):
            shared = fields["shared"] = SharedKeys()
            if borrows:
                shared.k = rest.pop(0)
                shared.v = rest.pop(0)
            if gradients:
                shared.gradients = (rest.pop(0), rest.pop(0))
        return fields, tuple(rest)


class BlockForward(OneBlock):
    """[N, D] -> [N, D], and keys and values that later blocks read; or, of a mixture, what its
    experts are to be given."""

    def forward(self, x: Tensor, *tensors: Tensor) -> Any:
        fields, (adapter, *frozen) = self.read(tensors, False)
        block = replace(self.block(adapter, tuple(frozen)), **fields)
        position = (self.cos, self.sin)
        y = self.blocks.forward(block, x, position, self.rows)  # type: ignore[arg-type]
        lent: tuple[Tensor, ...] = ()
        if self.functions.dims.traits.lends_keys(self.layer):
            assert block.shared is not None  # noqa: S101 - `read` made it
            lent = block.shared.taken()
        if block.routed is not None:
            lent += block.routed.taken()
        return (y, *lent) if lent else y


class BlockJoin(OneBlock):
    """The middle, the normed MLP and the sum of the experts, [N, D] each -> the block's output."""

    def forward(self, *tensors: Tensor) -> Tensor:
        block, parts, p = self.parts(tensors)
        return self.blocks.stages.joined_elsewhere(block, *parts, p)

    def parts(
        self, tensors: tuple[Tensor, ...]
    ) -> tuple[Block, tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Return the block, the parts to join, and the layer's input if it has one."""
        m, dense, experts, *own, adapter = tensors[: -len(self.functions.frozen(self.layer))]
        block = self.block(adapter, tensors[-len(self.functions.frozen(self.layer)) :])
        return block, (m, dense, experts), own[0] if own else None


class BlockJoinBackward(BlockJoin):
    """The gradient of the block's output, and what `BlockJoin` takes -> the gradient of the sum of
    the experts, [N, D]."""

    def forward(self, *tensors: Tensor) -> Tensor:
        gradient, *rest = tensors
        block, parts, p = self.parts(tuple(rest))
        # The stages write into the gradient, and what comes in is the caller's.
        return self.blocks.stages.joined_elsewhere_backward(block, parts, p, gradient.clone())


class BlockBackward(OneBlock):
    """The block's input and its output's gradient -> the input's gradient, and the layer's range of
    the adapter and of the moments after the update; and the sums of the gradients of another
    block's keys and values."""

    def forward(self, x: Tensor, g: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        functions = self.functions
        gradients = {}
        count = 1 + len(functions.moments)
        fields, (*rest,) = self.read(tensors, True)
        through_experts = total = None
        if functions.routes(self.layer):
            through_experts = (rest.pop(0), rest.pop(0))
            total = rest.pop(0) if functions.beside else None
        step, rate, *rest = rest
        vectors = tuple(rest[:count])
        block = replace(self.block(vectors[0], tuple(rest[count:])), **fields)
        if block.routed is not None:
            block.routed.gradients = through_experts
            block.routed.total = total
        position = (self.cos, self.sin)

        def keep(target: str, ga: Tensor, gb: Tensor) -> None:
            gradients[target] = (ga, gb)

        # The stages write into g, and what comes in is the caller's.
        g = self.blocks.backward(block, x, g.clone(), position, self.rows, keep)  # type: ignore[arg-type]
        updated = self.updated(functions.gradient(gradients, self.layer), vectors, step, rate)
        if functions.dims.traits.has_keys(self.layer):
            return g, *updated
        assert block.shared is not None  # noqa: S101 - `read` made it
        assert block.shared.gradients is not None  # noqa: S101 - the backward pass added to them
        return g, *updated, *block.shared.gradients

    def updated(
        self, gradient: Tensor, vectors: tuple[Tensor, ...], step: Tensor, rate: Tensor
    ) -> tuple[Tensor, ...]:
        return self.functions.updated(gradient, vectors, step, rate)
