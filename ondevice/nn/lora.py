"""A linear layer with a LoRA adapter (Hu et al., 2021): y = x W^T + b + (alpha / rank) (x A^T)
B^T."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ondevice.core.errors import ModelError


class LoRALinear(nn.Module):
    """A frozen `base` with trainable `lora_A` float32 [rank, inputs] and `lora_B` float32 [outputs,
    rank].

    A and B stay in float32 and are used in the dtype of the input, so that gradients and updates
    are float32 and a half-precision model keeps half-precision activations. Build it with
    `from_base`.
    """

    def __init__(self, base: nn.Module, a_RI: Tensor, b_OR: Tensor, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.alpha = float(alpha)
        self.lora_A = nn.Parameter(a_RI)
        self.lora_B = nn.Parameter(b_OR)

    @classmethod
    def from_base(
        cls,
        linear: nn.Module,
        rank: int,
        alpha: float,
        a: Tensor | np.ndarray,
        b: Tensor | np.ndarray | None = None,
    ) -> LoRALinear:
        """Put an adapter next to `linear`, which is frozen.

        Args:
            linear: an `nn.Linear`, transformers' `Conv1D`, or a layer with `in_features` and
                `out_features` that stands for one.
            rank: inner dimension.
            alpha: the scale is alpha / rank.
            a: [rank, inputs]; copied to float32 on the layer's device.
            b: [outputs, rank]; None is zero, which leaves the layer's function as it is.

        Raises:
            ModelError: the shapes do not fit.
        """
        inputs, outputs = sides(linear)
        device = (
            next((p.device for p in linear.parameters()), None) or next(linear.buffers()).device
        )
        a_RI = torch.as_tensor(a).detach().to(device, torch.float32, copy=True)
        if b is None:
            b_OR = torch.zeros(outputs, rank, dtype=torch.float32, device=device)
        else:
            b_OR = torch.as_tensor(b).detach().to(device, torch.float32, copy=True)
        for name, tensor, expected in (("A", a_RI, (rank, inputs)), ("B", b_OR, (outputs, rank))):
            if tuple(tensor.shape) != expected:
                message = (
                    f"LoRA {name} does not fit a layer of {inputs} inputs and {outputs} outputs"
                )
                raise ModelError(message, expected=expected, received=tuple(tensor.shape))
        linear.requires_grad_(False)
        return cls(linear, a_RI.contiguous(), b_OR.contiguous(), alpha)

    @property
    def rank(self) -> int:
        return self.lora_A.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def in_features(self) -> int:
        return self.lora_A.shape[1]

    @property
    def out_features(self) -> int:
        return self.lora_B.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., inputs] -> [..., outputs], in the dtype of `base`'s output."""
        y = self.base(x)
        xa = F.linear(x, self.lora_A.to(x.dtype))
        return y + F.linear(xa, self.lora_B.to(x.dtype)) * self.scale

    def delta(self) -> Tensor:
        """Return the adapter's change of the weight, (alpha / rank) B A: float32 [outputs,
        inputs]."""
        return (self.lora_B @ self.lora_A) * self.scale

    @torch.no_grad()
    def fuse(self) -> nn.Module:
        """Build a layer as `base` of weight W + (alpha / rank) B A, added in float32 and rounded
        once to W's dtype.

        Raises:
            ModelError: `base` is no plain `nn.Linear` (a quantised weight cannot take the sum).
        """
        base: Any = self.base
        if is_conv1d(base):  # its weight is [inputs, outputs]
            base.weight = nn.Parameter(
                (base.weight.float() + self.delta().t()).to(base.weight.dtype), requires_grad=False
            )
            return base
        if not isinstance(base, nn.Linear) or not base.weight.is_floating_point():
            raise ModelError(
                "an adapter can only be fused into a floating-point nn.Linear",
                expected="nn.Linear",
                received=type(base).__name__,
                hint="load the model with dtype float32, bfloat16 or float16",
            )
        weight = (base.weight.float() + self.delta()).to(base.weight.dtype)
        linear = nn.Linear(
            base.in_features,
            base.out_features,
            bias=base.bias is not None,
            device="meta",
            dtype=weight.dtype,
        )
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if base.bias is not None:
            linear.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
        return linear

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"


def is_conv1d(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D: a linear layer whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def sides(linear: Any) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer."""
    return (
        (linear.nx, linear.nf)
        if is_conv1d(linear)
        else (int(linear.in_features), int(linear.out_features))
    )
