"""The stages of mixers that carry a state from token to token, in the place of attention: a short
gated convolution, and a gated delta rule, whose equations `ondevice.nn.delta_rule` has.

Shapes: B rows, T tokens, C of a chunk, D hidden; heads of keys of width K and of values of width V.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ondevice.methods.mesp.mlx.stages import Arrays, Stages

KEY_EPS = 1e-6
"""Added to the squared length of a query or a key, as in transformers."""


class RecurrentStages(Stages):
    """The functions of a run of a model with such mixers, or with attention only."""

    def convolve(self, a: Arrays) -> Arrays:
        """Compute bcx -> o: each channel sees its last `taps` tokens, weights [D, taps]."""
        b, c, x = mx.split(a["bcx"], 3, axis=-1)
        return {"o": c * convolved(b * x, a["taps.weight"])}

    def convolve_alone(self, a: Arrays) -> Arrays:
        """Compute qkv [B, T, channels] -> c, in which each channel sees its last `taps` tokens."""
        return {"c": convolved(a["qkv"], a["taps.weight"])}

    def correct_first(self, a: Arrays) -> Arrays:
        """Compute `correct` of a row's first tokens, before which there is no state."""
        _, heads, key_width, width = self.traits.delta
        return self.correct(a | {"state": mx.zeros((len(a["c"]), heads, key_width, width))})

    def correct(self, a: Arrays) -> Arrays:
        """Compute a chunk's c, z [B, C, heads V], b and a [B, C, heads], and the state before it
        float32 [B, heads, K, V] -> o [B, C, heads V], and the state behind it."""
        q, k, v = self._delta_heads(a["c"].astype(mx.float32))
        beta = mx.sigmoid(a["b"].astype(mx.float32)).transpose(0, 2, 1)[..., None]
        steps = a["a"].astype(mx.float32) + a["step.weight"].astype(mx.float32)
        decay = -mx.exp(a["decay.weight"].astype(mx.float32)) * mx.logaddexp(steps, mx.array(0.0))
        count = q.shape[2]
        seen = mx.tril(mx.ones((count, count)))
        since = decay.transpose(0, 2, 1) @ seen.T
        between = mx.exp((since[..., :, None] - since[..., None, :]) * seen) * seen
        end = since[..., -1:, None]
        since = since[..., None]
        state = a["state"]
        system = (beta * k) @ k.swapaxes(-1, -2) * (between - mx.eye(count))
        wrong = v - (mx.exp(since) * k) @ state
        corrected = unit_inverse(system) @ (beta * wrong)
        o = (mx.exp(since) * q) @ state + (q @ k.swapaxes(-1, -2) * between) @ corrected
        after = mx.exp(end) * state + (mx.exp(end - since) * k).swapaxes(-1, -2) @ corrected
        o = self.rms_norm(o.transpose(0, 2, 1, 3), a["gate_norm.weight"].astype(mx.float32))
        z = a["z"].astype(mx.float32).reshape(o.shape)
        o = (o * z * mx.sigmoid(z)).reshape(*o.shape[:2], -1)
        return {"o": o.astype(self.dtype), "state": after}

    def _delta_heads(self, c: Any) -> tuple[Any, Any, Any]:
        """Activate and split [B, C, channels] into queries, keys and values [B, heads, C, width]."""
        key_heads, heads, key_width, width = self.traits.delta
        keys = key_heads * key_width
        q, k, v = mx.split(c * mx.sigmoid(c), [keys, 2 * keys], axis=-1)
        q, k = (unit(x.reshape(*x.shape[:2], key_heads, key_width)) for x in (q, k))
        q, k = (mx.repeat(x, heads // key_heads, axis=2) for x in (q * key_width**-0.5, k))
        v = v.reshape(*v.shape[:2], heads, width)
        return q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def unit(x: Any) -> Any:
    """Return each vector at length 1."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + KEY_EPS)


def unit_inverse(lower: Any) -> Any:
    """Return (I + L)^-1 of strictly lower triangular L [..., C, C]; see
    `ondevice.nn.delta_rule.unit_inverse`."""
    count = lower.shape[-1]
    number = mx.arange(count)
    inverse = mx.broadcast_to(mx.eye(count), lower.shape)
    width = 1
    while width < count:
        block = number // width
        pair = block // 2
        between = (pair[:, None] == pair[None]) & (block[:, None] != block[None])
        inverse = inverse - inverse @ (lower * between) @ inverse
        width *= 2
    return inverse


def convolved(x: Any, taps: Any) -> Any:
    """Convolve [B, T, channels] with `taps` [channels, count]; before a row are zeros."""
    count = taps.shape[1]
    length = x.shape[1]
    x = mx.pad(x, [(0, 0), (count - 1, 0), (0, 0)])
    return sum(x[:, first : first + length] * taps[:, first] for first in range(count))
