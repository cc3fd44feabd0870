"""Linear layers with LoRA, and norms, forward and backward, derived by hand (appendix A): what the stages are made of.

Weights are dense or packed. Sums over tokens and over tiles are float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ondevice.methods.mesp.mlx.settings import NORMS

if TYPE_CHECKING:
    from ondevice.methods.mesp.mlx.settings import Settings

Arrays = dict[str, Any]
DENSE_ROWS = 512
"""Rows of a packed matrix that are made dense at once, where they are."""


class Layers:
    """Products, norms and their gradients, in the precision of a run."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.dims, self.traits = settings, settings.dims, settings.dims.traits
        self.dtype = getattr(mx, settings.dtype)
        self.sums = mx.float32

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
            part = self._dense(a, name, x.dtype, low, high) if packed else weight[low:high].astype(x.dtype)
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

    def _dense(self, a: Arrays, name: str, dtype: Any, low: int = 0, high: int | None = None) -> Any:
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
        return g.reshape(-1, g.shape[-1]).astype(self.sums).T @ x.reshape(-1, x.shape[-1]).astype(self.sums)

    # RMSNorm, appendix A.3.

    def rms_norm(self, x: Any, weight: Any) -> Any:
        if weight.dtype != x.dtype:  # 1 + w in float32
            return mx.fast.rms_norm(x.astype(weight.dtype), weight, self.dims.norm_eps).astype(x.dtype)
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
        return self.rms_norm_backward(x.reshape(by_head), weight, g.reshape(by_head)).reshape(x.shape)

    def scaled(self, x: Any) -> Any:
        """Return a branch, or its gradient, times the model's factor."""
        return x if self.traits.residual_scale == 1.0 else x * self.traits.residual_scale


def _row_tiles(weight: Any) -> list[tuple[int, int]]:
    """Return ranges of a matrix's rows that are dense at once."""
    rows = weight.shape[0]
    return [(low, min(low + DENSE_ROWS, rows)) for low in range(0, rows, DENSE_ROWS)]
