"""Functions of one expert of a mixture, which a host calls with the rows of tokens that chose it
and with that expert's weights: only experts that a token needs are read.

Rows are filled up to one of `expert_rows`; what fills up has weight 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ondevice.core.manifest import EXPERT, port
from ondevice.core.program import ProgramModule
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels

if TYPE_CHECKING:
    from ondevice.core.manifest import TensorPort
    from ondevice.methods.mesp.block_functions import BlockFunctions
    from ondevice.methods.mesp.torch.kernels import Matrix

ROWS = (1, 4, 16, 64, 256)
"""Rows that an expert's functions take. An expert with more is called again."""


class _Expert(nn.Module):
    """An expert: gate and up, one below the other [2 F, D], and down [D, F]."""

    def __init__(self, functions: BlockFunctions) -> None:
        super().__init__()
        self.functions = functions
        self.kernels = GraphKernels(torch.zeros(0))

    def matrices(self, parts: tuple[Tensor, ...]) -> tuple[Matrix, Matrix]:
        functions = self.functions
        given = dict(zip((one.name for one in functions.expert), parts, strict=True))
        gate_up, down = (
            functions.expert_form.matrix(name, given) for name in functions.expert_names
        )
        return gate_up, down

    def gate_up(self, x: Tensor, matrix: Matrix) -> tuple[Tensor, Tensor]:
        """Return [R, F] each."""
        gate, up = self.kernels.frozen_linear(x, matrix, None, None).chunk(2, -1)
        return gate, up


class ExpertForward(_Expert):
    """Normed tokens [R, D] and the expert's weight of each [R] -> [R, D]."""

    def forward(self, x: Tensor, weights: Tensor, *parts: Tensor) -> Tensor:
        gate_up, down = self.matrices(parts)
        act = self.kernels.glu(self.functions.dims.traits.activation, *self.gate_up(x, gate_up))
        return self.kernels.frozen_linear(act, down, None, None) * weights[:, None]


class ExpertBackward(_Expert):
    """Normed tokens [R, D], the gradient of the block's output [R, D] and the expert's weight of
    each [R] -> the gradients of the tokens [R, D] and of the weights [R]."""

    def forward(
        self, x: Tensor, g: Tensor, weights: Tensor, *parts: Tensor
    ) -> tuple[Tensor, Tensor]:
        gate_up, down = self.matrices(parts)
        activation = self.functions.dims.traits.activation
        gate, up = self.gate_up(x, gate_up)
        gact = self.kernels.frozen_backward(g, down, None)
        # <g, down act> is <g down, act>: the expert's output itself is not computed.
        gweights = (gact * self.kernels.glu(activation, gate, up)).sum(-1)
        halves = self.kernels.glu_backward(activation, gate, up, gact * weights[:, None])
        return self.kernels.frozen_backward(torch.cat(halves, -1), gate_up, None), gweights


def expert_rows(most: int) -> tuple[int, ...]:
    """Return the numbers of rows that functions of an expert take, for passes of at most `most`
    tokens."""
    return (*(rows for rows in ROWS[:-1] if rows < most), min(most, ROWS[-1]))


def expert_modules(functions: BlockFunctions, most_tokens: int) -> list[ProgramModule]:
    """Return `expert_forward_<rows>` and `expert_backward_<rows>`; none if the model has no
    experts."""
    if not functions.expert:
        return []
    modules = []
    for rows in expert_rows(most_tokens):
        hidden = port("hidden", "hidden", (rows, functions.dims.hidden))
        gradient = port("gradient", "gradient", hidden.shape)
        weights = port("routing", "routing", (rows,))
        gweights = port("routing", "routing_gradient", (rows,))
        modules += [
            ProgramModule(
                f"{EXPERT}forward_{rows}",
                ExpertForward(functions),
                (hidden, weights, *functions.expert),
                (hidden,),
            ),
            ProgramModule(
                f"{EXPERT}backward_{rows}",
                ExpertBackward(functions),
                (hidden, gradient, weights, *functions.expert),
                (gradient, gweights),
            ),
        ]
    return modules


def routing_ports(functions: BlockFunctions, tokens: int, layer: int) -> tuple[TensorPort, ...]:
    """Describe what a block's forward pass gives its experts: the normed tokens, and each expert's
    weight of each; () if it has none. Next to an MLP also what that gives, normed."""
    dims = functions.dims
    if not functions.routes(layer):
        return ()
    normed = port("normed", "normed", (tokens, dims.hidden))
    ports = (normed, port("routing", "routing", (tokens, dims.experts)))
    if functions.beside:
        return *ports, port("dense", "dense", normed.shape)
    return ports


def routing_gradients(functions: BlockFunctions, tokens: int, layer: int) -> tuple[TensorPort, ...]:
    """Describe what the backward pass takes of them: the gradients of `routing_ports`. Next to an
    MLP also the sum of the experts."""
    taken = routing_ports(functions, tokens, layer)
    ports = tuple(port(one.name, f"{one.role}_gradient", one.shape) for one in taken[:2])
    return (*ports, *(port("experts_sum", "experts_sum", one.shape) for one in taken[2:]))


def join_ports(functions: BlockFunctions, tokens: int) -> list[TensorPort]:
    """Describe what joins a block's MLP and its experts: its middle, its normed MLP and the sum of
    its experts, and what its layer reads of the tokens."""
    dims = functions.dims
    ports = [port(one, one, (tokens, dims.hidden)) for one in ("hidden", "dense", "experts_sum")]
    width = dims.traits.layer_input
    return ports + ([port("layer_input", "layer_input", (tokens, width))] if width else [])
