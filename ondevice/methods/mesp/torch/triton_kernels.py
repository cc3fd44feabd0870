"""The stages' operations on a GPU: a chain of element-by-element operations is one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ondevice.methods.mesp.torch.kernels import Parts, Position, TorchKernels
from ondevice.nn import fused


class TritonKernels(TorchKernels):
    """See `nn.fused`; PyTorch's operations for what those do not take, such as float64."""

    name = "triton"
    fused = True

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not _takes_rows(x):
            return super().rms_norm(x, weight, eps)
        return fused.rms_norm(x, weight, eps)

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor
    ) -> Tensor:
        if not all(_takes_rows(y) for y in (x, gn, g)):
            return super().rms_norm_backward(x, weight, eps, gn, g)
        return fused.rms_norm_backward(x, weight, eps, gn, g)

    def rope(self, q: Tensor, k: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        if not (fused.can_rotate(q) and fused.can_rotate(k)):
            return super().rope(q, k, position)
        return fused.rotate(q, *position), fused.rotate(k, *position)

    def rotate_normed(self, x: Tensor, weight: Tensor, eps: float, position: Position) -> Tensor:
        if not fused.can_rotate(x):
            return super().rotate_normed(x, weight, eps, position)
        return fused.norm_rotate(x, weight, eps, *position)

    def rotate_normed_backward(
        self, x: Tensor, weight: Tensor, eps: float, position: Position, g: Tensor
    ) -> Tensor:
        if not (fused.can_rotate(x) and fused.can_rotate(g)):
            return super().rotate_normed_backward(x, weight, eps, position, g)
        return fused.norm_rotate_backward(x, weight, eps, *position, g)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.swiglu_parts(gate, up, (None, None))

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return self.swiglu_parts_backward(gate, up, g, (None, None, None))[:2]

    def swiglu_parts(self, gate: Tensor, up: Tensor, parts: Parts) -> Tensor:
        if not _takes_parts(gate, parts):
            return TorchKernels.swiglu_parts(TorchKernels(), gate, up, parts)
        return fused.swiglu(gate, up, *parts)

    def swiglu_parts_backward(
        self, gate: Tensor, up: Tensor, g: Tensor, parts: Parts
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _takes_parts(gate, parts):
            return TorchKernels.swiglu_parts_backward(TorchKernels(), gate, up, g, parts)
        return fused.swiglu_backward(gate, up, g, parts)

    def loss_rows(
        self, logits: Tensor, targets: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        if logits.dtype != torch.float32:
            return super().loss_rows(logits, targets, scale, dtype)
        return fused.loss_rows(logits, targets, scale, dtype)


def _takes_rows(x: Tensor) -> bool:
    return (
        x.dtype in fused.DTYPES and x.ndim == 2 and x.stride(1) == 1 and x.shape[1] <= fused.WIDEST
    )


def _takes_parts(gate: Tensor, parts: Parts) -> bool:
    ranks = [part.h.shape[1] for part in parts if part is not None]
    return gate.dtype in fused.DTYPES and max(ranks, default=0) <= fused.MOST_RANK
