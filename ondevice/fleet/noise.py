"""Sums of directions in whole numbers: the same bits on every machine, whatever the order of the
sum.

Directions are the generator's (`ondevice.runtime_ops.generator`). Signs are exact everywhere.
Gaussians of different forms may differ in a last bit, so a fleet's are defined: the form of single
float32 operations that the compiled kernels have (`runtime_ops/csrc/generator.cpp`), here in numpy,
rounded to multiples of 2^-16."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence

import numpy as np

from ondevice.core.errors import OndeviceError
from ondevice.runtime_ops import build, generator

STREAM = 0
"""The generator's tensor id of the perturbations."""
GAUSSIAN_BITS = 16
"""A Gaussian is a whole number of 2^-16."""
_BLOCK_WORDS = 1 << 13
"""Words a pass: its working set stays in a processor's cache."""
_TRANSPOSE = ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0))

Directions = Sequence[tuple[int, int, int]]
"""(step, query, coefficient); coefficients are whole numbers below 2^31."""


def weighted_sum(kind: str, seed: int, directions: Directions, size: int) -> np.ndarray:
    """Return the sum of coefficient times direction, int64 [size], in units of the coefficients.

    Args:
        kind: `rademacher` or `gaussian`; a Gaussian sum is rounded once, halves up.
        directions: those with a coefficient of zero cost nothing.
    """
    total = np.zeros(size, dtype=np.int64)
    kept = [direction for direction in directions if direction[2]]
    if not kept:
        return total
    if generator.noise_kind(kind) == "rademacher":
        _add_signs(
            [(generator.stream_key(seed, step, query, STREAM), c) for step, query, c in kept], total
        )
    else:
        _add_gaussians(seed, kept, total)
    return total


def _add_signs(directions: Sequence[tuple[int, int]], total: np.ndarray) -> None:
    """Add signs sixteen directions at a time: the signs of an element are an index into a table of
    their sums."""
    tables = [
        _table([c for _, c in directions[first : first + 16]])
        for first in range(0, len(directions), 16)
    ]
    keys = [np.array([key for key, _ in directions[first : first + 16]], np.uint64)
            for first in range(0, len(directions), 16)]  # fmt: skip
    size = len(total)
    count = -(-size // 64)
    for start in range(0, count, _BLOCK_WORDS):
        words = min(_BLOCK_WORDS, count - start)
        index = np.arange(start + 1, start + words + 1, dtype=np.uint64) * np.uint64(
            generator.GAMMA
        )
        part = total[start * 64 : min(size, (start + words) * 64)]
        for table, key in zip(tables, keys):
            low = _element_bits(generator.mix(key[:8, None] + index))
            if len(key) <= 8:
                part += table[low[: len(part)]]
            else:
                high = _element_bits(generator.mix(key[8:, None] + index)).astype(np.uint16)
                part += table[((high << np.uint16(8)) | low)[: len(part)]]


def _table(coefficients: Sequence[int]) -> np.ndarray:
    """Return, for every choice of minus signs (bit i is direction i's), the sum: int64 [2^n or
    256]."""
    sums = np.zeros(1, dtype=np.int64)
    width = 8 if len(coefficients) <= 8 else 16
    for c in [*coefficients, *[0] * (width - len(coefficients))]:
        sums = np.concatenate([sums + c, sums - c])
    return sums


def _element_bits(words_DW: np.ndarray) -> np.ndarray:
    """Return uint8 [64 words]: for each element its bit of every direction (at most 8), direction i
    in bit i."""
    count, words = words_DW.shape
    rows = np.zeros((words * 8, 8), dtype=np.uint8)
    # Element e is bit 63 - (e & 63) of its word: bytes from the most significant, in each the
    # highest bit first.
    rows[:, :count] = words_DW.astype(">u8").view(np.uint8).reshape(count, words * 8).T
    x = rows.view("<u8").reshape(-1)
    for (
        shift,
        mask,
    ) in _TRANSPOSE:  # an 8 by 8 transpose of bits: Warren, Hacker's Delight, section 7-3
        swap = (x ^ (x >> np.uint64(shift))) & np.uint64(mask)
        x = x ^ swap ^ (swap << np.uint64(shift))
    return np.ascontiguousarray(x.astype("<u8").view(np.uint8).reshape(-1, 8)[:, ::-1]).reshape(-1)


def _add_gaussians(seed: int, directions: Directions, total: np.ndarray) -> None:
    """Add Gaussians step by step: the compiled kernel draws all queries of a step at once."""
    library = _compiled()
    scale = np.float32(1 << GAUSSIAN_BITS)
    steps: dict[int, dict[int, int]] = {}
    for step, query, coefficient in directions:
        chosen = steps.setdefault(step, {})
        chosen[query] = chosen.get(query, 0) + coefficient
    for start in range(0, len(total), 2 * _BLOCK_WORDS):
        part = total[start : start + 2 * _BLOCK_WORDS]
        count = len(part)
        for step, chosen in steps.items():
            if library is not None:
                drawn = np.empty((max(chosen) + 1, count), dtype=np.float32)
                library(seed, step, STREAM, len(drawn), start, count, drawn.ctypes.data, 1)
            for query, coefficient in chosen.items():
                if library is not None:
                    part += coefficient * np.rint(drawn[query] * scale).astype(np.int64)
                else:
                    key = generator.stream_key(seed, step, query, STREAM)
                    part += coefficient * whole_gaussians(key, start // 2, -(-count // 2))[:count]
    total += 1 << (GAUSSIAN_BITS - 1)
    total >>= GAUSSIAN_BITS


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """The compiled kernel, which has the bits of `gaussians`; None without a compiler or with
    `ONDEVICE_NATIVE=0`."""
    if os.environ.get("ONDEVICE_NATIVE") == "0":
        return None
    try:
        function = ctypes.CDLL(str(build.build_library())).ondevice_normal
    except (OndeviceError, OSError):
        return None
    function.argtypes = (
        [ctypes.c_uint64] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_void_p, ctypes.c_int64]
    )
    function.restype = None
    return function


def whole_gaussians(key: int, first_word: int, words: int) -> np.ndarray:
    """Return elements 2 first_word onwards of a stream in units of 2^-16: int64 [2 words]."""
    return np.rint(gaussians(key, first_word, words) * np.float32(1 << GAUSSIAN_BITS)).astype(
        np.int64
    )


def gaussians(key: int, first_word: int, words: int) -> np.ndarray:
    """Return elements 2 first_word onwards as the compiled kernels have them, bit for bit: float32
    [2 words]."""
    f32 = np.float32
    word = generator.words(key, first_word, words)
    uniform = ((word >> np.uint64(32)).astype(f32) + f32(0.5)) * f32(2.0**-32)
    turn = ((word & np.uint64(0xFFFFFF)).astype(f32) - f32(2**23)) * f32(2.0**-24)
    radius = np.sqrt(f32(-2.0) * _log_unit(uniform))
    sine, cosine = _sin_cos(f32(6.283185307179586) * turn)
    return np.stack([radius * cosine, radius * sine], axis=-1).reshape(-1)


def _log_unit(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of floats in (0, 1], by Cephes' polynomial; each operation is rounded on
    its own."""
    f32 = np.float32
    shifted = x.view(np.int32) - np.int32(0x3F3504F3)
    exponent = (shifted >> np.int32(23)).astype(f32)
    f = ((shifted & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3)).view(f32) - f32(1.0)
    z = f * f
    p = np.full_like(f, f32(7.0376836292e-2))
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
              2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        p = p * f + f32(c)
    y = p * f * z + exponent * f32(-2.12194440e-4)
    y = y - f32(0.5) * z
    return (f + y) + exponent * f32(0.693359375)


def _sin_cos(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sine and cosine of angles in [-pi, pi], by Cephes' polynomials after reduction by multiples
    of pi/2."""
    f32 = np.float32
    turns = (a * f32(0.636619772367581343) + f32(12582912.0)) - f32(12582912.0)
    quadrant = turns.astype(np.int32)
    f = a - turns * f32(1.5703125)
    f = f - turns * f32(4.837512969970703125e-4)
    f = f - turns * f32(7.549789948768648e-8)
    z = f * f
    s = ((f32(-1.9515295891e-4) * z + f32(8.3321608736e-3)) * z - f32(1.6666654611e-1)) * z * f + f
    c = (
        (
            (f32(2.443315711809948e-5) * z - f32(1.388731625493765e-3)) * z
            + f32(4.166664568298827e-2)
        )
        * z
        * z
    )
    c = c - f32(0.5) * z + f32(1.0)
    odd = (quadrant & 1).astype(bool)
    sine = np.where(odd, c, s)
    cosine = np.where(odd, s, c)
    return (
        np.where((quadrant & 2) != 0, -sine, sine),
        np.where(((quadrant + 1) & 2) != 0, -cosine, cosine),
    )
