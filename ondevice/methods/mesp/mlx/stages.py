"""The stages of a model as pure functions of arrays, and their vector-Jacobian products.

A stage takes arrays by name and returns arrays by name; `instructions` lists both. A stage keeps
nothing. `STAGE_backward` is `mx.vjp` of `STAGE`: no gradient is derived by hand, but every stage
ends before the next begins, so only one stage's activations exist at a time.

Shapes: B rows, T tokens, D hidden, H query heads, K key heads, G = H / K, h head_dim, F a tile of
the MLP's inner dimension, C queries of a chunk, S keys that they see. x, m [B, T, D]: a block's
input, and the residual stream between attention and MLP. q [B, H, T, h], k and v [B, K, T, h],
o [B, C, H h]. A float32 [rank, inputs], B float32 [outputs, rank]. Sums over tiles are float32.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ondevice.methods.mesp.mlx.settings import GATE_UP, NORMS, ranges

if TYPE_CHECKING:
    from ondevice.methods.mesp.mlx.settings import Settings

Arrays = dict[str, Any]
BACKWARD = "_backward"
DENSE_ROWS = 512
"""Rows of a packed matrix that a forward pass makes dense at once."""
FROZEN = (".weight", ".scales", ".biases", ".bias")
"""Ends of the names of inputs that have no gradient."""
GELU = math.sqrt(2 / math.pi)
SUMMED = ("n", "k", "v", "hn", "gate_proj.h", "up_proj.h", "gate_up_proj.h")
"""Inputs whose gradients several tiles or chunks add up, in float32."""


class Stages:
    """The functions of one run; every public method that takes and returns arrays is a stage."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.dims = settings.dims
        self.traits = settings.dims.traits
        self.dtype = getattr(mx, settings.dtype)
        self.sums = mx.float32

    def call(self, stage: str, arrays: Arrays) -> Arrays:
        """Run `stage`, or the vector-Jacobian product of one."""
        if hasattr(self, stage):
            return getattr(self, stage)(arrays)
        return self.backward(stage.removesuffix(BACKWARD), arrays)

    def backward(self, stage: str, arrays: Arrays) -> Arrays:
        """Return `g.NAME` for each input of `stage` that is not frozen.

        Takes the stage's inputs, `g.NAME` for some of its outputs (in chunks `g.NAME@0` ...), and
        `sum.NAME`, to which that input's gradient is added.
        """
        inputs = {key: a for key, a in arrays.items() if not key.startswith(("g.", "sum."))}
        outputs = sorted({key[2:].partition("@")[0] for key in arrays if key.startswith("g.")})
        names = [key for key in inputs if not key.endswith(FROZEN)]
        gradients = [joined(arrays, f"g.{name}", 2 if name == "q" else 1) for name in outputs]

        def run(*values: Any) -> list[Any]:
            made = getattr(self, stage)(inputs | dict(zip(names, values, strict=True)))
            return [made[name].astype(g.dtype) for name, g in zip(outputs, gradients, strict=True)]

        _, products = mx.vjp(run, [inputs[name] for name in names], gradients)
        results = {}
        for name, g in zip(names, products, strict=True):
            total = arrays.get(f"sum.{name}")
            if total is not None or name in SUMMED:
                g = g.astype(self.sums)
            results[f"g.{name}"] = added(total, g)
        return results

    # Linear layers: y = x W^T + b + s (x A^T) B^T, appendix A.1.

    def product(self, x: Any, a: Arrays, name: str) -> Any:
        """Compute x W^T for a dense or packed W [outputs, inputs], in the precision of x."""
        weight = a[f"{name}.weight"]
        packed = f"{name}.scales" in a
        if not packed and weight.dtype == x.dtype:
            return x @ weight.T
        if packed and self.settings.product == "quantized":
            parts = (a[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
            return mx.quantized_matmul(x, *parts, transpose=True, **self.packing).astype(x.dtype)
        tiles: list[Any] = []
        for low, high in row_tiles(weight):
            # Each tile waits for the one before it: MLX would else make all of them dense at once.
            if tiles:
                x = mx.depends([x], tiles[-1:])[0]
            tiles.append(x @ self.rows(a, name, x.dtype, low, high).T)
        return _concatenated(tiles, -1)

    @property
    def packing(self) -> dict[str, Any]:
        """How a packed matrix is packed, as MLX's functions take it."""
        return {"group_size": self.settings.group_size, "bits": self.settings.bits}

    def rows(self, a: Arrays, name: str, dtype: Any, low: int = 0, high: int | None = None) -> Any:
        """Return rows of a dense or packed matrix in `dtype`."""
        if f"{name}.scales" not in a:
            return a[f"{name}.weight"][low:high].astype(dtype)
        parts = (a[f"{name}.{part}"][low:high] for part in ("weight", "scales", "biases"))
        return mx.dequantize(*parts, **self.packing).astype(dtype)

    def linear(self, x: Any, a: Arrays, target: str, h: Any = None) -> Any:
        """Compute a linear layer with its adapter, if it has one; `h` is x A^T if it is known."""
        y = self.product(x, a, target)
        if f"{target}.bias" in a:
            y = y + a[f"{target}.bias"].astype(y.dtype)
        if f"{target}.B" in a:
            y = y + self.lora(x, a, target, h)
        return y

    def lora(self, x: Any, a: Arrays, target: str, h: Any = None) -> Any:
        """Compute s (x A^T) B^T."""
        if h is None:
            h = self.h(x, a, target)
        return self.settings.scale * (h @ a[f"{target}.B"].astype(h.dtype).T)

    def h(self, x: Any, a: Arrays, target: str) -> Any:
        """Compute x A^T."""
        return x @ a[f"{target}.A"].astype(x.dtype).T

    def rms_norm(self, x: Any, weight: Any) -> Any:
        """Compute appendix A.3's RMSNorm in the weight's precision; it is x's, or float32."""
        return mx.fast.rms_norm(x.astype(weight.dtype), weight, self.dims.norm_eps).astype(x.dtype)

    def normed(self, a: Arrays, name: str, x: Any) -> Any:
        """Return x after that norm, if there is one; by head, if its weight is of a head's width."""
        weight = a.get(f"{name}.weight")
        if weight is None:
            return x
        by_head = x.reshape(*x.shape[:-1], -1, weight.shape[0])
        return self.rms_norm(by_head, weight).reshape(x.shape)

    def scaled(self, x: Any) -> Any:
        """Return a branch times the model's factor."""
        return x if self.traits.residual_scale == 1.0 else x * self.traits.residual_scale

    # Attention.

    def norm(self, a: Arrays) -> Arrays:
        """Compute x -> its norm n."""
        return {"n": self.normed(a, NORMS["before_attention"], a["x"])}

    def project(self, a: Arrays) -> Arrays:
        """Compute n -> y, a linear layer's output by head; or q, k and v of a fused layer."""
        y = self.linear(a["n"], a, "linear")
        heads = {"y": y}
        if self.traits.fused:
            q = self.dims.heads * self.dims.head_dim
            k_end = q + self.dims.kv_heads * self.dims.head_dim
            heads = dict(zip("qkv", mx.split(y, [q, k_end], axis=-1), strict=True))
        return {name: self._by_head(a, name, y) for name, y in heads.items()}

    def _by_head(self, a: Arrays, name: str, y: Any) -> Any:
        """Norm y [B, T, heads h], if it has a norm, and split it by head."""
        norm = a.get(f"{name}.norm.weight")
        width = self.dims.head_dim
        if norm is not None and not self.traits.qk_norm_all:
            width = norm.shape[0]
        y = self.normed(a, f"{name}.norm", y)
        return y.reshape(*y.shape[:2], -1, width).transpose(0, 2, 1, 3)

    def project_keys(self, a: Arrays) -> Arrays:
        """Compute n -> y, the keys by head, and v, the values, which are keys with their own norm."""
        y = self.linear(a["n"], a, "linear")
        return {name: self._by_head(a, name, y) for name in "yv"}

    def project_keys_frozen(self, a: Arrays) -> Arrays:
        """Compute `project_keys` of a layer without an adapter."""
        return self.project_keys(a)

    def project_gated(self, a: Arrays) -> Arrays:
        """Compute n -> y, the queries by head, and the gate of attention's output [B, T, H h]: in
        the linear layer's output it is behind each head's query."""
        y = self.linear(a["n"], a, "linear")
        y = y.reshape(*y.shape[:2], self.dims.heads, -1)
        y, gate = mx.split(y, 2, axis=-1)
        gate = gate.reshape(*gate.shape[:2], -1)
        return {"y": self.normed(a, "y.norm", y).transpose(0, 2, 1, 3), "gate": gate}

    def project_gated_frozen(self, a: Arrays) -> Arrays:
        """Compute `project_gated` of a layer without an adapter."""
        return self.project_gated(a)

    def project_frozen(self, a: Arrays) -> Arrays:
        """Compute `project` of a layer without an adapter: its gradients have other names."""
        return self.project(a)

    def take_apart(self, a: Arrays) -> Arrays:
        """Compute q, k and v [B, H, T, h], or bcx [B, T, 3 D], of rows `apart` [R, L]."""
        found = {}
        for name, x in a.items():
            if name != "apart":
                tokens = x.swapaxes(1, -2).reshape(-1, *(x.swapaxes(1, -2).shape[2:]))
                found[name] = mx.take(tokens, a["apart"], axis=0).swapaxes(1, -2)
        return found

    def put_together(self, a: Arrays) -> Arrays:
        """Compute all chunks of o [R, L, H h] -> o [B, T, H h], of places `together`."""
        o = joined(a, "o", 1)
        return {"o@0": mx.take(o.reshape(-1, o.shape[-1]), a["together"], axis=0)}

    def rope(self, a: Arrays) -> Arrays:
        """Rotate q and k by their positions, which begin at `offset` if there is one."""
        return {name: self._rotate(a[name], a) for name in "qk"}

    def rope_queries(self, a: Arrays) -> Arrays:
        """Compute `rope` of a layer that attends to another's keys: a stage has one set of outputs."""
        return {"q": self._rotate(a["q"], a)}

    def _rotate(self, x: Any, a: Arrays) -> Any:
        """Rotate [B, heads, T, h] by its positions."""
        rope = self.settings.rope
        width = self.settings.rotary_width
        own = a.get("rope.weight")
        factor: Any = rope.factor
        waves = rope.wavelengths
        offset = a.get("offset", 0)
        if rope.longer is not None and offset + x.shape[2] > rope.trained_tokens:
            waves = rope.longer
        options: dict[str, Any] = {"base": rope.theta, "scale": rope.scale}
        if own is not None:
            width = 2 * own.shape[1]
            options = {"base": None, "scale": 1.0, "freqs": own[0]}
            factor = own[1, 0]
        elif waves is not None:
            options |= {"base": None, "freqs": mx.array(waves, dtype=mx.float32)}
        y = mx.fast.rope(x, width, traditional=False, offset=offset, **options)
        if rope.factor == 1.0:
            return y
        return (y * mx.where(mx.arange(x.shape[3]) < width, factor, 1.0)).astype(y.dtype)

    def attend(self, a: Arrays) -> Arrays:
        """Compute q [B, H, C, h] of a chunk, k and v [B, K, S, h] up to its end -> o [B, C, H h].

        The last query sees all S keys, or those of its window.
        """
        q, k = a["q"], a["k"]
        rows, _, queries, width = q.shape
        _, kv_heads, keys, _ = k.shape
        scores = (q.reshape(rows, kv_heads, -1, width) * self.score_scale) @ k.swapaxes(-1, -2)
        behind = mx.arange(keys - queries, keys)[:, None] - mx.arange(keys)[None]
        seen = behind >= 0
        if "window.weight" in a:
            seen = seen & (behind < a["window.weight"])
        scores = mx.where(seen, scores.reshape(rows, kv_heads, -1, queries, keys), -mx.inf)
        p = mx.softmax(scores, axis=-1, precise=True).reshape(rows, kv_heads, -1, keys)
        o = (p @ a["v"]).reshape(rows, -1, queries, width)
        return {"o": o.transpose(0, 2, 1, 3).reshape(rows, queries, -1)}

    @property
    def score_scale(self) -> float:
        """Factor of the scores."""
        return self.traits.score_scale or self.dims.head_dim**-0.5

    # A short convolution in the place of attention: o = c * conv(b * x), of b, c and x [B, T, D].

    def project_plain(self, a: Arrays) -> Arrays:
        """Compute n -> y, a linear layer's output as it is: b, c and x in one array [B, T, 3 D]."""
        return {"y": self.linear(a["n"], a, "linear")}

    def project_plain_frozen(self, a: Arrays) -> Arrays:
        """Compute `project_plain` of a layer without an adapter: its gradients have other names."""
        return self.project_plain(a)

    def out(self, a: Arrays) -> Arrays:
        """Compute x, all chunks of o -> m = x + o Wo^T."""
        y = self.normed(a, NORMS["after_attention"], self.linear(joined(a, "o", 1), a, "o_proj"))
        return {"m": a["x"] + self.scaled(y)}

    def out_gated(self, a: Arrays) -> Arrays:
        """Compute `out` of all chunks of o times the sigmoid of their gate."""
        o = joined(a, "o", 1) * mx.sigmoid(a["gate"])
        rest = {name: value for name, value in a.items() if not name.startswith("o@")}
        return self.out(rest | {"o": o})

    # MLP.

    def mlp_norm(self, a: Arrays) -> Arrays:
        """Compute m -> its norm n, h of gate and up, and y, to which tiles are added: m, or 0."""
        n = self.normed(a, NORMS["before_mlp"], a["m"])
        y = a["m"].astype(self.sums)
        if self.settings.branch_apart:
            y = mx.zeros_like(y)
        if "down_proj.bias" in a:
            y = y + a["down_proj.bias"].astype(self.sums)
        trained = [own for own in self.settings.gate_up_targets if f"{own}.A" in a]
        return {"n": n, "y": y, **{f"{own}.h": self.h(n, a, own) for own in trained}}

    def mlp(self, a: Arrays) -> Arrays:
        """Compute n -> a tile's part of the MLP's output, added to y if there is one."""
        h = (a.get(f"{self.settings.place(target)[0]}.h") for target in GATE_UP)
        gate, up = (self.linear(a["n"], a, *pair) for pair in zip(GATE_UP, h, strict=True))
        act = self.activated(gate) * up
        y = self.product(act, a, "down_proj").astype(self.sums)
        if self.settings.has("down_proj"):
            y = y + self.lora(act, a, "down_proj")
        if "y" in a:
            y = a["y"] + y
        return {"y": y}

    def activated(self, gate: Any) -> Any:
        """Return silu(gate), or gelu = gate (1 + tanh u) / 2.

        u = sqrt(2 / pi) (gate + 0.044715 gate^3).
        """
        if self.traits.activation == "silu":
            return gate * mx.sigmoid(gate)
        tanh = mx.tanh(GELU * gate * (1 + 0.044715 * (gate * gate)))
        return 0.5 * gate * (1 + tanh)

    def mlp_join(self, a: Arrays) -> Arrays:
        """Join the gradients of tiles: of gate's and up's B, and of down's A and B."""
        out = {}
        for own in self.settings.gate_up_targets:
            if own in self.settings.target_modules:
                rows = [row for row in GATE_UP if self.settings.place(row)[0] == own]
                out[f"{own}.dB"] = _concatenated([joined(a, f"{row}.B", 0) for row in rows], 0)
        if self.settings.has("down_proj"):
            out |= {"down_proj.dA": joined(a, "down_proj.A", 1), "down_proj.dB": a["down_proj.B"]}
        return out

    def end(self, a: Arrays) -> Arrays:
        """Compute y -> the next block's input in the dtype of activations.

        That is y; or m + y's norm times the model's factor, if the block has such. With experts next
        to the MLP y is the sum of both, each with its norm.
        """
        y = a["y"]
        if self.settings.beside:
            y = self.normed(a, NORMS["after_dense"], y) + joined(a, "r", 1)
        if self.settings.branch_apart:
            y = a["m"].astype(self.sums) + self.scaled(self.normed(a, NORMS["after_mlp"], y))
        return {"x": y.astype(self.dtype)}

    def behind(self, a: Arrays) -> Arrays:
        """Compute e, the sum with the MLP -> the next block's input.

        That is e, plus the norm of out(act(gate(e)) input) if the layer has an input, times the
        block's factor.
        """
        e = a["e"]
        if "input.weight" in a:
            gated = self.activated(self.linear(e, a, "layer_gate")) * a["input.weight"]
            own = self.linear(gated.astype(e.dtype), a, "layer_out")
            e = e + self.scaled(self.normed(a, NORMS["after_layer_input"], own))
        if "output_scale.weight" in a:
            e = e * a["output_scale.weight"].astype(e.dtype)
        return {"x": e}

    def layer_input(self, a: Arrays) -> Arrays:
        """Compute x [B, T, D], the first block's input, and the tokens' rows [B T, W] of a layer's
        embeddings -> what the layer reads of them [B, T, W]."""
        projected = self.product(a["x"], a, "layer_projection") * self.dims.hidden**-0.5
        normed = self.normed(a, "layer_input_norm", projected)
        rows = self.rows(a, "rows", self.dtype).reshape(normed.shape)
        return {"input": (normed + rows * self.traits.layer_input**0.5) * 2.0**-0.5}

    # Before and after the blocks. The cross-entropy goes over the vocabulary twice: first for the
    # log-sum-exp, then for the gradient, so that a tile's logits are dead before the next exist.
    # N labelled tokens, V rows of a tile.

    def embed(self, a: Arrays) -> Arrays:
        """Compute the embedding's rows of each token, packed or dense [N, ...] -> x [N, D]."""
        x = self.rows(a, "rows", self.dtype)
        if self.traits.embedding_scale != 1.0:
            x = x * self.traits.embedding_scale
        return {"x": x}

    def final_norm(self, a: Arrays) -> Arrays:
        """Compute x [B, T, D] -> hn."""
        return {"hn": self.rms_norm(a["x"], a["final_norm.weight"])}

    def capped(self, logits: Any) -> Any:
        """Return logits with the model's soft cap."""
        cap = self.traits.logit_cap
        return cap * mx.tanh(logits / cap) if cap else logits

    def loss_begin(self, a: Arrays) -> Arrays:
        """Begin the loss: hn [N, D] and the head's rows of the labels -> float32 [N] each.

        `target` is minus the label's logit; `maximum` and `total` are an empty log-sum-exp.
        """
        rows = self.rows(a, "rows", self.dtype).astype(self.sums)
        target = -self.capped(mx.sum(a["hn"].astype(self.sums) * rows, axis=-1))
        empty = mx.zeros(target.shape, dtype=self.sums)
        return {"target": target, "maximum": empty - mx.inf, "total": empty}

    def loss_tile(self, a: Arrays) -> Arrays:
        """Return the running maximum, and the sum of exponentials below it, after the tile's V
        logits: float32 sums, as logits of half precision would all but hide what a step changes."""
        logits = self.capped(self.product(a["hn"].astype(self.sums), a, "head"))
        larger = mx.maximum(a["maximum"], mx.max(logits, axis=-1))
        total = a["total"] * mx.exp(a["maximum"] - larger) + mx.sum(
            mx.exp(logits - larger[:, None]), axis=-1
        )
        return {"maximum": larger, "total": total}

    def loss_end(self, a: Arrays) -> Arrays:
        """Return nll, the negative log likelihood of each label, and the log-sum-exp."""
        logsumexp = a["maximum"] + mx.log(a["total"])
        return {"nll": logsumexp + a["target"], "logsumexp": logsumexp}

    def loss_tile_backward(self, a: Arrays) -> Arrays:
        """Add weight softmax(logits) W of the tile to gh, float32 [N, D]; `weight` [N] is nll's.

        With the log-sum-exp known, this is the gradient of sum weight exp(logits - logsumexp).
        """
        gh = a["gh"]
        for low, high in row_tiles(a["head.weight"]):
            rows = {key: value[low:high] for key, value in a.items() if key.startswith("head.")}

            def run(hn: Any, rows: Arrays = rows) -> Any:
                logits = self.capped(self.product(hn.astype(self.sums), rows, "head"))
                return mx.exp(logits - a["logsumexp"][:, None]) * a["weight"][:, None]

            hn = mx.depends([a["hn"]], [gh])[0]
            _, (part,) = mx.vjp(run, [hn], [mx.ones((hn.shape[0], high - low))])
            gh = gh + part.astype(self.sums)
        return {"gh": gh}

    def gather_rows(self, a: Arrays) -> Arrays:
        """Return rows `place` int32 [N] of hidden states [B T, D]."""
        return {"hn": mx.take(a["all"], a["place"], axis=0)}

    def scatter_rows(self, a: Arrays) -> Arrays:
        """Add gh to rows `place` of ghn, float32 [B T, D]."""
        return {"ghn": a["ghn"].at[a["place"]].add(a["gh"])}

    def sgd(self, a: Arrays) -> Arrays:
        """Update one matrix: value kept - rate gradient; `kept` is 1 - learning rate times weight
        decay."""
        return {"value": a["value"] * a["kept"] - a["rate"] * a["gradient"]}

    def adamw(self, a: Arrays) -> Arrays:
        """Update one matrix as `torch.optim.AdamW` does.

        `rate` is learning rate / (1 - beta1^t), `kept` as for `sgd`, `root` sqrt(1 - beta2^t), all
        float32 []; `constants` are beta1, beta2 and eps.
        """
        beta1, beta2, eps = (a["constants"][i] for i in range(3))
        first = beta1 * a["first"] + (1 - beta1) * a["gradient"]
        second = beta2 * a["second"] + (1 - beta2) * mx.square(a["gradient"])
        moved = a["rate"] * (first / (mx.sqrt(second) / a["root"] + eps))
        return {"value": a["value"] * a["kept"] - moved, "first": first, "second": second}


def row_tiles(weight: Any) -> list[tuple[int, int]]:
    """Return ranges of a matrix's rows that are dense at once."""
    return ranges(weight.shape[0], DENSE_ROWS)


def joined(a: Arrays, name: str, axis: int) -> Any:
    """Return `name`, or join `name@0`, `name@1` ... of chunks or tiles."""
    if name in a:
        return a[name]
    parts = []
    while f"{name}@{len(parts)}" in a:
        parts.append(a[f"{name}@{len(parts)}"])
    return _concatenated(parts, axis)


def _concatenated(parts: list[Any], axis: int) -> Any:
    if len(parts) == 1:
        return parts[0]
    return mx.concatenate(parts, axis=axis)


def added(total: Any, part: Any) -> Any:
    """Add `part`, whose axis 2 may be shorter (the first tokens of keys), to `total`."""
    if total is None:
        return part
    if total.shape == part.shape:
        return total + part
    count = part.shape[2]
    return mx.concatenate([total[:, :, :count] + part, total[:, :, count:]], axis=2)
