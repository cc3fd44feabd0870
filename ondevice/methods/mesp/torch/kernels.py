"""The operations that the stages are made of: products, norm, rotary embedding, SwiGLU and
attention, forward and backward, for eager PyTorch, for CUDA with liger-kernel (as fast or faster in
every row of `benchmarks/results/mesp_cuda`), and for a graph that is exported.
"""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.errors import MissingPackageError
from ondevice.methods.mesp.torch import attention
from ondevice.methods.mesp.torch.attention import Scores, cast
from ondevice.nn.cross_entropy import wide

Position = tuple[Tensor, Tensor]
"""cos and sin, each [1, tokens, 1, head_dim / 2]; [rows, ...] if sequences have several rows
each."""


class Matrix(Protocol):
    """A frozen weight [outputs, inputs], dense or to be made dense."""

    def dense(self) -> Tensor: ...


class TorchKernels:
    """Eager PyTorch over matrices [N, width]; norms in float32 at least, as transformers computes
    them.

    Results go into an argument's memory if a docstring says so: a caller uses the result, never the
    argument.
    """

    name = "torch"
    in_place = True

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        """Compute x W^T + bias, added into `into`'s memory if given."""
        if into is None:
            return functional.linear(x, weight, bias)
        into.addmm_(x, weight.t())
        return into if bias is None else into.add_(bias)

    def frozen_linear(
        self, x: Tensor, matrix: Matrix, bias: Tensor | None, into: Tensor | None
    ) -> Tensor:
        """Compute `linear` with a frozen matrix W."""
        return self.linear(x, matrix.dense(), bias, into)

    def frozen_backward(self, g: Tensor, matrix: Matrix, into: Tensor | None) -> Tensor:
        """into + g W, in into's memory; None is zero."""
        return self.add_product(into, g, matrix.dense())

    def add_product(self, into: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        """Compute into + scale a b, in into's memory; None is zero, unscaled."""
        return a @ b if into is None else into.addmm_(a, b, alpha=scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = wide(x)
        r = torch.rsqrt((x32 * x32).mean(-1, keepdim=True).add_(eps))
        if (
            weight.dtype != x.dtype
        ):  # a factor in float32 (1 + w) is multiplied before it is rounded
            return cast(x32 * r * weight, x.dtype)
        return cast(x32 * r, x.dtype) * weight

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor
    ) -> Tensor:
        """Compute g + the gradient of x from that of its norm, in g's memory (appendix A.3).

        With r = 1 / rms(x) and gw = gn w the gradient is r (gw - x r^2 mean(gw x)).
        """
        x32 = wide(x)
        r = torch.rsqrt((x32 * x32).mean(-1, keepdim=True).add_(eps))
        gw = wide(gn) * wide(weight)
        mean = (gw * x32).mean(-1, keepdim=True)
        return g.add_(gw.sub_(x32 * (mean * r * r)).mul_(r))

    def rope(self, q: Tensor, k: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        """Rotate [B, T, heads, h], in their memory; with the sine's sign changed it is its own
        backward pass."""
        cos, sin = position
        for x in (q, k):
            first, second = x[..., : 2 * cos.shape[-1]].chunk(
                2, -1
            )  # the rest of a head is not rotated
            kept = first.clone()
            first.mul_(cos).addcmul_(second, sin, value=-1.0)
            second.mul_(cos).addcmul_(kept, sin)
        return q, k

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) up, in new memory."""
        return functional.silu(gate).mul_(up)

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradients of gate and up (appendix A.4); the memory of all three arguments is used
        up."""
        up.mul_(g)
        torch.ops.aten.silu_backward.grad_input(up, gate, grad_input=up)
        return up, g.mul_(functional.silu(gate, inplace=True))

    def glu(self, activation: str, gate: Tensor, up: Tensor) -> Tensor:
        """Compute activation(gate) up, in new memory."""
        if activation == "silu":
            return self.swiglu(gate, up)
        act = functional.gelu(gate, approximate="tanh")
        return act.mul_(up) if self.in_place else act * up

    def glu_backward(
        self, activation: str, gate: Tensor, up: Tensor, g: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of gate and up; the memory of all three arguments is used up."""
        if activation == "silu":
            return self.swiglu_backward(gate, up, g)
        aten = torch.ops.aten
        if not self.in_place:
            return aten.gelu_backward(g * up, gate, approximate="tanh"), g * functional.gelu(
                gate, approximate="tanh"
            )
        up.mul_(g)
        aten.gelu_backward.grad_input(up, gate, approximate="tanh", grad_input=up)
        return up, g.mul_(aten.gelu_(gate, approximate="tanh"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Any]:
        """See `attention.attend`."""
        return attention.attend(q, k, v, how)

    def attend_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Any, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `attention.attend_backward`."""
        return attention.attend_backward(g, q, k, v, kept, how)


class GraphKernels(TorchKernels):
    """Operations of a graph for a phone: nothing is written into a slice, and only operators that a
    stock ExecuTorch runtime has are used.

    Every product is written so that frozen weights are read in place: x W^T is one linear, g W one
    product, and of a transposed weight there is never a copy. In-place operations of inherited
    methods become ordinary operators when the graph is lowered.

    Args:
        mask: of attention, [tokens, tokens], added to the scores.
    """

    name = "graph"
    in_place = False

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
    ) -> Tensor:
        y = functional.linear(x, weight, bias)
        return y if into is None else into + y

    def add_product(self, into: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        if into is None:
            return torch.mm(a, b)
        return into + torch.mm(a, b if scale == 1.0 else b * scale)

    def rope(self, q: Tensor, k: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        return _rotated(q, position), _rotated(k, position)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * torch.sigmoid(gate) * up

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(gate)
        silu = gate * s
        return g * up * (s + silu * (1.0 - s)), g * silu

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: Scores) -> tuple[Tensor, Any]:
        return attention.attend_in_chunks(q, k, v, self.mask, how), None

    def attend_backward(
        self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Any, how: Scores
    ) -> tuple[Tensor, Tensor, Tensor]:
        return attention.attend_in_chunks_backward(g, q, k, v, self.mask, how)


def _rotated(x: Tensor, position: Position) -> Tensor:
    cos, sin = position
    width = 2 * cos.shape[-1]
    first, second = (x if width == x.shape[-1] else x[..., :width]).chunk(2, -1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if width == x.shape[-1] else (*parts, x[..., width:]), -1)


class LigerKernels(TorchKernels):
    """liger-kernel's Triton kernels for norm and SwiGLU: one pass over memory instead of
    several."""

    name = "liger"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dtype != x.dtype:  # 1 + w in float32
            return super().rms_norm(x, weight, eps)
        from liger_kernel.ops import rms_norm as ops  # pyright: ignore[reportMissingImports]

        return ops.rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]

    def rms_norm_backward(
        self, x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor
    ) -> Tensor:
        if weight.dtype != x.dtype:
            return super().rms_norm_backward(x, weight, eps, gn, g)
        from liger_kernel.ops import rms_norm as ops  # pyright: ignore[reportMissingImports]

        _, x_2d, rstd, block, warps, casting = ops.rms_norm_forward(
            x, weight, eps, 0.0, "llama", None
        )
        gradients = ops.rms_norm_backward(
            gn, x_2d, weight, rstd, 0.0, casting, block, warps, True, None, needs_dw=False
        )
        return g.add_(gradients[0])

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.ops import swiglu as ops  # pyright: ignore[reportMissingImports]

        return ops.swiglu_forward(gate, up)[2]

    def swiglu_backward(self, gate: Tensor, up: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        from liger_kernel.ops import swiglu as ops  # pyright: ignore[reportMissingImports]

        return ops.swiglu_backward(gate, up, g)


def choose(kernels: str, device: str) -> TorchKernels:
    """Choose what `method.kernels` asks for; `auto` is liger's on a GPU if the package is
    installed, otherwise torch's.

    Raises:
        MissingPackageError: liger is asked for but not installed, or there is no GPU.
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
