"""Kernels of the layers and the loss: liger-kernel's on a GPU if installed, else PyTorch's.

Attention is PyTorch's scaled_dot_product_attention in both, which uses FlashAttention if it can.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.core.errors import MissingPackageError
from ondevice.core.session import IGNORE
from ondevice.nn.cross_entropy import float32_logits

if TYPE_CHECKING:
    from ondevice.models import Family
    from ondevice.offload.config import EngineConfig

ROTARY = "apply_rotary_pos_emb"


def use_liger(config: EngineConfig, device: str) -> bool:
    """Return True if liger-kernel is used.

    Raises:
        MissingPackageError: it is requested, but the package or a GPU is missing.
    """
    possible = device != "cpu" and importlib.util.find_spec("liger_kernel") is not None
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


class ChunkedLoss:
    """Loss over one micro-batch: logits of a chunk of tokens exist once and are never stored.

    A complete head needs one pass (`forward_backward`). A head in tiles of the vocabulary needs one
    pass for the log-sum-exp (`forward`) and one for the gradients (`backward`).

    Args:
        hidden_ND: [N, hidden], the normed hidden states in the compute dtype.
        labels_N: int64 [N], -100 for no label.
        scale: of the gradients: 1 / labelled tokens of the whole batch.
        chunk_tokens: tokens whose logits exist at once.

    Attributes:
        grad_hidden: [N, hidden], the gradient of `hidden_ND`, after the gradients' pass.
    """

    def __init__(
        self, hidden_ND: Tensor, labels_N: Tensor, scale: float, chunk_tokens: int
    ) -> None:
        self.hidden = hidden_ND
        self.labels = labels_N
        self.scale = scale
        self.chunk_tokens = chunk_tokens
        count = hidden_ND.shape[0]
        self.maximum = torch.full((count,), float("-inf"), device=hidden_ND.device)
        self.sum = torch.zeros_like(self.maximum)
        self.target = torch.zeros_like(self.maximum)
        self.grad_hidden = torch.zeros_like(hidden_ND)
        self.active = labels_N != IGNORE

    @torch.no_grad()
    def forward_backward(self, weight_VD: Tensor, grad_VD: Tensor) -> Tensor:
        """Return the summed loss, float32; adds the gradient of the head [V, hidden] to
        `grad_VD`."""
        total = torch.zeros((), device=self.hidden.device)
        for low in range(0, self.hidden.shape[0], self.chunk_tokens):
            chunk = slice(low, low + self.chunk_tokens)
            hidden = self.hidden[chunk]
            active = self.active[chunk]
            at = self.labels[chunk].clamp(min=0)[:, None]
            logits = float32_logits(hidden, weight_VD)
            logsumexp = logits.logsumexp(-1, keepdim=True)
            total += ((logsumexp - logits.gather(1, at))[:, 0] * active).sum()
            probability = logits.sub_(logsumexp).exp_()
            probability.scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
            scaled = probability.mul_((active * self.scale)[:, None]).to(hidden.dtype)
            torch.mm(scaled, weight_VD, out=self.grad_hidden[chunk])
            grad_VD.addmm_(scaled.t(), hidden)
        return total

    @torch.no_grad()
    def forward(self, weight_vD: Tensor, first: int) -> None:
        """Run the first pass: rows `first` onwards of the head."""
        for low in range(0, self.hidden.shape[0], self.chunk_tokens):
            chunk = slice(low, low + self.chunk_tokens)
            logits = float32_logits(self.hidden[chunk], weight_vD)
            larger = torch.maximum(self.maximum[chunk], logits.amax(-1))
            decayed = self.sum[chunk] * (self.maximum[chunk] - larger).exp()
            self.sum[chunk] = decayed + (logits - larger[:, None]).exp().sum(-1)
            self.maximum[chunk] = larger
            inside, at = self._inside(chunk, first, weight_vD.shape[0])
            self.target[chunk] += logits.gather(1, at)[:, 0] * inside

    @torch.no_grad()
    def backward(self, weight_vD: Tensor, first: int, grad_vD: Tensor) -> None:
        """Run the second pass over the same rows; adds to `grad_vD`."""
        logsumexp = self.maximum + self.sum.log()
        for low in range(0, self.hidden.shape[0], self.chunk_tokens):
            chunk = slice(low, low + self.chunk_tokens)
            probability = (
                float32_logits(self.hidden[chunk], weight_vD).sub_(logsumexp[chunk, None]).exp_()
            )
            inside, at = self._inside(chunk, first, weight_vD.shape[0])
            probability.scatter_add_(1, at, -inside[:, None].float())
            scaled = probability.mul_((self.active[chunk] * self.scale)[:, None]).to(
                self.hidden.dtype
            )
            self.grad_hidden[chunk].addmm_(scaled, weight_vD)
            grad_vD.addmm_(scaled.t(), self.hidden[chunk])

    def tokens(self) -> Tensor:
        """Return negative log likelihood of each token, float32 [N], 0 without a label."""
        return (self.maximum + self.sum.log() - self.target) * self.active

    def _inside(self, chunk: slice, first: int, rows: int) -> tuple[Tensor, Tensor]:
        labels = self.labels[chunk]
        inside = (labels >= first) & (labels < first + rows)
        return inside, (labels - first).clamp(0, rows - 1)[:, None]
