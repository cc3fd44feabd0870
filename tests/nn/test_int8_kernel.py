"""The kernel that makes int8 matrices dense gives the bits of PyTorch's operations: on a GPU where
there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.interpreter import needs_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [] if DEVICE == "cuda" else needs_interpreter
BLOCK = 16


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    """The module; the interpreter is asked for as its kernel is decorated, and again in each
    call."""
    module = importlib.import_module("ondevice.nn.int8_kernel")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            module = importlib.reload(module)
            patch.setattr(module, "BLOCK", BLOCK)
        yield module
    importlib.reload(module)


def product(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply in PyTorch; the interpreter cuts a number to bfloat16 where a GPU rounds it."""
    if DEVICE == "cuda" or scale.dtype != torch.bfloat16:
        return weight.to(scale.dtype) * scale
    exact = weight.float() * scale.float()
    return (exact.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 16), (5, 37)])
def test_a_dense_matrix_has_the_bits_of_a_product_in_pytorch(
    kernel: Any, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(shape[1])
    weight = torch.randint(-128, 128, shape, generator=random).to(torch.int8)
    scale = torch.rand((shape[0], 1), generator=random).to(dtype)
    dense = kernel.dense(weight.to(DEVICE), scale.to(DEVICE)).cpu()
    assert dense.dtype == dtype
    assert torch.equal(dense, product(weight, scale))


def test_a_packed_matrix_on_a_gpu_takes_the_kernel(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = importlib.import_module("ondevice.nn.packed")
    matrix = packed.Int8Matrix.pack(torch.randn(3, 37, device=DEVICE))
    taken = []

    def counted(*operands: Any, plain: Any = kernel.dense) -> torch.Tensor:
        taken.append(operands)
        return plain(*operands)

    monkeypatch.setattr(kernel, "dense", counted)
    monkeypatch.setattr(packed, "has_triton", lambda device: True)
    with_kernel = matrix.dense()
    monkeypatch.setattr(packed, "has_triton", lambda device: False)
    assert len(taken) == 1
    assert torch.equal(with_kernel, matrix.dense())
