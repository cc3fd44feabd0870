"""Norm, rotary embedding and SwiGLU, forward and backward: written out in torch. On CUDA norm and SwiGLU are
liger-kernel's where it is installed: as fast or faster in every row of `benchmarks/results/mesp_cuda`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.errors import MissingPackageError

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.stages import Position


def wide(x: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Kernels(Protocol):
    """Functions over matrices [N, width]; q and k are [B, T, heads, h]."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rms_norm_backward(self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor) -> Tensor:
        """g + the gradient of x, in g's memory."""
        ...

    def rope(self, q: Tensor, k: Tensor, position: Position) -> None:
        """In place; with the sine's sign changed it is its own backward pass."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up; all three arguments may be overwritten."""
        ...


class TorchKernels:
    """Torch's own operations; norms in float32 at least, as transformers computes them."""

    name = "torch"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = wide(x)
        r = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
        return weight * (x32 * r).to(x.dtype)

    def rms_norm_backward(self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor) -> Tensor:
        x32 = wide(x)
        r = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
        gw = wide(gn) * wide(weight)
        mean = (gw * x32).mean(-1, keepdim=True)
        gw.addcmul_(x32, mean.mul_(r.square()), value=-1.0).mul_(r)
        return g.add_(gw)

    def rope(self, q: Tensor, k: Tensor, position: Position) -> None:
        cos, sin = (part[None, :, None] for part in position)
        for x in (q, k):
            first, second = x.chunk(2, -1)
            kept = first.clone()
            first.mul_(cos).addcmul_(second, sin, value=-1.0)
            second.mul_(cos).addcmul_(kept, sin)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate).mul_(up)

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        up.mul_(g)
        torch.ops.aten.silu_backward.grad_input(up, gate, grad_input=up)
        return up, g.mul_(functional.silu(gate, inplace=True))


class LigerKernels:
    """liger-kernel's Triton kernels: one pass over memory where torch's operations make several; the rotation is
    torch's."""

    name = "liger"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from liger_kernel.ops import rms_norm as ops  # pyright: ignore[reportMissingImports]

        return ops.rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]

    def rms_norm_backward(self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor) -> Tensor:
        from liger_kernel.ops import rms_norm as ops  # pyright: ignore[reportMissingImports]

        _, x_2d, rstd, block, warps, casting = ops.rms_norm_forward(x, weight, eps, 0.0, "llama", None)
        found = ops.rms_norm_backward(gn, x_2d, weight, rstd, 0.0, casting, block, warps, True, None, needs_dw=False)
        return g.add_(found[0])

    def rope(self, q: Tensor, k: Tensor, position: Position) -> None:
        TorchKernels().rope(q, k, position)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.ops import swiglu as ops  # pyright: ignore[reportMissingImports]

        return ops.swiglu_forward(gate, up)[2]

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops import swiglu as ops  # pyright: ignore[reportMissingImports]

        return ops.swiglu_backward(gate, up, g)


def choose(kernels: str, device: str) -> Kernels:
    """The kernels that `method.kernels` asks for; `auto` is liger's on a GPU where the package is, otherwise torch's.

    Raises:
        MissingPackageError: liger is asked for, and not installed or there is no GPU.
    """
    possible = device.startswith("cuda") and importlib.util.find_spec("liger_kernel") is not None
    if kernels == "liger" and not possible:
        raise MissingPackageError(
            "liger-kernel is asked for and cannot be used",
            expected="a GPU and the package liger-kernel",
            received="no package" if device.startswith("cuda") else "no GPU",
            hint='pip install "ondevice-train[cuda]", or method.kernels: torch',
        )
    return LigerKernels() if possible and kernels != "torch" else TorchKernels()
