"""Norms of the NPU's blocks against autograd in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from ondevice.methods.mesp.npu_kernels import NpuKernels

KERNELS = NpuKernels(torch.zeros(0), torch.ones(24).double(), torch.ones(8).double())


def random(*shape: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return 3.0 * drawn


@pytest.mark.parametrize("width", [24, 8])
def test_norms_of_the_stream_and_of_heads_have_their_gradient(width) -> None:
    x, gn, g = (random(24 // width * 5, width, seed=seed) for seed in range(3))
    weight = 1.0 + random(width, seed=3) / 10
    x.requires_grad_(True)
    expected = functional.rms_norm(x, (width,), weight, 1e-6)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-6), expected, rtol=1e-12, atol=1e-12)
    expected.backward(gn)
    assert x.grad is not None
    received = KERNELS.rms_norm_backward(x.detach(), weight, 1e-6, gn, g)
    torch.testing.assert_close(received, g + x.grad, rtol=1e-6, atol=1e-6)  # of eps in 1 / rms
