"""The generator in MLX, for its CPU and Metal devices alike: plain array ops, no kernel of its own.

Words and signs have the bits of `generator`; Gaussians agree with it to 1e-6. Integer arithmetic is
MLX's uint64, which wraps around and exists on Metal. Nothing is evaluated here: a draw is a part of
the graph it is used in, and of an exported function (`.mlxfn`), where seed and step may be inputs.
Importing this file imports MLX and not torch.

The other ops of this folder have no MLX form: MLX's own `quantized_matmul` reads 4-bit weights of
the same kind (q * scale + minimum), and its embedding and losses are array ops.
"""

from __future__ import annotations

import numpy as np

from ondevice.core.errors import ConfigError, MissingPackageError
from ondevice.runtime_ops.generator import (
    GAMMA,
    MASK64,
    MULTIPLIER_1,
    MULTIPLIER_2,
    SHIFTS,
    TWO_PI,
    noise_kind,
)

try:
    import mlx.core as mx
except ImportError as error:
    raise MissingPackageError(
        "MLX is not installed",
        expected="mlx",
        received=str(error),
        hint='pip install "ondevice-train[mlx]"',
    ) from None


def draw(
    kind: str,
    seed: int | mx.array,
    step: int | mx.array,
    tensor: int,
    queries: int,
    start: int,
    count: int,
) -> mx.array:
    """Draw `normal` or `rademacher` by the name that configurations use: "gaussian" (or "normal")
    or "rademacher".

    Raises:
        ConfigError: another name, a negative counter, or an array that is not of 64-bit integers.
    """
    draw_numbers = normal if noise_kind(kind) == "normal" else rademacher
    return draw_numbers(seed, step, tensor, queries, start, count)


def normal(
    seed: int | mx.array, step: int | mx.array, tensor: int, queries: int, start: int, count: int
) -> mx.array:
    """Return `generator.normal`, within 1e-6 of it.

    Args:
        seed, step: integers, taken modulo 2^64, or int64 or uint64 arrays [1].
        tensor: stream id of the tensor.
        queries, start, count: integers >= 0.

    Returns:
        float32 [queries, count].

    Raises:
        ConfigError: a negative counter, or an array that is not of 64-bit integers.
    """
    first, last = start >> 1, (start + count + 1) >> 1
    word = _words(_keys(seed, step, tensor, queries, start, count), first, last)
    uniform = ((word >> 32).astype(mx.float32) + 0.5) * 2.0**-32
    # 2^-24 is a power of two, so that folding it into 2 pi changes no rounding.
    angle = ((word & 0xFFFFFF).astype(mx.float32) - 2.0**23) * (float(TWO_PI) * 2.0**-24)
    radius = mx.sqrt(mx.log(uniform) * -2.0)
    pairs = mx.stack([radius * mx.cos(angle), radius * mx.sin(angle)], axis=-1).reshape(
        queries, 2 * (last - first)
    )
    return pairs[:, start - 2 * first :][:, :count]


def rademacher(
    seed: int | mx.array, step: int | mx.array, tensor: int, queries: int, start: int, count: int
) -> mx.array:
    """Return `generator.rademacher`, the same bits; arguments and errors as for `normal`.

    Returns:
        float32 [queries, count], +1.0 or -1.0.
    """
    first, last = start >> 6, (start + count + 63) >> 6
    word = _words(_keys(seed, step, tensor, queries, start, count), first, last)
    bits = (word[..., None] >> mx.arange(63, -1, -1, dtype=mx.uint64)) & 1
    signs = (1.0 - 2.0 * bits.astype(mx.float32)).reshape(queries, 64 * (last - first))
    return signs[:, start - 64 * first :][:, :count]


def _word(value: int | mx.array) -> mx.array:
    """Make a uint64 array of one value, or of the array's bits."""
    if not isinstance(value, mx.array):
        return mx.array(np.array([value & MASK64], dtype=np.uint64))
    if value.dtype not in (mx.int64, mx.uint64) or value.shape != (1,):
        raise ConfigError(
            "seed and step are one 64-bit integer each",
            expected="int64 or uint64 [1]",
            received=f"{str(value.dtype).removeprefix('mlx.core.')} {list(value.shape)}",
        )
    return value.view(mx.uint64)


def _mix(x: mx.array) -> mx.array:
    x = (x ^ (x >> SHIFTS[0])) * _word(MULTIPLIER_1)
    x = (x ^ (x >> SHIFTS[1])) * _word(MULTIPLIER_2)
    return x ^ (x >> SHIFTS[2])


def _keys(
    seed: int | mx.array, step: int | mx.array, tensor: int, queries: int, start: int, count: int
) -> mx.array:
    """Keys of the streams of queries 0 to `queries - 1`: uint64 [queries, 1]."""
    if min(tensor, queries, start, count) < 0:
        raise ConfigError(
            "the generator's counters are not negative",
            received=f"tensor {tensor}, queries {queries}, start {start}, count {count}",
        )
    key = _mix(_mix(_word(seed) + _word(GAMMA)) + (_word(step) + 1) * _word(GAMMA))
    query = mx.arange(1, queries + 1, dtype=mx.uint64)[:, None]
    return _mix(_mix(key + query * _word(GAMMA)) + _word(GAMMA * (tensor + 1)))


def _words(keys: mx.array, first: int, last: int) -> mx.array:
    """Words `first` to `last - 1` of each stream: uint64 [queries, last - first]."""
    # The range starts at 0: MLX takes the ends of a range as float64.
    index = mx.arange(last - first, dtype=mx.uint64) + _word(first + 1)
    return _mix(keys + index * _word(GAMMA))
