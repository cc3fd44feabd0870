"""Products of integers: 8-bit weights with activations and gradients that are rounded to 8 bits as
they come.

XNNPACK multiplies so if the weights are constants, which it packs when a method is loaded. So a
block's functions hold their integers, W for x W^T and W^T for g W, and each layer has a program of
its own. The scales of W's rows stay outside: a product is that of the integers, its output scaled
for x W^T, and g scaled before it is rounded for g W. So both products have the same rounded W; W^T
rounded on its own would cost more of the gradient than all of this (cosine 0.946).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.frozen import frozen_port
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.runtime_ops.quantized import quantize_q8_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ondevice.core.manifest import TensorPort
    from ondevice.methods.mesp.torch.kernels import Matrix

LEAST = -128
LARGEST = 127
"""Of rounded activations; weights are in -127..127."""


@dataclass(frozen=True)
class IntegerMatrix:
    """int8 [outputs, inputs] and its transpose, each with scales 1 and zero points 0 for its rows,
    and the scales."""

    levels: tuple[Tensor, Tensor, Tensor]
    transposed: tuple[Tensor, Tensor, Tensor]
    scales: Tensor

    def dense(self) -> Tensor:
        """float32 [outputs, inputs]."""
        return self.levels[0].to(torch.float32) * self.scales[:, None]


class Integers:
    """See `frozen.Form`: integers are constants of the functions, the float32 scale of each row is
    an input."""

    def ports(self, name: str, shape: tuple[int, int]) -> tuple[TensorPort, ...]:
        return (frozen_port(f"{name}_scale", shape[:1]),)

    def constants(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
        return {name: shape, f"{name}_transposed": (shape[1], shape[0])}

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        levels, scales = quantize_q8_rows(weight)
        return {
            name: levels,
            f"{name}_transposed": levels.t().contiguous(),
            f"{name}_scale": scales,
        }

    def matrix(self, name: str, given: Mapping[str, Tensor]) -> Matrix:
        both = (given[key] for key in (name, f"{name}_transposed"))
        levels, transposed = ((integers, *_units(given, len(integers))) for integers in both)
        return IntegerMatrix(levels, transposed, given[f"{name}_scale"])


def unit_scales(rows: int) -> dict[str, Tensor]:
    """Scales 1 and zero points 0 for rows of integers, which XNNPACK wants as constants of the
    function."""
    return {
        f"unit scales {rows}": torch.ones(rows),
        f"zero points {rows}": torch.zeros(rows, dtype=torch.int64),
    }


def _units(given: Mapping[str, Tensor], rows: int) -> tuple[Tensor, Tensor]:
    scales, zeros = (given.get(name, value) for name, value in unit_scales(rows).items())
    return scales, zeros


class IntegerKernels(GraphKernels):
    """A graph's operations with products of integers for frozen matrices; LoRA's stay float32."""

    name = "integer"

    def frozen_linear(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, into: Tensor | None
    ) -> Tensor:
        assert isinstance(matrix, IntegerMatrix)  # noqa: S101 - the form's own
        y = _product(x, *matrix.levels) * matrix.scales
        if bias is not None:
            y = y + bias
        return self.add(into, y)

    def frozen_backward(self, g: Tensor, matrix: Matrix, into: Tensor | None) -> Tensor:
        assert isinstance(matrix, IntegerMatrix)  # noqa: S101 - the form's own
        return self.add(into, _product(g * matrix.scales, *matrix.transposed))


def _product(x: Tensor, levels: Tensor, units: Tensor, zeros: Tensor) -> Tensor:
    """x levels^T with each row of x in 8 bits, as XNNPACK's partitioner knows it."""
    import torch.ao.quantization.fx._decomposed

    ops = torch.ops.quantized_decomposed
    scales, middles = ops.choose_qparams_per_token_asymmetric.default(x, torch.int8)
    rounded = ops.quantize_per_token.default(x, scales, middles, LEAST, LARGEST, torch.int8)
    near = ops.dequantize_per_token.default(
        rounded, scales, middles, LEAST, LARGEST, torch.int8, torch.float32
    )
    weight = ops.dequantize_per_channel.default(levels, units, zeros, 0, -127, 127, torch.int8)
    return functional.linear(near, weight)
