"""Kernels of the layers and the loss by liger-kernel, on a GPU if it is installed.

Attention is PyTorch's scaled_dot_product_attention in both, which uses FlashAttention if it can.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.core.errors import MissingPackageError
from ondevice.core.method import has_liger
from ondevice.core.session import IGNORE

if TYPE_CHECKING:
    from ondevice.models import Family
    from ondevice.offload.config import EngineConfig

ROTARY = "apply_rotary_pos_emb"


def use_liger(config: EngineConfig, device: str) -> bool:
    """Return True if liger-kernel is used.

    Raises:
        MissingPackageError: it is requested, but the package or a GPU is missing.
    """
    possible = has_liger(device)
    if config.kernels == "liger" and not possible:
        raise MissingPackageError(
            "liger-kernel cannot be used",
            expected="a GPU and the package liger-kernel",
            received="no GPU" if device == "cpu" else "no package",
            hint='pip install "ondevice-train[cuda]", or method.kernels: torch',
        )
    return possible and config.kernels != "torch"


def patch_layers(family: Family) -> bool:
    """Put liger's RMSNorm, rotary embedding and SwiGLU into the layers; False for other models."""
    from liger_kernel.transformers import monkey_patch  # pyright: ignore[reportMissingImports]

    function = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.get(family.model_type)
    if function is None:
        return False
    module: Any = sys.modules[type(family.model).__module__]
    before = dict(vars(module))
    function(model=family.model, cross_entropy=False, fused_linear_cross_entropy=False)
    for (
        name,
        plain,
    ) in before.items():  # liger also replaces what models made later are built of, on the CPU too
        liger = getattr(module, name)
        if liger is not plain:
            setattr(
                module,
                name,
                _rotary(liger, getattr(plain, "plain", plain)) if name == ROTARY else plain,
            )
    return True


def _rotary(liger: Any, plain: Any) -> Any:
    """Return a function that calls liger's kernel on a GPU and the family's own on the CPU."""

    def rotary(q: Tensor, *arguments: Any, **options: Any) -> Any:
        return (liger if q.is_cuda else plain)(q, *arguments, **options)

    rotary.plain = plain  # pyright: ignore[reportFunctionMemberAccess]
    return rotary


class LigerLoss:
    """liger's fused linear cross-entropy over one micro-batch; see
    `ChunkedLoss.forward_backward`."""

    def __init__(self, hidden_ND: Tensor, labels_N: Tensor, scale: float) -> None:
        self.hidden = hidden_ND
        self.labels = labels_N
        self.scale = scale
        self.grad_hidden = hidden_ND

    def forward_backward(self, weight_VD: Tensor, grad_VD: Tensor) -> Tensor:
        """Return the summed loss, float32; the gradient of the head is added to `grad_VD`."""
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

        hidden = self.hidden.detach().requires_grad_(True)
        weight = weight_VD.detach().requires_grad_(True)
        module: Any = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE, reduction="sum")
        with (
            torch.enable_grad()
        ):  # a caller may be in no_grad, as an autograd function's forward pass is
            total = module(weight, hidden, self.labels)
            scaled = total * self.scale
        torch.autograd.backward(scaled)
        if hidden.grad is not None and weight.grad is not None:
            self.grad_hidden = hidden.grad
            grad_VD.add_(weight.grad)
        return total.detach().float()
