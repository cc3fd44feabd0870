"""One block's stages as pure functions of arrays, forward and backward, derived by hand (appendix A).

A stage takes arrays by name and gives arrays by name; what it takes and gives is listed in `instructions`. Nothing is
kept between two stages but what a stage gives, and nothing here asks for a gradient: each `_backward` is a formula.

Shapes: B rows, T tokens, D hidden, H query heads, K key heads, G = H / K, h head_dim, F a tile of the MLP's inner
dimension, C queries of a chunk, S = keys that they see. x, m [B, T, D]: a block's input, and the residual stream
between attention and MLP. q [B, H, T, h], k and v [B, K, T, h], o [B, C, H h]. A float32 [rank, inputs], B float32
[outputs, rank]. Sums over tiles are float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ondevice.methods.mesp.mlx.settings import GATE_UP, NORMS

if TYPE_CHECKING:
    from ondevice.methods.mesp.mlx.settings import Settings

Arrays = dict[str, Any]
DENSE_ROWS = 512
"""Rows of a packed matrix that are made dense at once, where they are."""
GELU = math.sqrt(2 / math.pi)


class Stages:
    """The functions of one run; every method but the helpers is a stage."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.dims, self.traits = settings, settings.dims, settings.dims.traits
        self.dtype = getattr(mx, settings.dtype)
        self.sums = mx.float32
        rope = settings.rope
        self.wavelengths, self.longer = (
            None if waves is None else mx.array(waves, dtype=mx.float32)
            for waves in (rope.wavelengths, rope.longer)
        )

    def call(self, stage: str, arrays: Arrays) -> Arrays:
        """Run `stage`."""
        return getattr(self, stage)(arrays)

    # Linear layers: y = x W^T + b + s (x A^T) B^T, appendix A.1.

    def product(self, x: Any, a: Arrays, name: str) -> Any:
        """Compute x W^T for a dense or packed W [outputs, inputs], in the precision of x."""
        weight, settings, packed = a[f"{name}.weight"], self.settings, f"{name}.scales" in a
        if not packed and weight.dtype == x.dtype:
            return x @ weight.T
        if packed and settings.product == "quantized":
            return self._packed(x, a, name, True)
        tiles: list[Any] = []
        for low, high in _row_tiles(weight):
            # Each tile waits for the one before it: MLX would else make all of them dense at once.
            after = mx.depends([x], tiles[-1:])[0] if tiles else x
            part = (
                self._dense(a, name, x.dtype, low, high)
                if packed
                else weight[low:high].astype(x.dtype)
            )
            tiles.append(after @ part.T)
        return mx.concatenate(tiles, axis=-1) if len(tiles) > 1 else tiles[0]

    def product_backward(self, g: Any, a: Arrays, name: str) -> Any:
        """Compute g W, the gradient of the input of x W^T."""
        weight, settings = a[f"{name}.weight"], self.settings
        if f"{name}.scales" not in a:
            return g @ weight.astype(g.dtype)
        if settings.product == "quantized":
            return self._packed(g, a, name, False)
        total = None
        for low, high in _row_tiles(weight):
            after = g if total is None else mx.depends([g], [total])[0]
            part = after[..., low:high] @ self._dense(a, name, g.dtype, low, high)
            total = part if total is None else total + part
        return total

    def _packed(self, x: Any, a: Arrays, name: str, transpose: bool) -> Any:
        parts = (a[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        options = {"group_size": self.settings.group_size, "bits": self.settings.bits}
        return mx.quantized_matmul(x, *parts, transpose=transpose, **options).astype(x.dtype)

    def _dense(
        self, a: Arrays, name: str, dtype: Any, low: int = 0, high: int | None = None
    ) -> Any:
        """A packed matrix, or some rows of it, as numbers."""
        parts = (a[f"{name}.{part}"][low:high] for part in ("weight", "scales", "biases"))
        options = {"group_size": self.settings.group_size, "bits": self.settings.bits}
        return mx.dequantize(*parts, **options).astype(dtype)

    def has(self, target: str) -> bool:
        """Return True if there is an adapter beside that linear layer."""
        return self.settings.has(target)

    def h(self, x: Any, a: Arrays, target: str) -> Any:
        """Compute x A^T: [..., rank]."""
        return x @ a[f"{target}.A"].astype(x.dtype).T

    def linear(self, x: Any, a: Arrays, target: str, h: Any = None) -> Any:
        """Compute a whole linear layer; `h` is x A^T where it is there already."""
        y = self.product(x, a, target)
        if f"{target}.bias" in a:
            y = y + a[f"{target}.bias"].astype(y.dtype)
        if self.has(target):
            h = self.h(x, a, target) if h is None else h
            y = y + self.settings.scale * (h @ a[f"{target}.B"].astype(h.dtype).T)
        return y

    def linear_backward(self, x: Any, g: Any, a: Arrays, target: str, out: Arrays) -> Any:
        """Return the gradient of the input; those of A and B go to `out` (Eqs. 10 to 13)."""
        gx = self.product_backward(g, a, target)
        if not self.has(target):
            return gx
        b = a[f"{target}.B"]
        h = a[f"{target}.h"] if f"{target}.h" in a else self.h(x, a, target)
        gs = self.settings.scale * g
        gh = gs @ b.astype(gs.dtype)  # Eq. 11; beside it Eqs. 10 (gh^T x) and 12 (scale g^T h)
        out[f"{target}.dA"] = self.outer(gh, x)
        out[f"{target}.dB"] = self.outer(gs, h)
        return gx + gh @ a[f"{target}.A"].astype(gh.dtype)

    def outer(self, g: Any, x: Any) -> Any:
        """Return the sum over all tokens of g x^T: float32 [outputs, inputs]."""
        return g.reshape(-1, g.shape[-1]).astype(self.sums).T @ x.reshape(-1, x.shape[-1]).astype(
            self.sums
        )

    # RMSNorm, appendix A.3.

    def rms_norm(self, x: Any, weight: Any) -> Any:
        if weight.dtype != x.dtype:  # 1 + w in float32
            return mx.fast.rms_norm(x.astype(weight.dtype), weight, self.dims.norm_eps).astype(
                x.dtype
            )
        return mx.fast.rms_norm(x, weight, self.dims.norm_eps)

    def rms_norm_backward(self, x: Any, weight: Any, g: Any) -> Any:
        """Compute the gradient of x, float32."""
        # Means over D numbers and the difference of two that nearly cancel: float32, whatever activations are in.
        x, g = x.astype(self.sums), g.astype(self.sums) * weight.astype(self.sums)
        r = mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + self.dims.norm_eps)
        return r * (g - x * (mx.square(r) * mx.mean(g * x, axis=-1, keepdims=True)))

    def normed(self, a: Arrays, place: str, x: Any) -> Any:
        """Return the norm at that place, of each head by itself where it is of heads; x where there is none."""
        weight = a.get(f"{NORMS[place]}.weight")
        if weight is None:
            return x
        by_head = x.reshape(*x.shape[:-1], -1, weight.shape[0])
        return self.rms_norm(by_head, weight).reshape(x.shape)

    def normed_backward(self, a: Arrays, place: str, x: Any, g: Any) -> Any:
        """Return the gradient of x from that of its norm: float32, or g itself where there is no norm."""
        weight = a.get(f"{NORMS[place]}.weight")
        if weight is None:
            return g
        by_head = (*x.shape[:-1], -1, weight.shape[0])
        return self.rms_norm_backward(x.reshape(by_head), weight, g.reshape(by_head)).reshape(
            x.shape
        )

    def scaled(self, x: Any) -> Any:
        """Return a branch, or its gradient, times the model's factor."""
        return x if self.traits.residual_scale == 1.0 else x * self.traits.residual_scale

    # Attention, forward.

    def norm(self, a: Arrays) -> Arrays:
        """Compute x -> n, its norm."""
        return {"n": self.normed(a, "before_attention", a["x"])}

    def project(self, a: Arrays) -> Arrays:
        """Compute n -> q, k, v before the rotation, by head."""
        out: Arrays = {}
        for target in self.settings.attention_targets:
            h = self.h(a["n"], a, target) if self.has(target) else None
            out |= self._named_heads(target, self.linear(a["n"], a, target, h))
            if h is not None and self.settings.store_h:
                out[f"{target}.h"] = h
        for name in "qkv":
            out[name] = self._by_head(self.normed(a, name, out[name]) if name != "v" else out[name])
        return out

    def _named_heads(self, target: str, y: Any) -> Arrays:
        """Split a linear layer's output into q, k and v, [B, T, heads h] each."""
        if not self.traits.fused:
            return {target[0]: y}
        q, kv = self.dims.heads * self.dims.head_dim, self.dims.kv_heads * self.dims.head_dim
        return dict(zip("qkv", mx.split(y, [q, q + kv], axis=-1), strict=True))

    def _by_head(self, x: Any) -> Any:
        """[B, T, heads h] -> [B, heads, T, h]."""
        return x.reshape(*x.shape[:2], -1, self.dims.head_dim).transpose(0, 2, 1, 3)

    def _flat(self, x: Any) -> Any:
        """[B, heads, T, h] -> [B, T, heads h]."""
        x = x.astype(self.dtype).transpose(0, 2, 1, 3)
        return x.reshape(*x.shape[:2], -1)

    def rope(self, a: Arrays) -> Arrays:
        """Rotate q and k by their positions."""
        return {name: self._rotate(a[name], 1.0, a) for name in ("q", "k")}

    def _rotate(self, x: Any, sign: float, a: Arrays) -> Any:
        """Rotate [B, heads, T, h] by its positions; backwards with sign -1, which is the gradient too."""
        rope, own, width = self.settings.rope, a.get("rope.weight"), self.settings.rotary_width
        wavelengths, scale, factor = self.wavelengths, rope.scale, rope.factor
        if own is not None:
            wavelengths, scale, factor = own[0], 1.0, own[1, 0]
        elif self.longer is not None and x.shape[2] > rope.trained_tokens:
            wavelengths = self.longer
        base = None if wavelengths is not None else rope.theta
        options = {"base": base, "scale": sign * scale, "offset": 0, "freqs": wavelengths}
        y = mx.fast.rope(x, width, traditional=False, **options)
        if rope.factor == 1.0:
            return y
        return (y * mx.where(mx.arange(x.shape[3]) < width, factor, 1.0)).astype(y.dtype)

    def attend(self, a: Arrays) -> Arrays:
        """Compute q [B, H, C, h] of a chunk, k and v [B, K, S, h] up to its end -> o [B, C, H h]."""
        p = self._probabilities(a["q"], a["k"], a.get("window.weight"))
        return {"o": self._join_heads((p @ a["v"]), a["q"].shape[2])}

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return self.traits.score_scale or self.dims.head_dim**-0.5

    def _probabilities(self, q: Any, k: Any, window: Any = None) -> Any:
        """softmax(q k^T / sqrt(h)) with the causal mask: [B, K, G C, S], the last query seeing all S keys, or those of
        its window."""
        rows, _, queries, width = q.shape
        kv_heads, keys = k.shape[1], k.shape[2]
        scores = (q.reshape(rows, kv_heads, -1, width) * self.score_scale) @ k.swapaxes(-1, -2)
        behind = mx.arange(keys - queries, keys)[:, None] - mx.arange(keys)[None]
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
        scores = mx.where(seen, scores.reshape(rows, kv_heads, -1, queries, keys), -mx.inf)
        return mx.softmax(scores, axis=-1, precise=True).reshape(rows, kv_heads, -1, keys)

    def _join_heads(self, o: Any, queries: int) -> Any:
        """[B, K, G C, h] -> [B, C, H h]."""
        rows, width = o.shape[0], o.shape[3]
        return o.reshape(rows, -1, queries, width).transpose(0, 2, 1, 3).reshape(rows, queries, -1)

    def _split_heads(self, g: Any) -> Any:
        """[B, C, H h] -> [B, K, G C, h]."""
        rows, queries, _ = g.shape
        by_head = g.reshape(rows, queries, self.dims.heads, self.dims.head_dim).transpose(
            0, 2, 1, 3
        )
        return by_head.reshape(rows, self.dims.kv_heads, -1, self.dims.head_dim)

    def out(self, a: Arrays) -> Arrays:
        """Compute x, all chunks of o -> m = x + o Wo^T."""
        o, outputs = joined(a, "o", 1), {}
        h = self.h(o, a, "o_proj") if self.has("o_proj") else None
        if h is not None and self.settings.store_h:
            outputs["o_proj.h"] = h
        y = self.normed(a, "after_attention", self.linear(o, a, "o_proj", h))
        return {"m": a["x"] + self.scaled(y), **outputs}

    # MLP, forward.

    def mlp_norm(self, a: Arrays) -> Arrays:
        """Compute m -> its norm, h of gate and up, and y, to which the tiles are added: m, or zeros."""
        n, y = self.normed(a, "before_mlp", a["m"]), a["m"].astype(self.sums)
        y = mx.zeros_like(y) if self.settings.branch_apart else y
        if "down_proj.bias" in a:
            y = y + a["down_proj.bias"].astype(self.sums)
        return {"mn": n, "y": y, **self._gate_up_h(n, a)}

    def mlp_norm_again(self, a: Arrays) -> Arrays:
        """Compute m -> its norm and h of gate and up, as the backward pass of the MLP begins."""
        n = self.normed(a, "before_mlp", a["m"])
        return {"mn": n, **self._gate_up_h(n, a)}

    def _gate_up_h(self, n: Any, a: Arrays) -> Arrays:
        return {
            f"{target}.h": self.h(n, a, target)
            for target in self.settings.gate_up_targets
            if self.has(target)
        }

    def gate_up(self, a: Arrays) -> Arrays:
        """Return a tile of the gate and of what it lets through: [B, T, F] each."""
        return {
            name: self.linear(a["mn"], a, target, a.get(f"{target}.h"))
            for name, target in zip(("gate", "up"), GATE_UP, strict=True)
        }

    def act(self, a: Arrays) -> Arrays:
        """Compute silu(gate) up, or with the activation that the block has."""
        return {"act": self._activated(a["gate"])[0] * a["up"]}

    def _activated(self, gate: Any) -> tuple[Any, Any]:
        """The activation of the gate, and its derivative (appendix A.4)."""
        if self.traits.activation == "silu":
            s = mx.sigmoid(gate)
            silu = gate * s
            return silu, s + silu * (1 - s)
        # gelu = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3).
        square = gate * gate
        tanh = mx.tanh(GELU * gate * (1 + 0.044715 * square))
        slope = 0.5 * gate * (1 - tanh * tanh) * GELU * (1 + 3 * 0.044715 * square)
        return 0.5 * gate * (1 + tanh), 0.5 * (1 + tanh) + slope

    def down(self, a: Arrays) -> Arrays:
        """Compute y + act Wd^T, the tile's part; the bias is in y already."""
        y = self.product(a["act"], a, "down_proj").astype(self.sums)
        if self.has("down_proj"):
            h = self.h(a["act"], a, "down_proj")
            y = y + self.settings.scale * (h @ a["down_proj.B"].astype(h.dtype).T)
        return {"y": a["y"] + y}

    def end(self, a: Arrays) -> Arrays:
        """Compute y -> the next block's input, in the dtype of activations; m + y's norm and factor, where it has
        such."""
        y = a["y"]
        if self.settings.branch_apart:
            y = a["m"].astype(self.sums) + self.scaled(self.normed(a, "after_mlp", y))
        return {"x": y.astype(self.dtype)}

    # MLP, backward: g is the gradient of the block's output, gb that of the MLP's where it is another.

    def branch_backward(self, a: Arrays) -> Arrays:
        """Compute g, and y where it is normed -> gb, the gradient of y."""
        g = self.scaled(a["g"].astype(self.sums))
        return {"gb": self.normed_backward(a, "after_mlp", a.get("y"), g).astype(self.dtype)}

    def down_backward(self, a: Arrays) -> Arrays:
        """Compute gate, up, g -> the gradient of act; the tile's columns of dA, and its part of h (act A^T)."""
        g = a["g"].astype(self.dtype)
        gact, out = self.product_backward(g, a, "down_proj"), {}
        if self.has("down_proj"):
            act = self._activated(a["gate"])[0] * a["up"]
            gh = self.settings.scale * (g @ a["down_proj.B"].astype(g.dtype))
            out["down_proj.dA"] = self.outer(gh, act)
            # A tile has only some of the inputs: its columns of dA are whole, but h is a sum over all tiles.
            h = self.h(act, a, "down_proj").astype(self.sums)
            out["down_proj.h"] = a["down_proj.h"] + h if "down_proj.h" in a else h
            gact = gact + gh @ a["down_proj.A"].astype(gh.dtype)
        return {"gact": gact, **out}

    def act_backward(self, a: Arrays) -> Arrays:
        """Return the gradients of gate and up."""
        activated, slope = self._activated(a["gate"])
        return {"ggate": a["gact"] * a["up"] * slope, "gup": a["gact"] * activated}

    def gate_up_backward(self, a: Arrays) -> Arrays:
        """Compute gn and gh of gate and up, to which a tile adds; the tile's rows of dB."""
        out: Arrays = {}
        gn = a.get("gn")
        for name, target in zip(("ggate", "gup"), GATE_UP, strict=True):
            g = a[name]
            part = self.product_backward(g, a, target).astype(self.sums)
            gn = part if gn is None else gn + part
            if self.has(target):
                gs = self.settings.scale * g
                out[f"{target}.dB"] = self.outer(gs, a[f"{target}.h"])
                # A tile has only some of the outputs: its rows of dB are whole, but gh is a sum over all tiles.
                gh = (gs @ a[f"{target}.B"].astype(gs.dtype)).astype(self.sums)
                out[f"{target}.gh"] = a[f"{target}.gh"] + gh if f"{target}.gh" in a else gh
        return {"gn": gn, **out}

    def mlp_norm_backward(self, a: Arrays) -> Arrays:
        """Return the gradient of m, and whole gradients of gate, up and down."""
        gn, out = a["gn"], {}
        for own in self.settings.gate_up_targets:
            if self.has(own):
                rows = GATE_UP if self.traits.fused else (own,)
                gh = sum((a[f"{target}.gh"] for target in rows[1:]), a[f"{rows[0]}.gh"])
                out[f"{own}.dA"] = self.outer(gh, a["mn"])
                out[f"{own}.dB"] = _concatenated(
                    [joined(a, f"{target}.dB", 0) for target in rows], 0
                )
                gn = gn + gh @ a[f"{own}.A"]
        if self.has("down_proj"):
            out["down_proj.dA"] = joined(a, "down_proj.dA", 1)
            out["down_proj.dB"] = self.outer(
                self.settings.scale * a.get("gb", a["g"]), a["down_proj.h"]
            )
        gm = a["g"].astype(self.sums) + self.normed_backward(a, "before_mlp", a["m"], gn)
        return {"gm": gm.astype(self.dtype), **out}

    # Attention, backward.

    def out_backward(self, a: Arrays) -> Arrays:
        """Compute gm, all chunks of o -> the gradient of o."""
        out: Arrays = {}
        o, g = joined(a, "o", 1), self.scaled(a["gm"])
        if self.settings.norm("after_attention"):
            y = self.linear(o, a, "o_proj", a.get("o_proj.h"))
            g = self.normed_backward(a, "after_attention", y, g).astype(self.dtype)
        return {"go": self.linear_backward(o, g, a, "o_proj", out), **out}

    def attend_backward(self, a: Arrays) -> Arrays:
        """Compute a chunk of q and go, keys and values up to its end -> its gq; gk and gv of all tokens so far (A.2).

        Chunks come last first, so that the first one makes gk and gv of the whole sequence.
        """
        q, k, v = a["q"], a["k"], a["v"]
        rows, _, queries, width = q.shape
        p, go = self._probabilities(q, k, a.get("window.weight")), self._split_heads(a["go"])
        gv = p.swapaxes(-1, -2) @ go
        gp = go @ v.swapaxes(-1, -2)
        gs = (
            p * (gp - mx.sum(gp * p, axis=-1, keepdims=True)) * self.score_scale
        )  # the softmax's Jacobian, row by row
        gk = gs.swapaxes(-1, -2) @ q.reshape(*go.shape)
        gq = (gs @ k).reshape(rows, -1, queries, width)
        return {
            "gq": gq,
            "gk": _added(a.get("gk"), gk.astype(self.sums)),
            "gv": _added(a.get("gv"), gv.astype(self.sums)),
        }

    def rope_backward(self, a: Arrays) -> Arrays:
        """Rotate gq of all chunks, and gk, back."""
        gk = a["gk"].astype(self.dtype)
        return {"gq": self._rotate(joined(a, "gq", 2), -1.0, a), "gk": self._rotate(gk, -1.0, a)}

    def head_norms_backward(self, a: Arrays) -> Arrays:
        """Compute gq and gk before the norms of q and k, which are computed again of n."""
        heads: Arrays = {}
        for target in self.settings.attention_targets[:2]:
            heads |= self._named_heads(target, self.linear(a["n"], a, target, a.get(f"{target}.h")))
        gradients = {
            name: self.normed_backward(a, name, heads[name], self._flat(a[f"g{name}"]))
            for name in "qk"
        }
        return {f"g{name}": self._by_head(g).astype(self.dtype) for name, g in gradients.items()}

    def project_backward(self, a: Arrays) -> Arrays:
        """Compute gq, gk, gv -> the gradient of n."""
        gn, out = None, {}
        for target in self.settings.attention_targets:
            names = "qkv" if self.traits.fused else target[0]
            g = _concatenated([self._flat(a[f"g{name}"]) for name in names], -1)
            part = self.linear_backward(a["n"], g, a, target, out)
            gn = part if gn is None else gn + part
        return {"gn": gn, **out}

    def norm_backward(self, a: Arrays) -> Arrays:
        """Return the gradient of the block's input."""
        gx = a["gm"].astype(self.sums) + self.normed_backward(
            a, "before_attention", a["x"], a["gn"]
        )
        return {"g": gx.astype(self.dtype)}


def _row_tiles(weight: Any) -> list[tuple[int, int]]:
    """Return ranges of a matrix's rows that are dense at once."""
    rows = weight.shape[0]
    return [(low, min(low + DENSE_ROWS, rows)) for low in range(0, rows, DENSE_ROWS)]


def joined(a: Arrays, name: str, axis: int) -> Any:
    """Join `name@0`, `name@1` ..., of chunks or tiles, into one."""
    parts = []
    while f"{name}@{len(parts)}" in a:
        parts.append(a[f"{name}@{len(parts)}"])
    return _concatenated(parts, axis)


def _concatenated(parts: list[Any], axis: int) -> Any:
    return mx.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]


def _added(total: Any, part: Any) -> Any:
    """`part`, of the first tokens, added to `total` [B, K, T, h]."""
    if total is None or total.shape[2] == part.shape[2]:
        return part if total is None else total + part
    count = part.shape[2]
    return mx.concatenate([total[:, :, :count] + part, total[:, :, count:]], axis=2)
