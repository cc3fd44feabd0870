"""Bytes of the frozen weights, from dimensions alone, and where a runtime keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.errors import ConfigError

if TYPE_CHECKING:
    from ondevice.exporters.base import ExportConfig
    from ondevice.models import ModelDims

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Q4_BITS = 5.0
"""4 bits a weight, and a float16 scale and minimum for each 32."""
W4_BITS = 4.5
"""8da4w: 4 bits a weight and a 16-bit scale for each 32."""
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""4 bits a weight, an 8-bit scale for each 64, and a float32 scale for each 256 of these."""
PACKED = ("nf4", "int8")
"""Weights that PyTorch makes dense a matrix at a time; the other tensors keep the model's precision."""


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of each kind of weight.

    Attributes:
        linears: the matrices of all blocks.
        embedding: the token embedding, which is the head too where they are tied and `head` is 0.
        head: an output head of its own.
        vectors: norms, biases and learned positions.
    """

    linears: int
    embedding: int
    head: int
    vectors: int

    @property
    def total(self) -> int:
        return self.linears + self.embedding + self.head + self.vectors


def weight_bytes(dims: ModelDims, dtype: str = "float32", quantize: str = "none") -> WeightBytes:
    """Weights of a model in `dtype`, or quantised as `ExportConfig.quantize` says.

    Raises:
        ConfigError: for a dtype or quantisation that is not known.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError("unknown dtype", expected=", ".join(DTYPE_BYTES), received=dtype)
    linears, table, item = dims.matrices, dims.vocab * dims.hidden, DTYPE_BYTES[dtype]
    vectors = dims.parameters - linears - table * (1 if dims.tied else 2)
    if quantize == "none":
        return WeightBytes(linears * item, table * item, 0 if dims.tied else table * item, vectors * item)
    if quantize in PACKED:
        outputs = sum(outputs for _, outputs in dims.linear_shapes.values())
        packed = int(linears * NF4_BITS / 8) if quantize == "nf4" else linears + dims.layers * outputs * 8
        return WeightBytes(packed, table * item, 0 if dims.tied else table * item, vectors * item)
    rows = table + dims.vocab * 4
    if quantize == "q4":
        return WeightBytes(int(linears * Q4_BITS / 8), rows, 0 if dims.tied else rows, vectors * 4)
    if quantize == "8da4w":
        return WeightBytes(int(linears * W4_BITS / 8), rows, int(table * W4_BITS / 8), vectors * 4)
    if quantize == "w8":
        scales = dims.layers * sum(outputs * 4 for _, outputs in dims.linear_shapes.values())
        return WeightBytes(linears + scales, table * 4, 0 if dims.tied else table * 4, vectors * 4)
    raise ConfigError("unknown quantisation", expected="none, q4, 8da4w, w8, nf4, int8", received=quantize)


@dataclass(frozen=True)
class Placement:
    """Where the weights of a program are.

    Attributes:
        resident: read by every step: in memory for PyTorch; for ExecuTorch the pages of the file that XNNPACK
            does not copy (the embedding, and everything for q4).
        packed: XNNPACK's own copies of the linears: one for each method that is loaded.
        arena: what a step copies for the tile of the head it is at.
        file: the program's weights on disk; pages that are not read again cost nothing.
    """

    resident: int
    packed: int
    arena: int
    file: int


def in_torch(weights: WeightBytes) -> Placement:
    """Eager PyTorch keeps one copy of everything."""
    return Placement(weights.total, 0, 0, 0)


def in_executorch(
    dims: ModelDims, weights: WeightBytes, export: ExportConfig, loss_tiles: int, loaded_methods: int
) -> Placement:
    """ExecuTorch maps the file. XNNPACK packs each linear it runs into anonymous memory, once for each loaded
    method, and does not read the file's copy again; this project's q4 op reads the mapped file itself."""
    if export.quantize == "q4":
        return Placement(weights.total, 0, 0, weights.total)
    packed = weights.linears + (weights.head if export.quantize == "8da4w" else 0)
    tiles = 1 if export.loss == "plain" else loss_tiles
    fused = export.loss == "op" or export.quantize == "8da4w"
    # A tile of the head is sliced out of the mapped table, and packed.
    arena = 0 if fused else 2 * -(-dims.vocab // tiles) * dims.hidden * 4
    resident = weights.total - packed
    return Placement(resident, packed * loaded_methods, arena, weights.total)


def in_npu(weights: WeightBytes, export: ExportConfig) -> Placement:
    """The blocks' linears are unpacked from the file into the NPU's memory, in float16 or int8, once: there is one
    method. Embedding and head stay in the mapped file, in float32."""
    linears = weights.linears if export.quantize == "w8" else weights.linears // 2
    rest = weights.total - weights.linears
    return Placement(rest, linears, 0, rest + linears)
