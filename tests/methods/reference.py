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
            norm.weight,
            getattr(norm, "variance_epsilon", getattr(norm, "eps", None)),
        )
        self.offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            (self.offset + self.weight)
            * x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        )


def in_double(model: Any) -> Any:
    """The model in float64 throughout, in place."""
    if any(
        hasattr(model.config, name)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        model.set_experts_implementation("eager")  # grouped products know no float64
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "weight"):
                setattr(parent, name, DoubleNorm(child))
    return model.double()


def plain_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Torch's cross-entropy of shifted logits [rows, tokens, vocab], mean over labelled tokens."""
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
