"""What golden values are drawn from: numbered streams of the generator, as words, floats and bytes."""

from __future__ import annotations

import numpy as np

from ondevice.runtime_ops import generator


def words(stream: int, count: int) -> np.ndarray:
    """Return uint64 [count] of stream (seed 0, step 0, query 0, tensor `stream`)."""
    return generator.words(generator.stream_key(0, 0, 0, stream), 0, count)


def normals(stream: int, *shape: int) -> np.ndarray:
    """Return float32 of this shape."""
    return generator.normal(0, 0, stream, 1, 0, int(np.prod(shape))).reshape(shape)


def some_bytes(stream: int, *shape: int) -> np.ndarray:
    """Return uint8 of this shape: the words' bytes, lowest first."""
    count = int(np.prod(shape))
    return words(stream, -(-count // 8)).astype("<u8").view(np.uint8)[:count].reshape(shape)


def halves(stream: int, base: int, *shape: int) -> np.ndarray:
    """Return float16 of this shape: the 16 bits `base`, the lower ten of them taken from a word
    each."""
    bits = (words(stream, int(np.prod(shape))) & np.uint64(0x3FF)).astype(np.uint16) | np.uint16(
        base
    )
    return bits.view(np.float16).reshape(shape)


def some_levels(stream: int, *shape: int) -> np.ndarray:
    """Return int8 of this shape, in [-64, 63]."""
    return ((some_bytes(stream, *shape) >> 1).astype(np.int16) - 64).astype(np.int8)
