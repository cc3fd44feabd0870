"""The stages of a mixture of experts: each token passes only its own experts.

With p = softmax(n R^T) over all experts, or the sigmoid of each, a token's experts are the K
largest of p, or of p and a bias. Their weights w are these p, or p divided by their sum, times a
factor, and maybe one of each expert. The choice itself has no gradient. Next to an MLP, router and
experts read norms of their own.

Shapes, in addition to those of `stages`: N tokens of a chunk, E experts, K of a token, F the width
of an expert.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ondevice.methods.mesp.mlx.recurrent import RecurrentStages
from ondevice.methods.mesp.mlx.settings import NORMS
from ondevice.methods.mesp.mlx.stages import Arrays, joined


class MixtureStages(RecurrentStages):
    """All stages of a model whose MLPs are mixtures of experts, maybe with a shared expert."""

    def mixture(self, a: Arrays) -> Arrays:
        """Compute a chunk of m -> the next block's input: m + the weighted sum of its experts."""
        n = self.normed(a, NORMS["before_mlp"], a["m"])
        n = n.reshape(-1, n.shape[-1])
        y = self._sum(n, n, a)
        if self.settings.shared:
            y = y + self._shared(n, a).astype(self.sums)
        y = self.scaled(y.reshape(a["m"].shape))
        return {"x": (a["m"].astype(self.sums) + y).astype(self.dtype)}

    def experts(self, a: Arrays) -> Arrays:
        """Compute a chunk of m -> r, what experts add to the MLP that they stand next to."""
        width = self.dims.hidden
        n = self.normed(a, NORMS["before_experts"], a["m"]).reshape(-1, width)
        read = self.rms_norm(a["m"], a["router_scale.weight"] * width**-0.5).reshape(-1, width)
        y = self._sum(n, read, a).reshape(a["m"].shape)
        return {"r": self.normed(a, NORMS["after_experts"], y)}

    def _sum(self, n: Any, read: Any, a: Arrays) -> Any:
        """The weighted sum of each token's experts, of n [N, D]; the router reads `read`."""
        logits = (read @ a["router.weight"].astype(read.dtype).T).astype(self.sums)
        traits = self.settings.routing
        if traits.scores == "sigmoid":
            p = mx.sigmoid(logits)
        else:
            p = mx.softmax(logits, axis=-1, precise=True)
        scores = p + a["router.bias"].astype(p.dtype) if traits.bias else p
        chosen = mx.argsort(mx.stop_gradient(-scores), axis=-1)[:, : self.settings.active_experts]
        w = mx.take_along_axis(p, chosen, axis=-1)
        if traits.normalised:
            w = w / (mx.sum(w, axis=-1, keepdims=True) + traits.least)
        w = w * traits.scale
        if "expert_scale.weight" in a:
            w = w * a["expert_scale.weight"].astype(w.dtype)[chosen]
        gate, up = mx.split(self._times(n[:, None], a, "experts.gate_up", chosen), 2, axis=-1)
        out = self._times(self.activated(gate) * up, a, "experts.down", chosen)
        return mx.sum(out.astype(self.sums) * w[..., None], axis=1)

    def mixture_end(self, a: Arrays) -> Arrays:
        """Join the chunks of x."""
        return {"x": joined(a, "x", 1)}

    def _times(self, x: Any, a: Arrays, name: str, chosen: Any) -> Any:
        """[N, K or 1, inputs] times the matrix of each one's expert: [N, K, outputs]."""
        weight = a[f"{name}.weight"]
        x = x[:, :, None]
        if f"{name}.scales" not in a:
            weight = weight.astype(x.dtype).swapaxes(-1, -2)
            return mx.gather_mm(x, weight, rhs_indices=chosen)[:, :, 0]
        parts = (a[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        y = mx.gather_qmm(x, *parts, rhs_indices=chosen, transpose=True, **self.packing)
        return y[:, :, 0].astype(x.dtype)

    def _shared(self, n: Any, a: Arrays) -> Any:
        """The shared expert: a gated MLP times a fraction of the token."""
        fraction = mx.sigmoid(n @ a["shared_gate.weight"].astype(n.dtype).T)
        up = self.product(n, a, "shared.up")
        act = self.activated(self.product(n, a, "shared.gate")) * up
        return fraction * self.product(act, a, "shared.down")
