"""Levels chosen on inputs: less error in a layer's outputs than the nearest levels, whatever the
inputs are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ondevice.models.load import tiny_model
from ondevice.nn.calibrated import (
    GROUP,
    LEVELS,
    RANGES,
    Grid,
    _embedded,
    _fitted,
    _improved,
    _input_moments,
    _spanned,
    in_integers,
    nearest_grid,
    of_integers,
    round_matrix,
    round_model,
)


def correlated(tokens: int, inputs: int, seed: int = 0) -> Tensor:
    """Inputs as a transformer has them: a few directions hold most of them, one input is large."""
    random = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=random)
    x = torch.randn(tokens, inputs, generator=random) @ (
        mix * torch.logspace(0, -2, inputs)[:, None]
    )
    x[:, 5] *= 20
    return x


def matrix(outputs: int, inputs: int, seed: int = 1) -> Tensor:
    return 0.05 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def nearest(weight: Tensor) -> Tensor:
    grid = nearest_grid(weight)
    return grid.dense(grid.levels(weight))


def error(weight: Tensor, rounded: Tensor, x: Tensor) -> float:
    """Of the outputs, as a part of them, in float64."""
    change = x.double() @ (rounded - weight).double().t()
    return float(change.norm() / (x.double() @ weight.double().t()).norm())


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 96), (1, 32), (64, 160)])
def test_outputs_change_less_than_half_as_much_as_with_the_nearest_levels(outputs, inputs) -> None:
    x = correlated(4 * inputs, inputs)
    weight = matrix(outputs, inputs)
    _, rounded = round_matrix(weight, x.t() @ x)
    assert error(weight, rounded, x) < 0.5 * error(weight, nearest(weight), x)


def test_other_inputs_of_the_same_kind_gain_too() -> None:
    x = correlated(1024, 96)
    weight = matrix(33, 96)
    _, rounded = round_matrix(weight, x[:512].t() @ x[:512])
    assert error(weight, rounded, x[512:]) < 0.6 * error(weight, nearest(weight), x[512:])


def test_weights_lie_on_their_grid() -> None:
    x = correlated(300, 96)
    grid, rounded = round_matrix(matrix(33, 96), x.t() @ x)
    assert grid.scales.dtype == grid.mins.dtype == torch.float16
    assert grid.scales.shape == grid.mins.shape == (33, 96 // GROUP)
    levels = grid.levels(rounded)
    assert levels.dtype == torch.uint8 and int(levels.max()) <= 15
    assert torch.equal(grid.dense(levels), rounded)


def test_a_second_time_gives_the_same_bits() -> None:
    x = correlated(200, 96)
    results = [round_matrix(matrix(33, 96), x.t() @ x) for _ in range(2)]
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0].scales, results[1][0].scales)


def test_inputs_that_are_always_zero_keep_weights_near() -> None:
    x = correlated(300, 96)
    x[:, 40:72] = 0.0
    weight = matrix(33, 96)
    _, rounded = round_matrix(weight, x.t() @ x)
    assert error(weight, rounded, x) < 0.5 * error(weight, nearest(weight), x)
    spread = weight.unflatten(1, (-1, GROUP)).amax(-1) - weight.unflatten(1, (-1, GROUP)).amin(-1)
    assert float((rounded - weight).abs().max()) < float(spread.max()) / 2


def test_fewer_rows_than_inputs_are_enough() -> None:
    x = correlated(7, 160)
    weight = matrix(33, 160)
    _, rounded = round_matrix(weight, x.t() @ x)
    assert bool(rounded.isfinite().all())
    assert error(weight, rounded, x) < 0.5 * error(weight, nearest(weight), x)


def test_without_inputs_levels_are_near_their_weights() -> None:
    weight = matrix(33, 96)
    _, rounded = round_matrix(weight, torch.zeros(96, 96))
    assert float((rounded - weight).norm()) <= float((nearest(weight) - weight).norm())


def test_without_inputs_each_level_is_the_nearest_of_its_grid() -> None:
    """No error is handed on to other columns."""
    weight = matrix(33, 96)
    grid, rounded = round_matrix(weight, torch.zeros(96, 96))
    assert torch.equal(grid.dense(grid.levels(weight)), rounded)


def test_a_group_spans_the_range_with_the_least_weighted_error() -> None:
    weight = matrix(17, GROUP).numpy().astype(np.float64)
    weight[:, 3] *= 4  # a range that leaves it out may be better
    importance = np.exp(np.random.default_rng(0).normal(size=GROUP))
    found = _spanned(torch.from_numpy(weight).float(), torch.from_numpy(importance).float())
    for row, scale, minimum in zip(weight, *(one.tolist() for one in found), strict=True):
        low, high = row.min(), row.max()
        errors = {}
        for share in RANGES:
            middle, half = (low + high) / 2, (high - low) / 2
            step = np.float16((high - low) * share / LEVELS)
            first = np.float16(middle - half * share)
            level = np.clip(np.round((row - first) / step), 0, LEVELS)
            errors[step] = ((row - level * step - first) ** 2 * importance).sum(), first
        best = min(errors, key=lambda step: errors[step][0])
        assert (scale, minimum) == (best, errors[best][1])


def test_scales_and_minima_that_made_the_weights_are_found_again() -> None:
    random = torch.Generator().manual_seed(2)
    levels = torch.randint(0, LEVELS + 1, (9, 64), generator=random).float()
    scales, mins = 0.01 + 0.01 * torch.rand(9, 2, generator=random), -torch.rand(9, 2)
    made = Grid(scales.half(), mins.half())
    x = correlated(400, 64)
    began = Grid((made.scales * 1.2).half(), (made.mins * 0.9).half())
    found = _fitted(made.dense(levels), levels, began, x.t() @ x + torch.eye(64))
    torch.testing.assert_close(found.scales, made.scales, rtol=5e-3, atol=1e-4)
    torch.testing.assert_close(found.mins, made.mins, rtol=5e-3, atol=5e-3)


def test_a_level_that_is_off_is_chosen_again() -> None:
    weight = matrix(9, 64)
    grid = nearest_grid(weight)
    best = grid.levels(weight).float()
    off = (
        best + torch.randint(-2, 3, best.shape, generator=torch.Generator().manual_seed(3))
    ).clamp(0, LEVELS)
    assert not torch.equal(off, best)
    assert torch.equal(_improved(weight, off, grid, torch.eye(64)), best)


def test_a_matrix_on_a_grid_stays_where_it_is() -> None:
    weight = nearest(matrix(33, 96))
    x = correlated(300, 96)
    _, rounded = round_matrix(weight, x.t() @ x)
    torch.testing.assert_close(rounded, weight, rtol=0, atol=1e-6)


def test_equal_weights_have_their_value() -> None:
    weight = torch.full((5, 64), 0.25)
    weight[2] = 0.0
    x = correlated(100, 64)
    _, rounded = round_matrix(weight, x.t() @ x)
    torch.testing.assert_close(rounded, weight, rtol=0, atol=1e-6)


def test_a_model_s_hidden_states_are_nearer_to_float32_s() -> None:
    rows = np.random.default_rng(0).integers(1, 250, (24, 12)).tolist()
    rows[3] = rows[3][:5]
    ids = torch.tensor(rows[:3])
    loaded: Any = tiny_model("llama", seed=0)
    with torch.no_grad():
        wanted = loaded.family.hidden(ids)
        grids = round_model(loaded.family, rows)
        ours = loaded.family.hidden(ids)
        plain: Any = tiny_model("llama", seed=0)
        for name in grids:
            parameter = plain.model.get_parameter(name)
            parameter.data = nearest(parameter.data)
        theirs = plain.family.hidden(ids)
    assert set(grids) == {
        f"{loaded.family.linear_name(layer, target)}.weight"
        for layer in range(loaded.dims.layers)
        for target in loaded.family.targets(layer)
    }
    assert float((ours - wanted).norm()) < 0.85 * float((theirs - wanted).norm())
    for name, grid in grids.items():
        assert isinstance(grid, Grid)
        weight = loaded.model.get_parameter(name).detach()
        assert torch.equal(grid.dense(grid.levels(weight)), weight)


def test_padding_behind_a_short_row_does_not_count() -> None:
    rows = [[5, 6, 7, 8], [9, 10]]
    loaded: Any = tiny_model("llama", seed=0)

    def moments(some: list[list[int]]) -> list[tuple[list[str], Tensor]]:
        return _input_moments(loaded.family, 0, [_embedded(loaded.family, some)])

    with torch.no_grad():
        together = moments(rows)
        apart = [moments([row]) for row in rows]
    assert [targets for targets, _ in together] == [
        ["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"],
    ]  # fmt: skip
    for number, (_, sums) in enumerate(together):
        expected = sum(one[number][1] for one in apart)
        torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 96), (1, 32)])
def test_scales_in_8_bits_are_stored_exactly_and_cost_little(outputs: int, inputs: int) -> None:
    """Their rounding moves a weight by a part of what rounding to levels moves it by."""
    x = correlated(4 * inputs, inputs)
    weight = matrix(outputs, inputs)
    weight[0, :GROUP] *= 0.01  # a group far below the others of its row
    for grid, rounded in (
        round_matrix(weight, x.t() @ x, scale_bits=8),
        (of_row := nearest_grid(weight, scale_bits=8), of_row.dense(of_row.levels(weight))),
    ):
        assert grid.tops is not None and grid.tops.shape == (outputs, 2)
        scales, mins = in_integers(grid.scales, grid.mins, grid.tops)
        assert scales.dtype == torch.uint8 and mins.dtype == torch.int8
        assert scales.shape == mins.shape == (outputs, inputs // GROUP)
        again = of_integers(scales, mins, grid.tops)
        assert torch.equal(again[0], grid.scales) and torch.equal(again[1], grid.mins)
        assert torch.equal(grid.dense(grid.levels(rounded)), rounded)
    assert float((rounded - weight).norm()) < 1.05 * float((nearest(weight) - weight).norm())
    _, chosen = round_matrix(weight, x.t() @ x, scale_bits=8)
    assert error(weight, chosen, x) < 0.5 * error(weight, nearest(weight), x)


def test_the_integers_of_a_row_reach_their_ends() -> None:
    """255 and 127 are the row's largest scale and minimum, so that no step is wasted."""
    weight = matrix(9, 128)
    grid = nearest_grid(weight, scale_bits=8)
    assert grid.tops is not None
    scales, mins = in_integers(grid.scales, grid.mins, grid.tops)
    assert (scales.amax(1) == 255).all() and (mins.abs().amax(1) == 127).all()
    wanted = nearest_grid(weight)
    half = grid.tops.float() / torch.tensor([2 * 255.0, 2 * 127.0]) + 1e-4
    assert ((grid.scales - wanted.scales).abs().float() <= half[:, :1]).all()
    assert ((grid.mins - wanted.mins).abs().float() <= half[:, 1:]).all()


def test_rows_of_equal_or_tiny_weights_have_scales_above_zero() -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.25
    weight[2] = 1e-7 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    grid = nearest_grid(weight, scale_bits=8)
    assert (grid.scales > 0).all()
    torch.testing.assert_close(grid.dense(grid.levels(weight)), weight, rtol=1e-3, atol=3e-7)
