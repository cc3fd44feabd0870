"""LoRALinear against the formula, its gradients against autograd through the fused weight, and fuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ondevice.core.errors import ModelError
from ondevice.nn.lora import LoRALinear


def make(
    bias: bool = True, dtype: torch.dtype = torch.float32, rank: int = 3
) -> tuple[LoRALinear, nn.Linear]:
    torch.manual_seed(0)
    base = nn.Linear(7, 5, bias=bias, dtype=dtype)
    return LoRALinear.from_base(base, rank, 7.5, torch.randn(rank, 7), torch.randn(5, rank)), base


@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_fuse_are_the_formula(bias: bool) -> None:
    lora, base = make(bias)
    x = torch.randn(2, 4, 7)
    weight = base.weight + 2.5 * lora.lora_B @ lora.lora_A
    expected = F.linear(x, weight, base.bias)
    torch.testing.assert_close(lora(x), expected, atol=1e-5, rtol=1e-5)
    fused = lora.fuse()
    assert type(fused) is nn.Linear
    assert (fused.bias is not None) == bias
    torch.testing.assert_close(fused(x), expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(fused(x), base(x), atol=1e-2)
    assert not any(p.requires_grad for p in fused.parameters())


def test_gradients_reach_only_the_adapter_and_are_right() -> None:
    lora, base = make()
    x = torch.randn(4, 7, requires_grad=True)
    lora(x).square().sum().backward()
    weight = (base.weight.detach() + lora.delta().detach()).requires_grad_()
    F.linear(x.detach(), weight, base.bias).square().sum().backward()
    torch.testing.assert_close(lora.lora_A.grad, 2.5 * lora.lora_B.detach().T @ weight.grad)
    torch.testing.assert_close(lora.lora_B.grad, 2.5 * weight.grad @ lora.lora_A.detach().T)
    assert base.weight.grad is None and base.bias.grad is None and x.grad is not None


def test_half_precision_base_keeps_float32_adapter() -> None:
    lora, _ = make(dtype=torch.bfloat16)
    y = lora(torch.randn(2, 7, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert lora.lora_B.grad.dtype == torch.float32
    assert lora.fuse().weight.dtype == torch.bfloat16


def test_zero_b_is_the_base_bit_for_bit_and_inputs_are_copied() -> None:
    base, a = nn.Linear(7, 5), np.ones((2, 7), np.float64)
    lora = LoRALinear.from_base(base, 2, 4.0, a)
    x = torch.randn(3, 7)
    assert torch.equal(lora(x), base(x))
    a[:] = 9
    assert lora.lora_A.dtype == torch.float32 and lora.lora_A.max().item() == 1.0
    assert (lora.rank, lora.scale, lora.in_features, lora.out_features) == (2, 2.0, 7, 5)


def test_wrong_shapes_and_quantised_bases_are_errors() -> None:
    with pytest.raises(ModelError) as caught:
        LoRALinear.from_base(nn.Linear(7, 5), 2, 4.0, torch.zeros(2, 7), torch.zeros(2, 5))
    assert caught.value.expected == (5, 2)

    Quantised = type("Quantised", (nn.Module,), {})
    other = Quantised()
    other.in_features, other.out_features = 7, 5
    other.register_buffer("codes", torch.zeros(5, 7, dtype=torch.uint8))
    with pytest.raises(ModelError) as caught:
        LoRALinear.from_base(other, 2, 4.0, torch.zeros(2, 7)).fuse()
    assert (caught.value.expected, caught.value.received) == ("nn.Linear", "Quantised")
