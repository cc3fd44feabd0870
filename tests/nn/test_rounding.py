"""Rounding by chance: neighbours of a value in the narrow type, and the value itself on average."""

from __future__ import annotations

import pytest
import torch

from ondevice.nn.rounding import stochastic_round

VALUES = [0.0, 1.0, 1.0003, -0.02, 0.3333, -7.77, 1e-3, 6.2e-5, 6.0e-5, -3.3e-6, 1.7e-7, 4e-8]


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", VALUES)
def test_a_value_becomes_a_neighbour_and_itself_on_average(
    narrow: torch.dtype, value: float
) -> None:
    weight = torch.full((40_000,), value)
    out = torch.empty(weight.shape, dtype=narrow)
    stochastic_round(out, weight, 7)
    found = out.double().unique()
    nearest = weight[:1].to(narrow)
    above = torch.nextafter(nearest, torch.tensor([1.0], dtype=narrow) * torch.inf)
    below = torch.nextafter(nearest, torch.tensor([1.0], dtype=narrow) * -torch.inf)
    neighbours = torch.cat([below, nearest, above]).double()
    assert len(found) <= 2 and torch.isin(found, neighbours).all()
    unit = float((neighbours[2] - neighbours[0]) / 2)
    assert float(out.double().mean()) == pytest.approx(float(weight[0]), abs=unit / 40)
    again = torch.empty_like(out)
    assert torch.equal(stochastic_round(again, weight, 7), out)
    assert (stochastic_round(again, nearest.float().expand(len(out)), 8) == nearest).all()


def test_the_ends_of_float16_stay_what_they_are() -> None:
    ends = torch.tensor([65504.0, -65504.0, 65519.0, 1e6, torch.inf, -torch.inf])
    out = torch.empty(ends.shape, dtype=torch.float16)
    assert torch.equal(stochastic_round(out, ends, 1), ends.half())
    assert stochastic_round(out[:1], torch.tensor([torch.nan]), 1).isnan().all()


def test_float32_is_copied() -> None:
    weight = torch.randn(9)
    assert torch.equal(stochastic_round(torch.empty(9), weight, 1), weight)
