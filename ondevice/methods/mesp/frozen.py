"""How a block program keeps its frozen matrices: float32, 8 bits with a scale a row, or 4 bits with
a scale and a minimum for each 32 inputs, of 16 or 8 bits. (8 bits whose products are of integers, too, are in
`integer`.)

A form names the tensors of a matrix in the weights file, packs them, and makes a function's inputs
into the matrix that the stages multiply with. Packed matrices are made dense when a product needs
them, by one kernel that every ExecuTorch runtime with quantised kernels has, and the dense copy
lives as long as the product. Of all ways to do so in such a runtime these were the fastest:
`dequantize_per_channel` takes 0.8 ns an element, a cast to float32 twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.manifest import TensorPort, port
from ondevice.methods.mesp.torch.kernels import Dense
from ondevice.nn.calibrated import Grid, in_integers, nearest_grid, of_integers
from ondevice.nn.quantized import GROUP
from ondevice.runtime_ops.quantized import quantize_q8_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ondevice.methods.mesp.torch.kernels import Matrix


class Form(Protocol):
    """A way to keep a matrix [outputs, inputs] of a weights file."""

    def ports(self, name: str, shape: tuple[int, int]) -> tuple[TensorPort, ...]:
        """Inputs of a function that takes the matrix; their names are those of the file."""
        ...

    def constants(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """Return names and shapes of int8 tensors in the functions, for a backend that multiplies
        with constants."""
        ...

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Pack the tensors of ports and constants, from float32 [outputs, inputs]."""
        ...

    def matrix(self, name: str, given: Mapping[str, Tensor]) -> Matrix:
        """Build the matrix from the tensors of its ports and constants, by name."""
        ...


class TableForm(Form, Protocol):
    """A form that a table's rows can be looked up in, too."""

    def rows(self, name: str, given: Mapping[str, Tensor], ids_N: Tensor) -> Tensor:
        """Return rows of the matrix, float32 [N, inputs]."""
        ...


class _Inputs:
    """A form without constants."""

    def constants(self, name: str, shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
        return {}


class Float32(_Inputs):
    """The matrix as it is."""

    def ports(self, name: str, shape: tuple[int, int]) -> tuple[TensorPort, ...]:
        return (frozen_port(name, shape),)

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        return {name: weight.contiguous()}

    def matrix(self, name: str, given: Mapping[str, Tensor]) -> Matrix:
        return Dense(given[name])

    def rows(self, name: str, given: Mapping[str, Tensor], ids_N: Tensor) -> Tensor:
        return functional.embedding(ids_N, given[name])


class Int8(_Inputs):
    """int8 [outputs, inputs] in -127..127 and a float32 scale for each row."""

    def ports(self, name: str, shape: tuple[int, int]) -> tuple[TensorPort, ...]:
        return frozen_port(name, shape, "int8"), frozen_port(f"{name}_scale", shape[:1])

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        levels, scales = quantize_q8_rows(weight)
        return {name: levels, f"{name}_scale": scales}

    def matrix(self, name: str, given: Mapping[str, Tensor]) -> Matrix:
        return Int8Matrix(given[name], given[f"{name}_scale"])

    def rows(self, name: str, given: Mapping[str, Tensor], ids_N: Tensor) -> Tensor:
        scales = functional.embedding(ids_N, given[f"{name}_scale"][:, None])
        return functional.embedding(ids_N, given[name]).to(torch.float32) * scales


@dataclass(frozen=True)
class Q4(_Inputs):
    """Levels 0..15, two a byte with the first in the high half, uint8 [outputs, inputs / 2];
    float16 scale and minimum for each `GROUP` inputs, so that a model published as Q4_1 lies on its
    own grid.

    Attributes:
        grid: that the matrix lies on already; None: the nearest levels between the ends of each
            group.
    """

    grid: Grid | None = None

    def ports(self, name: str, shape: tuple[int, int]) -> tuple[TensorPort, ...]:
        outputs, inputs = shape
        groups = (outputs, inputs // GROUP)
        return (
            frozen_port(name, (outputs, inputs // 2), "uint8"),
            frozen_port(f"{name}_scale", groups, "float16"),
            frozen_port(f"{name}_min", groups, "float16"),
        )

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        grid = self.grid or nearest_grid(weight)
        # Against the rounded scale and minimum, so that the levels make up for their rounding.
        high, low = grid.levels(weight).unflatten(1, (-1, 2)).unbind(-1)
        return {name: high << 4 | low, f"{name}_scale": grid.scales, f"{name}_min": grid.mins}

    @staticmethod
    def unpack(name: str, tensors: Mapping[str, Tensor]) -> tuple[Grid, Tensor]:
        """Return the grid and the dense matrix, float32 [outputs, inputs], of what `pack` gave, here
        or in `Q4Double`."""
        grid = Grid(*_scales_and_mins(name, tensors), tensors.get(f"{name}_top"))
        packed = tensors[name]
        return grid, grid.dense(torch.stack([packed >> 4, packed & 15], -1).flatten(1))

    def matrix(self, name: str, given: Mapping[str, Tensor]) -> Matrix:
        return Q4Matrix(given[name], given[f"{name}_scale"], given[f"{name}_min"])


@dataclass(frozen=True)
class Q4Double(Q4):
    """`Q4` whose scales and minima are integers of 8 bits times a unit of their row: uint8 and int8
    [outputs, inputs / `GROUP`], and float16 [outputs, 2] that 255 and 127 stand for.

    A function makes them float16 before its first product, so that its kernels are `Q4`'s.
    """

    def ports(self, name: str, shape: tuple[int, int]) -> tuple[TensorPort, ...]:
        levels, scales, mins = super().ports(name, shape)
        return (
            levels,
            frozen_port(scales.name, scales.shape, "uint8"),
            frozen_port(mins.name, mins.shape, "int8"),
            frozen_port(f"{name}_top", (shape[0], 2), "float16"),
        )

    def pack(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        grid = self.grid or nearest_grid(weight, scale_bits=8)
        assert grid.tops is not None  # noqa: S101 - of 8 bits
        scales, mins = in_integers(grid.scales, grid.mins, grid.tops)
        packed = Q4(grid).pack(name, weight)[name]
        return {
            name: packed,
            f"{name}_scale": scales,
            f"{name}_min": mins,
            f"{name}_top": grid.tops,
        }

    def matrix(self, name: str, given: Mapping[str, Tensor]) -> Matrix:
        return Q4Matrix(given[name], *_scales_and_mins(name, given))


def _scales_and_mins(name: str, given: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    scales, mins = given[f"{name}_scale"], given[f"{name}_min"]
    if f"{name}_top" not in given:
        return scales, mins
    return of_integers(scales, mins, given[f"{name}_top"])


@dataclass(frozen=True)
class Int8Matrix:
    """See `Int8`."""

    levels: Tensor
    scales: Tensor

    def dense(self) -> Tensor:
        """float32 [outputs, inputs], new memory."""
        import torch.ao.quantization.fx._decomposed

        op = torch.ops.quantized_decomposed.dequantize_per_channel.default
        return op(self.levels, self.scales, None, 0, -127, 127, torch.int8)


@dataclass(frozen=True)
class Q4Matrix:
    """See `Q4`."""

    packed: Tensor
    scales: Tensor
    mins: Tensor

    def dense(self) -> Tensor:
        """float32 [outputs, inputs], new memory.

        The runtime's 4-bit kernel is an embedding's, level - zero point times scale with levels
        from -8: every row is looked up.
        """
        import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401 - registers the op

        scales = self.scales.to(torch.float32)
        zero_points = -8.0 - self.mins.to(torch.float32) / scales
        every = torch.arange(self.packed.shape[0])
        return torch.ops.quantized_decomposed.embedding_4bit.default(
            self.packed, scales, zero_points, -8, 7, every
        )


def frozen_port(name: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorPort:
    """Describe an input that a host takes from the weights file."""
    return port(name, "frozen", shape, dtype)


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors as numpy has them, contiguous."""
    return {name: np.ascontiguousarray(value.detach().numpy()) for name, value in tensors.items()}
