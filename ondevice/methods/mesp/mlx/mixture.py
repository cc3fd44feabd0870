"""The stages of a mixture of experts, forward and backward, derived by hand: each token passes its own experts alone.

With p = softmax(n R^T) over all experts, a token's experts are the K largest of p, and their weights w are these p, or
p divided by their sum. With y = sum_k w_k e_k(n) and g its gradient, an expert's activated gate has w_k (g D_k), and
w_k has <g, e_k(n)> = <g D_k, act_k>; so no expert's output is computed a second time. What w has goes on through the
softmax into n; the choice itself has no gradient.

Shapes, beside those of `stages`: N tokens of a chunk, E experts, K of a token, F the width of an expert.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ondevice.methods.mesp.mlx.model import ModelStages
from ondevice.methods.mesp.mlx.stages import Arrays, joined


class MixtureStages(ModelStages):
    """All stages of a model whose MLPs are mixtures of experts, maybe with an expert for all tokens."""

    def mixture(self, a: Arrays) -> Arrays:
        """Compute a chunk of m -> the next block's input: m and the weighted sum of each token's experts."""
        n, _, chosen, w = self._routed(a)
        gate, up = self._gate_up(n, a, chosen)
        out = self._times(self._activated(gate)[0] * up, a, "experts.down", chosen)
        y = mx.sum(out.astype(self.sums) * w[..., None], axis=1)
        if self.settings.shared:
            y = y + self._for_all(n, a)[0].astype(self.sums)
        return {"x": (a["m"].astype(self.sums) + y.reshape(a["m"].shape)).astype(self.dtype)}

    def mixture_end(self, a: Arrays) -> Arrays:
        """Join the chunks of x."""
        return {"x": joined(a, "x", 1)}

    def mixture_backward(self, a: Arrays) -> Arrays:
        """Compute a chunk of m, and of g, the gradient of the block's output -> that of m."""
        n, p, chosen, w = self._routed(a)
        gate, up = self._gate_up(n, a, chosen)
        (activated, slope), g = self._activated(gate), a["g"].reshape(n.shape)
        gd = self._times(g[:, None], a, "experts.down", chosen, transpose=False)
        gw = mx.sum((gd * activated * up).astype(self.sums), axis=-1)
        gact = gd * w[..., None].astype(gd.dtype)
        both = mx.concatenate([gact * up * slope, gact * activated], axis=-1)
        gn = mx.sum(
            self._times(both, a, "experts.gate_up", chosen, transpose=False).astype(self.sums),
            axis=1,
        )
        taken = mx.take_along_axis(p, chosen, axis=-1)
        if self.settings.normalised:
            gw = (gw - mx.sum(gw * w, axis=-1, keepdims=True)) / mx.sum(
                taken, axis=-1, keepdims=True
            )
        inner = mx.sum(gw * taken, axis=-1, keepdims=True)
        glogits = p * (mx.put_along_axis(mx.zeros_like(p), chosen, gw, axis=-1) - inner)
        gn = gn + glogits @ a["router.weight"].astype(self.sums)
        if self.settings.shared:
            gn = gn + self._for_all_backward(n, g, a)
        gm = self.normed_backward(a, "before_mlp", a["m"], gn.reshape(a["m"].shape))
        return {"gm": (a["g"].astype(self.sums) + gm).astype(self.dtype)}

    def mixture_join(self, a: Arrays) -> Arrays:
        """Join the chunks of gm."""
        return {"gm": joined(a, "gm", 1)}

    def _routed(self, a: Arrays) -> tuple[Any, Any, Any, Any]:
        """The norm [N, D], p [N, E], the chosen experts [N, K] and their weights, float32."""
        n = self.normed(a, "before_mlp", a["m"])
        n = n.reshape(-1, n.shape[-1])
        p = mx.softmax(
            (n @ a["router.weight"].astype(n.dtype).T).astype(self.sums), axis=-1, precise=True
        )
        chosen = mx.argsort(-p, axis=-1)[:, : self.settings.active_experts]
        w = mx.take_along_axis(p, chosen, axis=-1)
        return (
            n,
            p,
            chosen,
            w / mx.sum(w, axis=-1, keepdims=True) if self.settings.normalised else w,
        )

    def _gate_up(self, n: Any, a: Arrays, chosen: Any) -> tuple[Any, Any]:
        """Of each token's experts, [N, K, F] each."""
        gate, up = mx.split(self._times(n[:, None], a, "experts.gate_up", chosen), 2, axis=-1)
        return gate, up

    def _times(self, x: Any, a: Arrays, name: str, chosen: Any, transpose: bool = True) -> Any:
        """[N, K or 1, ...] times the matrix of each one's expert, or its transpose: [N, K, ...]."""
        weight, x = a[f"{name}.weight"], x[:, :, None]
        if f"{name}.scales" not in a:
            weight = weight.astype(x.dtype)
            return mx.gather_mm(
                x, weight.swapaxes(-1, -2) if transpose else weight, rhs_indices=chosen
            )[:, :, 0]
        parts = (a[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        options = {
            "group_size": self.settings.group_size,
            "bits": self.settings.bits,
            "transpose": transpose,
        }
        return mx.gather_qmm(x, *parts, rhs_indices=chosen, **options)[:, :, 0].astype(x.dtype)

    # The expert for all tokens: its share, a number of the token, times a gated MLP.

    def _for_all(self, n: Any, a: Arrays) -> tuple[Any, Any, Any, Any, Any]:
        """Its part of y, and what that is made of: share, its own output, gate and up."""
        share = mx.sigmoid(n @ a["shared_gate.weight"].astype(n.dtype).T)
        gate, up = self.product(n, a, "shared.gate"), self.product(n, a, "shared.up")
        out = self.product(self._activated(gate)[0] * up, a, "shared.down")
        return share * out, share, out, gate, up

    def _for_all_backward(self, n: Any, g: Any, a: Arrays) -> Any:
        """Its part of the gradient of n, float32."""
        _, share, out, gate, up = self._for_all(n, a)
        gshare = mx.sum(g * out, axis=-1, keepdims=True) * share * (1 - share)
        activated, slope = self._activated(gate)
        gact = self.product_backward(g * share, a, "shared.down")
        gn = gshare @ a["shared_gate.weight"].astype(n.dtype)
        gn = gn + self.product_backward(gact * up * slope, a, "shared.gate")
        return (gn + self.product_backward(gact * activated, a, "shared.up")).astype(self.sums)
