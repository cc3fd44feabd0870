"""An int8 matrix made dense by one Triton kernel: each number is read once and written once.

PyTorch's operations convert number by number or pass over the matrix twice, which on an H100 takes
about four times as long as the bytes need.
"""

# Inside a kernel values are tensors of Triton, which its stubs do not say.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Numbers of a row that a program takes."""


def dense(weight: Tensor, scale: Tensor) -> Tensor:
    """Multiply each row by its scale.

    Args:
        weight: int8 [outputs, inputs], contiguous.
        scale: [outputs, 1]; its dtype is the result's.

    Returns:
        [outputs, inputs]: the bits of `weight.to(scale.dtype) * scale`.
    """
    outputs, inputs = weight.shape
    result = torch.empty_like(weight, dtype=scale.dtype)
    _dense[(outputs, triton.cdiv(inputs, BLOCK))](weight, scale, result, inputs, BLOCK)
    return result


@triton.jit
def _dense(weight, scale, result, inputs, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < inputs
    place = row * inputs + column
    value = tl.load(weight + place, mask=inside, other=0).to(tl.float32)
    step = tl.load(scale + row).to(tl.float32)
    # A product of two halves is exact in float32, so it is rounded once, as PyTorch rounds it.
    tl.store(result + place, (value * step).to(result.dtype.element_ty), mask=inside)
