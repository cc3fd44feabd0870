"""Operations of a block for an NPU that computes in float16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.nn.half_gelu import gelu_angle, gelu_angle_slope

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 6.2e-5
"""Smallest mean of a norm's input that is divided by: float16's smallest normal number."""


class NpuKernels(GraphKernels):
    """Operations in forms that QNN takes and whose every number fits float16.

    Args:
        ones: constants of the widths of norms: the fused norm wants a weight, and one that is
            multiplied elsewhere, too, is given another shape by a pass of ExecuTorch's, which the
            fused norm does not bear.
    """

    name = "npu"

    def __init__(self, mask: Tensor, *ones: Tensor) -> None:
        super().__init__(mask)
        self.ones = {len(one): one for one in ones}

    def normalised(self, x: Tensor, eps: float) -> Tensor:
        """x / rms(x)."""
        width = x.shape[-1]
        return functional.rms_norm(x, (width,), self.ones[width], eps)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.normalised(x, eps) * weight

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor
    ) -> Tensor:
        """g + r (gw - n mean(gw n)), with n the normalised x and r = 1 / rms(x).

        Inputs reach 23,700 in SmolLM2, whose square float16 cannot hold; so r is mean|n| / mean|x|.
        """
        n = self.normalised(x, eps)
        gw = gn * weight
        r = n.abs().mean(dim=-1, keepdim=True) / x.abs().mean(dim=-1, keepdim=True).clamp(
            min=SMALLEST
        )
        return g + (gw - n * (gw * n).mean(dim=-1, keepdim=True)) * r

    def glu(self, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        if activation == "silu":
            return self.swiglu(gate, up)
        return gate * torch.sigmoid(gelu_angle(gate)) * up

    def glu_backward(
        self, activation: str, gate: Tensor, up: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of gate and up: x s(u) has the slope s + x s (1 - s) u'."""
        if activation == "silu":
            return self.swiglu_backward(gate, up, g)
        s = torch.sigmoid(gelu_angle(gate))
        act = gate * s
        return g * up * (s + act * (1.0 - s) * gelu_angle_slope(gate)), g * act
