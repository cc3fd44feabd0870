"""Batches, tiny sessions, float64 models and the plain loss that the tests of methods compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ondevice.core.registry import method_config, open_session
from ondevice.models.load import tiny_model

LENGTH = 12
LORA = {"rank": 3, "alpha": 6.0, "target_modules": ("q_proj", "v_proj", "down_proj")}


def batch(
    rows: int = 2, length: int = LENGTH, seed: int = 0, vocab: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Random ids and labels with the first half masked, and rows of different true length."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, vocab, (rows, length))
    labels = ids.copy()
    labels[:, : length // 2] = -100
    for row in range(1, rows):
        labels[row, length - row % (length // 2) :] = -100
    return ids, labels


def open_tiny(
    name: str, family: str = "llama", sizes: dict[str, Any] | None = None, **values: Any
) -> Any:
    """A session of a method of first order on a tiny model, seed 3; adapters are `LORA`'s."""
    defaults = LORA if name.startswith("lora") else {}
    return open_session(
        tiny_model(family, **(sizes or {})), method_config(name, {**defaults, **values}), 3
    )


class DoubleNorm(nn.Module):
    """RMSNorm that stays in float64, where transformers' own goes through float32."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.epsilon = (
            getattr(norm, "weight", None),
            getattr(norm, "variance_epsilon", getattr(norm, "eps", None)),
        )
        self.offset = 0
        if self.weight is None:  # of values in Gemma 4
            return
        with torch.no_grad():  # of ones the norm is its factor: w, or 1 + w as in Gemma 3, Qwen 3.5
            factor = norm(torch.ones_like(norm.weight))
            self.offset = round(float((factor - norm.weight).double().mean()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return normed if self.weight is None else (self.offset + self.weight) * normed


class DoubleDelta(nn.Module):
    """A gated delta rule that stays in float64, one token after the other; transformers' own goes
    through float32. Parts have the names of transformers' module."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.sizes = (layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        self.epsilon = layer.norm.variance_epsilon
        for name, child in layer.named_children():
            setattr(self, name, child)
        self.A_log = layer.A_log
        self.dt_bias = layer.dt_bias

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
        key_heads, heads, key_width, width = self.sizes
        x = self.conv1d(self.in_proj_qkv(hidden_states).transpose(1, 2))
        x = functional.silu(x[..., : hidden_states.shape[1]]).transpose(1, 2)
        keys = key_heads * key_width
        q, k, v = x.split((keys, keys, heads * width), -1)
        q, k = (
            x.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, 2)
            for x in (q, k)
        )
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        v = v.unflatten(-1, (heads, -1))
        beta = torch.sigmoid(self.in_proj_b(hidden_states))[..., None]
        step = functional.softplus(self.in_proj_a(hidden_states) + self.dt_bias)
        left = torch.exp(-self.A_log.exp() * step)[..., None, None]
        state = v.new_zeros(len(v), heads, key_width, width)
        outputs = []
        for t in range(v.shape[1]):
            state = state * left[:, t]
            wrong = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t] * wrong)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t] * key_width**-0.5))
        o = torch.stack(outputs, 1)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.norm.weight
        z = functional.silu(self.in_proj_z(hidden_states))
        return self.out_proj(o.flatten(2) * z)


def in_double(model: Any) -> Any:
    """The model in float64 throughout, in place."""
    if any(
        hasattr(model.config, name)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        model.set_experts_implementation("eager")  # grouped products know no float64
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(parent, name, DoubleNorm(child))
            elif type(child).__name__ == "Qwen3_5GatedDeltaNet":
                setattr(parent, name, DoubleDelta(child))
    return model.double()


def plain_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Torch's cross-entropy of shifted logits [rows, tokens, vocab], mean over labelled tokens."""
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
