"""What lies before and after the blocks: embedding, final norm, and the cross-entropy in tiles of the vocabulary.

The cross-entropy goes over the vocabulary twice: the first time for the log-sum-exp, the second for the gradient.
So a tile's logits are dead before the next tile's exist. Shapes: N labelled tokens, V rows of a tile.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ondevice.methods.mesp.mlx.stages import Arrays, Stages


class ModelStages(Stages):
    """All stages of a model."""

    def embed(self, a: Arrays) -> Arrays:
        """The embedding's rows of each token, packed or dense [N, ...] -> x [N, D]."""
        return {"x": self._rows(a, "rows", self.dtype)}

    def _rows(self, a: Arrays, name: str, dtype: Any) -> Any:
        return self._dense(a, name, dtype) if f"{name}.scales" in a else a[f"{name}.weight"].astype(dtype)

    def final_norm(self, a: Arrays) -> Arrays:
        """x [B, T, D] -> hn."""
        return {"hn": self.rms_norm(a["x"], a["final_norm.weight"])}

    def final_norm_backward(self, a: Arrays) -> Arrays:
        """The gradient of hn [B, T, D], float32 -> g, that of the last block's output."""
        return {"g": self.rms_norm_backward(a["x"], a["final_norm.weight"], a["ghn"]).astype(self.dtype)}

    def loss_begin(self, a: Arrays) -> Arrays:
        """hn [N, D] and the head's rows of the labels -> their logits, and the empty log-sum-exp, float32 [N]."""
        hn = a["hn"].astype(self.sums)
        target = mx.sum(hn * self._rows(a, "rows", self.dtype).astype(self.sums), axis=-1)
        return {
            "target": target,
            "maximum": mx.full(target.shape, -mx.inf, dtype=self.sums),
            "total": mx.zeros(target.shape, dtype=self.sums),
        }

    def loss_tile(self, a: Arrays) -> Arrays:
        """The running maximum, and the sum of exponentials below it, after the tile's V logits."""
        logits = self.product(a["hn"], a, "head").astype(self.sums)
        larger = mx.maximum(a["maximum"], mx.max(logits, axis=-1))
        total = a["total"] * mx.exp(a["maximum"] - larger) + mx.sum(mx.exp(logits - larger[:, None]), axis=-1)
        return {"maximum": larger, "total": total}

    def loss_end(self, a: Arrays) -> Arrays:
        """nll, the negative log likelihood of each label, and the log-sum-exp."""
        logsumexp = a["maximum"] + mx.log(a["total"])
        return {"nll": logsumexp - a["target"], "logsumexp": logsumexp}

    def loss_begin_backward(self, a: Arrays) -> Arrays:
        """weight [N], the gradient of each nll -> the label's part of gh, float32 [N, D]."""
        return {"gh": -a["weight"][:, None] * self._rows(a, "rows", self.dtype).astype(self.sums)}

    def loss_tile_backward(self, a: Arrays) -> Arrays:
        """gh with the tile's part: weight softmax(logits) W."""
        logits = self.product(a["hn"], a, "head").astype(self.sums)
        share = mx.exp(logits - a["logsumexp"][:, None]) * a["weight"][:, None]
        gh = self.product_backward(share.astype(self.dtype), a, "head")
        return {"gh": a["gh"] + gh.astype(self.sums)}
