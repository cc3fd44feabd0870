"""A Llama's forward pass for many adapters at once, for `benchmarks.prge.quality`.

Activations are [runs, copies, tokens, hidden]. The rows of a run's batch are packed one after
another, so that no layer but the attention sees padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.session import IGNORE
from ondevice.data.examples import Example
from ondevice.methods.prge.layout import AdapterLayout

QKV = ("q_proj", "k_proj", "v_proj")
LENGTHS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 96, 128, 192, 256, 512)
"""Padded lengths of the attention (tokens)."""


def rounded(tokens: int) -> int:
    """The packed length that holds so many tokens; few values, since each is a CUDA graph."""
    step = next(
        step for limit, step in ((128, 16), (256, 32), (512, 64), (1 << 30, 256)) if tokens <= limit
    )
    return -(-tokens // step) * step


class Rows:
    """Examples as jobs (what is scored) over distinct inputs, on the device.

    An input ends before the last labelled token, which is only predicted: two candidates that
    differ in it share one.
    """

    def __init__(self, examples: Sequence[Example], device: Any) -> None:
        inputs: dict[tuple[int, ...], int] = {}
        rows, places, targets = [], [], []
        for example in examples:
            labelled = [t for t, label in enumerate(example.labels) if t and label != IGNORE]
            rows.append(inputs.setdefault(tuple(example.ids[: labelled[-1]]), len(inputs)))
            places.append([t - 1 for t in labelled])
            targets.append([example.labels[t] for t in labelled])
        width = max(map(len, places))
        self.lengths = np.array([len(ids) for ids in inputs])
        self.row_of_job = np.array(rows)
        ids = np.zeros((len(inputs), max(LENGTHS)), dtype=np.int64)
        for row, tokens in enumerate(inputs):
            ids[row, : len(tokens)] = tokens

        def put(values: Any) -> Tensor:
            return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(device)

        self.ids, self.length, self.row = put(ids), put(self.lengths), put(rows)
        self.place = put([place + [0] * (width - len(place)) for place in places])
        self.target = put([target + [IGNORE] * (width - len(target)) for target in targets])


@dataclass
class Packed:
    """If the tokens of a batch lie: [runs, tokens] packed, [runs, rows, length] for the
    attention."""

    ids: Tensor
    position: Tensor
    starts: Tensor
    pad: Tensor
    back: Tensor

    @classmethod
    def of(cls, table: Rows, row_SB: Tensor, tokens: int, length: int) -> Packed:
        lengths = table.length[row_SB]
        ends = lengths.cumsum(1)
        starts = ends - lengths
        token = (
            torch.arange(tokens, device=row_SB.device).expand(row_SB.shape[0], tokens).contiguous()
        )
        row = torch.searchsorted(ends, token, right=True).clamp(max=row_SB.shape[1] - 1)
        position = (token - starts.gather(1, row)).clamp(0, length - 1)
        pad = (starts[..., None] + torch.arange(length, device=row_SB.device)).clamp(max=tokens - 1)
        return cls(
            table.ids[row_SB.gather(1, row), position],
            position,
            starts,
            pad,
            row * length + position,
        )


def flat_index(index_SX: Tensor, copies: int, each: int) -> Tensor:
    """Indices within a copy, [runs, ...], as indices into all [runs * copies * each] rows."""
    runs = index_SX.shape[0]
    base = torch.arange(runs * copies, device=index_SX.device).view(runs, copies, 1) * each
    return (index_SX.reshape(runs, 1, -1) + base).reshape(-1)


class PackedModel:
    """A Llama's forward pass with one frozen A for each run and one B for each run and copy."""

    def __init__(self, loaded: Any, layouts: Sequence[AdapterLayout], scale: float) -> None:
        family, self.dims, self.layout = loaded.family, loaded.dims, layouts[0]
        if loaded.dims.family != "llama" or {entry.target for entry in self.layout.entries} - set(
            QKV
        ):
            raise ValueError("only Llama models with adapters on q, k and v run batched")
        device, self.dtype = family.head_weight.device, family.head_weight.dtype
        self.weights: list[dict[str, Tensor]] = []
        for i in range(self.dims.layers):
            weight = {t: family.linear(i, t).weight.detach() for t in family.linear_targets}
            a = [
                np.concatenate([x.frozen_a(e) for e in x.of_layer(i)], 1)
                for x in layouts
                if x.of_layer(i)
            ]
            self.weights.append({
                "qkv": torch.cat([weight[t] for t in QKV]), "o": weight["o_proj"], "down": weight["down_proj"],
                "gate_up": torch.cat([weight["gate_proj"], weight["up_proj"]]),
                "before": family.layer(i).input_layernorm.weight.detach(),
                "after": family.layer(i).post_attention_layernorm.weight.detach(),
                "a": torch.from_numpy(np.stack(a) * scale).to(device, self.dtype) if a else torch.empty(0),
            })  # fmt: skip
        self.embedding, self.norm = (
            family.embedding.weight.detach(),
            family.model.model.norm.weight.detach(),
        )
        self.head = family.head_weight.detach().float()
        cos, sin = (table[0] for table in family.positions(max(LENGTHS), device, self.dtype))
        half = self.dims.head_dim // 2
        self.cos, self.sin = cos, torch.cat([-sin[:, :half], sin[:, half:]], 1)
        self.offsets = {"q_proj": 0, "k_proj": self.dims.heads * self.dims.head_dim}
        self.offsets["v_proj"] = self.offsets["k_proj"] + self.dims.kv_heads * self.dims.head_dim

    def hidden(self, packed: Packed, copies_SCP: Tensor) -> Tensor:
        """The residual stream after the last layer, [runs, copies, tokens, hidden].

        Layers below the adapters run once for all copies.
        """
        x = functional.embedding(packed.ids, self.embedding)[:, None]
        for layer in range(self.dims.layers):
            if layer == self.layout.first_layer:
                x = x.expand(-1, copies_SCP.shape[1], -1, -1).contiguous()
            x = self._block(layer, x, packed, copies_SCP)
        return x

    def _block(self, layer: int, x: Tensor, packed: Packed, copies_SCP: Tensor) -> Tensor:
        (runs, copies, tokens, width), weight, dims = x.shape, self.weights[layer], self.dims
        h = functional.rms_norm(x, (width,), weight["before"], dims.norm_eps).view(-1, width)
        qkv = h @ weight["qkv"].t()
        self._adapt(layer, h, qkv, copies_SCP)
        heads = dims.heads + dims.kv_heads
        qk = qkv[:, : self.offsets["v_proj"]].view(runs, copies, tokens, heads, dims.head_dim)
        cos, sin = (table[packed.position][:, None, :, None] for table in (self.cos, self.sin))
        qk = torch.addcmul(qk * cos, qk.roll(dims.head_dim // 2, -1), sin).view(
            -1, heads * dims.head_dim
        )
        rows, length = packed.pad.shape[1:]
        pad = flat_index(packed.pad, copies, tokens)
        shape = (runs * copies * rows, length, -1, dims.head_dim)
        q, k = (
            qk.index_select(0, pad)
            .view(shape)
            .transpose(1, 2)
            .split([dims.heads, dims.kv_heads], 1)
        )
        v = qkv[:, self.offsets["v_proj"] :].index_select(0, pad).view(shape).transpose(1, 2)
        if self.dtype == torch.float32:  # no fused attention takes grouped heads in float32
            k, v = (z.repeat_interleave(dims.heads // dims.kv_heads, 1) for z in (k, v))
        grouped = k.shape[1] != q.shape[1]
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=grouped
        )
        attended = attended.transpose(1, 2).reshape(-1, dims.heads * dims.head_dim)
        attended = attended.index_select(0, flat_index(packed.back, copies, rows * length))
        x = torch.addmm(x.view(-1, width), attended, weight["o"].t())
        h = functional.rms_norm(x, (width,), weight["after"], dims.norm_eps) @ weight["gate_up"].t()
        h = functional.silu(h[:, : dims.intermediate]) * h[:, dims.intermediate :]
        return torch.addmm(x, h, weight["down"].t()).view(runs, copies, tokens, width)

    def _adapt(self, layer: int, h: Tensor, qkv: Tensor, copies_SCP: Tensor) -> None:
        """Add the adapters' outputs to `qkv` [runs * copies * tokens, outputs]; `h` is the layer's
        normalised input."""
        entries = self.layout.of_layer(layer)
        if not entries:
            return
        runs, copies = copies_SCP.shape[:2]
        xa = torch.bmm(h.view(runs, -1, h.shape[1]), self.weights[layer]["a"])
        xa, y = xa.view(runs * copies, -1, xa.shape[2]), qkv.view(runs * copies, -1, qkv.shape[1])
        flat = copies_SCP.view(runs * copies, -1)
        for i, entry in enumerate(entries):
            b = flat[:, entry.offset : entry.offset + entry.count].view(
                -1, entry.rank, entry.outputs
            )
            low = self.offsets[entry.target]
            y[..., low : low + entry.outputs].baddbmm_(
                xa[..., i * entry.rank : (i + 1) * entry.rank], b
            )

    def nll(
        self, x: Tensor, packed: Packed, row_SJ: Tensor, place_SJK: Tensor, target_SJK: Tensor
    ) -> Tensor:
        """Negative log likelihood of each labelled token in float32, [runs, copies, jobs, labels];
        0 if none is."""
        _, copies, tokens, width = x.shape
        at = packed.starts.gather(1, row_SJ)[..., None] + place_SJK
        h = x.view(-1, width).index_select(0, flat_index(at, copies, tokens))
        logits = (
            functional.rms_norm(h, (width,), self.norm, self.dims.norm_eps).float() @ self.head.t()
        )
        target = target_SJK[:, None].expand(-1, copies, -1, -1)
        picked = logits.gather(1, target.clamp(min=0).reshape(-1, 1))[:, 0]
        return torch.where(target >= 0, (logits.logsumexp(-1) - picked).view(target.shape), 0.0)
