"""The 4- and 8-bit formats."""

from __future__ import annotations

import pytest
import torch

from ondevice.core.errors import ModelError
from ondevice.runtime_ops import quantized


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"), [(1, 32, 32), (33, 64, 32), (64, 96, 16), (40, 64, 64)]
)
def test_q4_error_is_at_most_half_a_level(outputs, inputs, group):
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs)
    packed, scales, mins = quantized.quantize_q4(weight, group)
    assert packed.dtype == torch.uint8 and scales.dtype == mins.dtype == torch.float16
    assert packed.shape == (-(-outputs // 32) * 32, inputs // 2) and scales.shape == (
        outputs,
        inputs // group,
    )
    error = (quantized.dequantize_q4(packed, scales, mins, group) - weight).abs()
    level = scales.float().repeat_interleave(group, dim=1)
    assert (error <= 0.5 * level * 1.02 + 2e-3).all()


def test_a_weight_on_a_q4_grid_is_recovered():
    torch.manual_seed(1)
    scales, mins = (torch.rand(48, 3) * 0.01 + 1e-3).half(), (torch.rand(48, 3) * -0.1).half()
    levels = torch.randint(0, 16, (48, 3, 32))
    levels[..., 3], levels[..., 30] = 0, 15  # a published Q4_1 group uses its ends
    weight = (levels * scales.float()[..., None] + mins.float()[..., None]).reshape(48, 96)
    packed, new_scales, new_mins = quantized.quantize_q4(weight)
    assert torch.equal(new_scales, scales) and torch.equal(new_mins, mins)
    assert torch.equal(quantized.dequantize_q4(packed, new_scales, new_mins), weight)


def test_constant_groups_are_exact():
    weight = torch.full((2, 32), 0.25)
    assert torch.equal(quantized.dequantize_q4(*quantized.quantize_q4(weight)), weight)


@pytest.mark.parametrize("weight", [torch.zeros(4, 48), torch.full((4, 32), 1e6)])
def test_weights_of_a_wrong_width_or_range_are_refused(weight):
    with pytest.raises(ModelError):
        quantized.quantize_q4(weight)


def test_q8_rows_match_the_reference():
    torch.manual_seed(0)
    weight = torch.randn(10, 24)
    weight[3] = 0
    values, scales = quantized.quantize_q8_rows(weight)
    assert values.dtype == torch.int8 and scales.dtype == torch.float32
    error = (quantized.dequantize_q8_rows(values, scales) - weight).abs()
    assert (error <= 0.5 * scales[:, None] * 1.001).all()


def test_each_q4_level_is_the_nearest_of_the_stored_grid():
    """Of values far from 0, whose minimum moves by half a level when it becomes a float16."""
    torch.manual_seed(3)
    weight = 40.0 + 0.05 * torch.randn(5, 64)
    packed, scales, mins = quantized.quantize_q4(weight)
    assert ((weight.reshape(5, 2, 32).amin(-1) - mins.float()).abs() > scales.float() / 2).any()
    grid = mins.float()[..., None] + scales.float()[..., None] * torch.arange(16)
    nearest = (weight.reshape(5, 2, 32, 1) - grid[:, :, None]).abs().amin(-1).reshape(5, 64)
    error = (quantized.dequantize_q4(packed, scales, mins) - weight).abs()
    torch.testing.assert_close(error, nearest, rtol=0.0, atol=1e-5)
