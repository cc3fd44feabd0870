"""What the stages and their order depend on: a model's sizes and the choices of a run. Imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ondevice.errors import ConfigError

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import ModelDims

Product = Literal["quantized", "dequantized"]
GROUP_SIZE = 64
PACKED_BITS = 32
"""Bits of a word of packed weights."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: angle of pair i at position t is t * scale / wavelength_i.

    Attributes:
        theta: base of the wavelengths theta^(2i / head_dim).
        scale: 1 / factor where positions are interpolated (`linear`).
        wavelengths: one for each pair, where they are not powers of theta (`llama3`).
    """

    theta: float
    scale: float = 1.0
    wavelengths: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Settings:
    """A run's shape.

    Attributes:
        scale: LoRA's alpha / rank.
        bits: of packed weights, in groups of `group_size`; None is dense.
        dtype: of activations; sums over tiles and all of LoRA are float32.
        product: `quantized` multiplies packed weights as they are; `dequantized` makes some rows dense at a time,
            which is faster with a good BLAS.
        mlp_tiles: pieces of the MLP's inner dimension that are computed one after the other.
        query_chunk_tokens: queries whose attention scores exist at once.
        store_h: keep x A^T of q, k, v and o from a block's recomputation to its backward pass (Table 5).
    """

    dims: ModelDims
    targets: tuple[str, ...]
    scale: float
    rope: Rope
    bits: int | None = None
    group_size: int = GROUP_SIZE
    dtype: str = "float32"
    product: Product = "quantized"
    mlp_tiles: int = 8
    query_chunk_tokens: int = 128
    store_h: bool = False

    @classmethod
    def of(cls, dims: ModelDims, config: MespConfig, rope: Rope, **values: object) -> Settings:
        """The settings of a run."""
        return cls(
            dims=dims,
            targets=tuple(config.targets),
            scale=config.scale,
            rope=rope,
            store_h=config.store_h,
            **values,  # type: ignore[arg-type]
        )

    @property
    def quantum(self) -> int:
        """Tiles of packed columns begin at multiples of this."""
        return self.group_size if self.bits else 1

    def mlp_bounds(self) -> list[tuple[int, int]]:
        """Ranges of the MLP's inner dimension, all but the last of equal size."""
        return bounds(self.dims.intermediate, self.mlp_tiles, self.quantum)

    def query_bounds(self, length_tokens: int) -> list[tuple[int, int]]:
        """Ranges of queries of a sequence."""
        size = min(self.query_chunk_tokens, length_tokens)
        return [(low, min(low + size, length_tokens)) for low in range(0, length_tokens, size)]

    def check(self) -> None:
        """Refuse matrices that cannot be packed.

        Raises:
            ConfigError: a width is no multiple of the group size.
        """
        if not self.bits:
            return
        for target, (inputs, _) in self.dims.linear_shapes.items():
            if inputs % self.group_size:
                raise ConfigError(
                    f"{target} cannot be kept in {self.bits} bits",
                    expected=f"inputs a multiple of the group of {self.group_size}",
                    received=f"{inputs} inputs",
                    hint="--set method.bits=null keeps the weights as they are",
                )


def bounds(size: int, tiles: int, quantum: int = 1) -> list[tuple[int, int]]:
    """Split `size` into at most `tiles` ranges that begin at multiples of `quantum`."""
    step = -(-size // max(1, tiles))
    step = -(-step // quantum) * quantum
    return [(low, min(low + step, size)) for low in range(0, size, step)]
