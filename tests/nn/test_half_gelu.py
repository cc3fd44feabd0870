"""Tanh-GELU in operators for float16 against PyTorch's own."""

from __future__ import annotations

import torch
from torch.nn import functional

from ondevice.nn.half_gelu import gelu_angle, gelu_angle_slope


def test_gelu_is_pytorch_s() -> None:
    x = torch.linspace(-20.0, 20.0, 4001, dtype=torch.float64)
    expected = functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(x * torch.sigmoid(gelu_angle(x)), expected, rtol=0, atol=1e-13)


def test_the_slope_is_pytorch_s() -> None:
    x = torch.linspace(-20.0, 20.0, 4001, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(functional.gelu(x, approximate="tanh").sum(), x)
    x = x.detach()
    s = torch.sigmoid(gelu_angle(x))
    slope = s + x * s * (1.0 - s) * gelu_angle_slope(x)
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-12)


def test_gelu_stays_within_float16_for_numbers_of_any_size() -> None:
    x = torch.tensor([-6e4, -300.0, -9.0, 9.0, 300.0, 6e4], dtype=torch.float16)
    angle = gelu_angle(x)
    assert torch.isfinite(angle).all()
    expected = functional.gelu(x.double(), approximate="tanh")
    torch.testing.assert_close((x * torch.sigmoid(angle)).double(), expected, rtol=1e-3, atol=1e-6)
