"""Frozen weights in bitsandbytes' NF4 or INT8, dequantised when they are used: once a call,
whatever the batch.

A call of a linear layer makes its matrix dense, multiplies, and lets it go. So a pass over a batch
of many copies (both signs and all queries of P-RGE) dequantises each matrix once, and nothing but
one dense matrix exists at a time. The tensors have bitsandbytes' own names, so that a folder of
them is a model that transformers loads.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from ondevice.core.errors import ConfigError, MissingPackageError, ModelError
from ondevice.core.method import has_triton

if TYPE_CHECKING:
    from collections.abc import Callable

    from ondevice.models import Family

NF4_GROUP = 64
"""Weights that share a scale; 256 scales share one of their own (QLoRA's double quantisation)."""


def bitsandbytes() -> Any:
    """Import `bitsandbytes.functional`, without its warning about optional kernels on a CPU.

    Raises:
        MissingPackageError: it is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackageError(
            "bitsandbytes is not installed", hint='pip install "ondevice-train[cuda]"'
        )
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from bitsandbytes import functional as bnb

    return bnb


class Packed(Protocol):
    """A matrix [outputs, inputs] in few bits."""

    kind: ClassVar[str]
    weight: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    """Of the dense matrix."""

    def dense(self) -> Tensor:
        """Dequantise the matrix: [outputs, inputs] in `dtype`, new memory."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return everything that `from_tensors` needs, by bitsandbytes' names."""
        ...


class Nf4Matrix:
    """4 bits a weight in groups of 64, their scales in 8 bits: 4.13 bits a weight (QLoRA)."""

    kind: ClassVar[str] = "nf4"

    def __init__(self, packed: Tensor, state: Any) -> None:
        self.weight = packed
        self.state = state
        outputs, inputs = state.shape
        self.shape = (outputs, inputs)
        self.dtype = state.dtype
        self._dequantise: Any = bitsandbytes().dequantize_4bit

    @classmethod
    def pack(cls, weight: Tensor, double: bool = True) -> Self:
        """Quantise a matrix in float32, bfloat16 or float16; `dense` gives its dtype back.

        Args:
            double: the scales are quantised too; else they stay in float32, 4.5 bits a weight in
                all.
        """
        packed, state = bitsandbytes().quantize_4bit(
            weight.contiguous(), blocksize=NF4_GROUP, quant_type="nf4", compress_statistics=double
        )
        return cls(packed, state)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], dtype: torch.dtype) -> Self:
        """Rebuild the matrix from its `tensors`, on the device where they are; `dense` gives
        `dtype`."""
        packed = tensors["weight"]
        described = {name: value for name, value in tensors.items() if name != "weight"}
        key = next(name for name in described if name.startswith("quant_state."))
        described[key] = described[key].cpu()  # bytes of JSON
        state = bitsandbytes().QuantState.from_dict(described, packed.device)
        state.dtype = dtype
        return cls(packed, state)

    def dense(self) -> Tensor:
        return self._dequantise(self.weight, self.state)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **self.state.as_dict(packed=True)}


class Int8Matrix:
    """8 bits a weight, one scale a row: the largest magnitude of the row over 127."""

    kind: ClassVar[str] = "int8"

    def __init__(self, weight: Tensor, largest: Tensor, dtype: torch.dtype) -> None:
        self.weight = weight
        self.largest = largest
        self.dtype = dtype
        outputs, inputs = weight.shape
        self.shape = (outputs, inputs)
        self.scale = (largest / 127.0).to(dtype)[:, None]

    @classmethod
    def pack(cls, weight: Tensor) -> Self:
        """Quantise a matrix; `dense` gives its dtype back."""
        values = weight.float()
        largest = values.abs().amax(dim=1)
        scale = (largest / 127.0).clamp(min=torch.finfo(torch.float32).tiny)
        rounded = (values / scale[:, None]).round().to(torch.int8)
        return cls(rounded, largest, weight.dtype)

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], dtype: torch.dtype) -> Self:
        """Rebuild the matrix from its `tensors`; `dense` gives `dtype`."""
        return cls(tensors["weight"], tensors["SCB"], dtype)

    def dense(self) -> Tensor:
        if has_triton(self.weight.device.type):
            from ondevice.nn.int8_kernel import dense

            return dense(self.weight, self.scale)
        return self.weight * self.scale

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.weight, "SCB": self.largest}


KINDS: dict[str, type[Nf4Matrix] | type[Int8Matrix]] = {"nf4": Nf4Matrix, "int8": Int8Matrix}


class _Product(torch.autograd.Function):
    """x W^T + bias; the backward pass makes W dense a second time instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, matrix: Packed) -> Tensor:
        ctx.matrix = matrix
        return functional.linear(x, matrix.dense(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient @ ctx.matrix.dense(), None, None


class PackedLinear(nn.Linear):
    """x W^T + bias with a packed W: [..., inputs] -> [..., outputs]. Frozen; it stays on its
    device.

    It is an `nn.Linear`, so that peft adapts it; its `weight` is the packed tensor.
    """

    def __init__(self, matrix: Packed, bias: Tensor | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.weight = nn.Parameter(matrix.weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of what goes in and comes out."""
        return self.matrix.dtype

    def dense(self) -> Tensor:
        """Dequantise the matrix: [outputs, inputs]."""
        return self.matrix.dense()

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Product.apply(input, self.bias, self.matrix)
        return functional.linear(input, self.matrix.dense(), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if fn(self.weight).device != self.weight.device:
            raise ModelError(
                "packed weights stay on the device that they were loaded on",
                received="a move to another",
            )
        return self  # a change of dtype is for weights in full precision

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.matrix.kind}"


def pack_model(family: Family, kind: str) -> None:
    """Pack every linear layer of every block, one after the other, in place; embedding, head and
    norms stay.

    Raises:
        ConfigError: `kind` is neither `nf4` nor `int8`.
        MissingPackageError: bitsandbytes is not installed (nf4).
    """
    if kind not in KINDS:
        raise ConfigError("unknown way to pack weights", expected=", ".join(KINDS), received=kind)
    for layer in range(family.dims.layers):
        for target in family.targets(layer):
            linear: Any = family.linear(layer, target)
            matrix = KINDS[kind].pack(linear.weight.detach())
            bias = None if linear.bias is None else linear.bias.detach()
            family.set_linear(layer, target, PackedLinear(matrix, bias))


def unpack_model(family: Family) -> None:
    """Put a plain linear layer with the rounded weights in the place of every packed one: the
    reference of a packed model."""
    for layer in range(family.dims.layers):
        for target in family.targets(layer):
            packed = family.linear(layer, target)
            if isinstance(packed, PackedLinear):
                plain = nn.Linear(
                    packed.in_features,
                    packed.out_features,
                    bias=packed.bias is not None,
                    device="meta",
                )
                plain.weight = nn.Parameter(packed.dense(), requires_grad=False)
                plain.register_parameter("bias", packed.bias)
                family.set_linear(layer, target, plain)
