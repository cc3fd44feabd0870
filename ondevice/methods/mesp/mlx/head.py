"""What lies before and after the blocks: embedding, final norm, cross-entropy in tiles of the vocabulary, updates.

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

    def gather_rows(self, a: Arrays) -> Arrays:
        """Rows `place` int32 [N] of hidden states [B T, D]."""
        return {"hn": mx.take(a["all"], a["place"], axis=0)}

    def scatter_rows(self, a: Arrays) -> Arrays:
        """gh added to rows `place` of ghn, float32 [B T, D]."""
        return {"ghn": a["ghn"].at[a["place"]].add(a["gh"])}

    def sgd(self, a: Arrays) -> Arrays:
        """value kept - rate gradient; `kept` is 1 - learning rate times weight decay."""
        return {"value": a["value"] * a["kept"] - a["rate"] * a["gradient"]}

    def adamw(self, a: Arrays) -> Arrays:
        """As `torch.optim.AdamW`, one matrix.

        `rate` is learning rate / (1 - beta1^t), `kept` as for `sgd`, `root` sqrt(1 - beta2^t), all float32 [];
        `constants` are beta1, beta2 and eps.
        """
        beta1, beta2, eps = (a["constants"][i] for i in range(3))
        first = beta1 * a["first"] + (1 - beta1) * a["gradient"]
        second = beta2 * a["second"] + (1 - beta2) * mx.square(a["gradient"])
        moved = a["rate"] * (first / (mx.sqrt(second) / a["root"] + eps))
        return {"value": a["value"] * a["kept"] - moved, "first": first, "second": second}
