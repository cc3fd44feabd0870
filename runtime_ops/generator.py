"""The one random generator, in numpy: the reference that every other form reproduces.

A counter-based generator: each number is a pure function of (seed, step, query, tensor, element).
It is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) applied to a chain of
counters; all arithmetic is uint64 with wraparound. Words and Rademacher signs are bit-identical in
every form; Gaussians (Box-Muller in float32) agree to 1e-6, because `log`, `cos` and `sin` may
differ by an ulp.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.core.errors import ConfigError

MASK64 = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
"""2^64 / golden ratio, odd: the increment of SplitMix64."""
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
SHIFTS = (30, 27, 31)
SCHEME = "splitmix64-1"
"""Name of this generator in manifests; changes whenever any bit of any stream would change."""
TWO_PI = np.float32(6.283185307179586)
GOLDEN_PATH = Path(__file__).with_name("golden.json")


def noise_kind(name: str) -> str:
    """Return the op that a name of a noise means: "normal" for "gaussian" or "normal", or
    "rademacher".

    Raises:
        ConfigError: another name.
    """
    if name not in ("gaussian", "normal", "rademacher"):
        raise ConfigError("unknown kind of noise", expected="gaussian or rademacher", received=name)
    return name.replace("gaussian", "normal")


def mix_int(value: int) -> int:
    """Apply the SplitMix64 finaliser to one Python integer, taken modulo 2^64; a bijection of
    64-bit words."""
    value &= MASK64
    value = ((value ^ (value >> SHIFTS[0])) * MULTIPLIER_1) & MASK64
    value = ((value ^ (value >> SHIFTS[1])) * MULTIPLIER_2) & MASK64
    return value ^ (value >> SHIFTS[2])


def mix(values: np.ndarray) -> np.ndarray:
    """Apply the SplitMix64 finaliser to each element; uint64 in, uint64 of the same shape out."""
    values = (values ^ (values >> np.uint64(SHIFTS[0]))) * np.uint64(MULTIPLIER_1)
    values = (values ^ (values >> np.uint64(SHIFTS[1]))) * np.uint64(MULTIPLIER_2)
    return values ^ (values >> np.uint64(SHIFTS[2]))


def stream_key(seed: int, step: int, query: int, tensor: int) -> int:
    """Compute the 64-bit key of one stream; arguments are any Python integers, taken modulo 2^64."""
    key = mix_int(seed + GAMMA)
    for counter in (step, query, tensor):
        key = mix_int(key + GAMMA * (counter + 1))
    return key


def words(key: int, start: int, count: int) -> np.ndarray:
    """Draw words `start` to `start + count - 1` of the stream with this key: uint64 [count]."""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix(np.uint64(key) + np.uint64(GAMMA) * index)


def normal(seed: int, step: int, tensor: int, queries: int, start: int, count: int) -> np.ndarray:
    """Draw standard normals, elements `start` to `start + count - 1` of queries 0 to `queries - 1`.

    Box-Muller: word e >> 1 gives elements e (cosine) and e + 1 (sine), the radius from its upper 32
    bits and the angle, in [-pi, pi), from its lower 24.

    Args:
        seed, step: integers that fit int64.
        tensor: stream id of the tensor.
        queries, start, count: integers >= 0.

    Returns:
        float32 [queries, count].
    """
    first, last = start >> 1, (start + count + 1) >> 1
    out = np.empty((queries, count), dtype=np.float32)
    for query in range(queries):
        word = words(stream_key(seed, step, query, tensor), first, last - first)
        uniform = ((word >> np.uint64(32)).astype(np.float32) + np.float32(0.5)) * np.float32(
            2.0**-32
        )
        turn = ((word & np.uint64(0xFFFFFF)).astype(np.float32) - np.float32(2**23)) * np.float32(
            2.0**-24
        )
        angle = TWO_PI * turn
        radius = np.sqrt(np.float32(-2.0) * np.log(uniform))
        pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)
        out[query] = pairs[start - 2 * first :][:count]
    return out


def rademacher(
    seed: int, step: int, tensor: int, queries: int, start: int, count: int
) -> np.ndarray:
    """Draw random signs, +1.0 or -1.0; arguments as for `normal`.

    Element e is bit 63 - (e & 63) of word e >> 6: +1.0 if the bit is 0.

    Returns:
        float32 [queries, count].
    """
    first, last = start >> 6, (start + count + 63) >> 6
    out = np.empty((queries, count), dtype=np.float32)
    for query in range(queries):
        word = words(stream_key(seed, step, query, tensor), first, last - first)
        bits = np.unpackbits(word.astype(">u8").view(np.uint8))[start - 64 * first :][:count]
        out[query] = np.float32(1.0) - np.float32(2.0) * bits
    return out


def golden() -> list[dict[str, Any]]:
    """Compute the generator's cases in `golden.json`: arguments, the last query's key, its first
    words, its values."""
    cases = []
    arguments = [
        (0, 0, 0, 1, 0, 8),
        (1, 0, 0, 2, 1, 7),
        (42, 1, 3, 4, 63, 5),
        (42, 19_999, 1, 2, 127, 6),
        (2**63 - 1, 7, 0, 1, 64, 9),
        (123_456_789_012_345_678, 2**40, 210, 16, 2_457_599, 3),
        (9_007_199_254_740_993, 3, 2, 3, (1 << 33) + 5, 4),
    ]
    for seed, step, tensor, queries, start, count in arguments:
        key = stream_key(seed, step, queries - 1, tensor)
        cases.append(
            {
                "seed": seed,
                "step": step,
                "tensor": tensor,
                "queries": queries,
                "start": start,
                "count": count,
                "last_key": f"{key:016x}",
                "last_words": [f"{int(word):016x}" for word in words(key, start, 2)],
                "normal": [
                    [float(v) for v in row]
                    for row in normal(seed, step, tensor, queries, start, count)
                ],
                "rademacher": [
                    [int(v) for v in row]
                    for row in rademacher(seed, step, tensor, queries, start, count)
                ],
            }
        )
    return cases


def read_golden() -> list[dict[str, Any]]:
    """Read the committed golden cases of the generator; `golden` has those of the other ops."""
    return json.loads(GOLDEN_PATH.read_text())["cases"]
