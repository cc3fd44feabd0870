"""A matrix in its subspace against dense float64: what is collected, what comes back, and its refresh."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ondevice.methods.lsp.fit import fit, relative_bias  # noqa: E402
from ondevice.methods.lsp.matrix import (  # noqa: E402
    BiasCheck,
    Matrix,
    Plane,
    carried,
)
from tests.methods.lsp.dense import low_rank, near, normal, sides, table  # noqa: E402
from tests.methods.lsp.matrices import changed, each_shape, larger, matrix, projected  # noqa: E402


@each_shape
def test_factors_of_two_micro_batches_give_the_projected_gradient(
    m: int, n: int, size: int, nonzeros: int
) -> None:
    projection = matrix(m, n, size, nonzeros, plane=larger())
    whole = torch.zeros(m, n)
    for tokens in (17, 5):
        rows, columns = normal(tokens, m, seed=tokens), normal(tokens, n, seed=tokens + 1)
        projection.collect(rows, columns)
        whole += rows.T @ columns
    assert projection.sizes == (min(size, m), min(size, n)) and projection.numel == min(
        size, m
    ) * min(size, n)
    assert projection.gradient is not None
    near(projection.gradient, projected(projection, whole))


@each_shape
def test_whole_gradients_and_rows_give_the_same(m: int, n: int, size: int, nonzeros: int) -> None:
    projection = matrix(m, n, size, nonzeros, plane=larger())
    first, some, rows = normal(m, n), torch.tensor([m - 1, 0, m - 1, m // 2]), normal(4, n, seed=1)
    projection.collect_whole(first)
    assert projection.gradient is not None
    near(projection.gradient, projected(projection, first))
    projection.collect_rows(some, rows)
    near(projection.gradient, projected(projection, first.index_add(0, some, rows)))


@pytest.mark.parametrize("how", ["factors", "whole", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("m", "n"), [(41, 29), (11, 29), (41, 12), (11, 12)])
def test_bfloat16_is_collected_in_the_dtype_of_the_memory(
    m: int, n: int, dtype: Any, how: str
) -> None:
    """Beside 4096 bfloat16 keeps no number below 8; float32 keeps what was computed in bfloat16."""
    projection, rows, columns = (
        matrix(m, n, 13, 4),
        normal(17, m).bfloat16(),
        normal(17, n, seed=1).bfloat16(),
    )
    whole = (rows.float().T @ columns.float()).bfloat16()
    memory = projection.gradient = torch.zeros(projection.sizes, dtype=dtype)

    def collect() -> None:
        if how == "factors":
            projection.collect(rows, columns)
        elif how == "whole":
            projection.collect_whole(whole)
        else:
            projection.collect_rows(torch.arange(m), whole)

    collect()
    collect()
    assert projection.gradient is memory and memory.dtype == dtype
    near(memory, 2 * projected(projection, whole), 0.02)
    memory.fill_(4096)
    rows, columns, whole = rows / 16, columns / 16, whole / 256
    collect()
    if dtype == torch.float32:
        near(memory - 4096, projected(projection, whole), 0.02)
    else:
        assert bool((memory == 4096).all())


def test_float32_is_collected_in_bfloat16_too() -> None:
    projection, gradient = matrix(41, 29, 13, 4), normal(41, 29)
    memory = projection.gradient = torch.zeros(projection.sizes, dtype=torch.bfloat16)
    projection.collect_whole(gradient)
    near(memory, projected(projection, gradient), 0.01)


@pytest.mark.parametrize("how", ["factors", "whole", "rows"])
def test_a_bias_check_sees_the_complete_gradient_once(how: str) -> None:
    projection, seen = matrix(41, 29, 13, 4), list[tuple[Matrix, Tensor]]()
    rows, columns = normal(7, 41), normal(7, 29, seed=1)
    some, whole = torch.tensor([40, 3, 40]), normal(3, 29)

    def watch(who: Matrix, gradient: Tensor) -> None:
        assert who.gradient is not None and not bool(who.gradient.any())
        seen.append((who, gradient.clone()))

    projection.watch = watch
    for factor in (1, 2):
        if how == "factors":
            projection.collect(factor * rows, columns)
        elif how == "whole":
            projection.collect_whole(factor * (rows.T @ columns))
        else:
            projection.collect_rows(some, factor * whole)
    expected = torch.zeros(41, 29).index_add(0, some, whole) if how == "rows" else rows.T @ columns
    assert len(seen) == 1 and seen[0][0] is projection and projection.watch is None
    near(seen[0][1], expected, 1e-6)
    assert projection.gradient is not None
    near(projection.gradient, 3 * projected(projection, expected))


def test_refreshed_projectors_collect_the_gradient() -> None:
    projection = matrix(41, 29, 13, 4)
    before = table(projection.left)
    projection.watch = lambda who, gradient: who.put(*who.drawn(9))
    gradient = normal(41, 29)
    projection.collect_whole(gradient)
    assert not torch.equal(table(projection.left), before)
    assert projection.gradient is not None
    near(projection.gradient, projected(projection, gradient))


def test_without_memory_nothing_is_collected() -> None:
    projection = matrix(41, 29, 13, 4)
    projection.gradient = None
    with pytest.raises(RuntimeError):
        projection.collect_whole(normal(41, 29))


@each_shape
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("learned", [False, True])
def test_effective_weights(
    m: int, n: int, size: int, nonzeros: int, decay: float, learned: bool
) -> None:
    projection = matrix(m, n, size, nonzeros, plane=larger(), threshold=0.0)
    if learned:
        assert projection.refresh(low_rank(m, n, 3)).after is not None
    base, change = normal(m, n), normal(*projection.sizes, seed=1)
    expected, out = changed(projection, base, change, decay), torch.full((m, n), 7.0)
    kept = base.clone()
    assert projection.effective(base, change, decay, out) is out
    near(out, expected)
    assert torch.equal(base, kept)
    some = torch.tensor([m - 1, 0, m // 2, 0])
    near(projection.effective_rows(base[some], some, change, decay), expected[some])
    projection.effective(base, change, decay, base)
    assert torch.equal(base, out)
    rough = kept.bfloat16()
    assert projection.effective(rough, change.bfloat16(), decay, rough) is rough
    near(rough, expected, 0.02)
    actual = projection.effective_rows(kept.bfloat16()[some], some, change.bfloat16(), decay)
    assert actual.dtype == torch.bfloat16
    near(actual, expected[some], 0.02)


@each_shape
@pytest.mark.parametrize("learned", [False, True])
def test_a_change_comes_back_as_large_as_it_is(
    m: int, n: int, size: int, nonzeros: int, learned: bool
) -> None:
    """The mean of 400 random ones, by the square; 5 standard errors and 2%, for the mean is not over projectors."""
    projection = matrix(m, n, size, nonzeros, threshold=0.0)
    if learned:
        projection.refresh(low_rank(m, n, 3))
        assert abs(projection.gain - 1) > 0.1
    p, q = sides(projection.left, projection.right)
    changes = normal(400, *projection.sizes).double()
    ratios = (projection.gain * p @ changes @ q.T).square().mean((1, 2)) / changes.square().mean()
    assert abs(float(ratios.mean()) - 1) <= 5 * float(ratios.std()) / 20 + 0.02


def test_projectors_below_the_threshold_stay() -> None:
    gradient = low_rank(41, 29, 2)
    projection = matrix(41, 29, 13, 4, threshold=0.3)
    first = projection.refresh(gradient)
    assert (
        first.before > 0.3
        and first.after is not None
        and first.after < 0.3
        and projection.turn == 1
    )
    left, right, gain = projection.left, projection.right, projection.gain
    second = projection.refresh(gradient)
    assert second == BiasCheck(first.after)
    assert (
        projection.left is left
        and projection.right is right
        and projection.gain == gain
        and projection.turn == 1
    )
    assert projection.refresh(normal(41, 29)).after is not None
    assert projection.turn == 2 and projection.left is not left
    positions = [side.positions for side in (projection.left, left, projection.drawn(2)[0])]
    assert positions[0] is not None and positions[1] is not None and positions[2] is not None
    assert torch.equal(positions[0], positions[2]) and not torch.equal(positions[0], positions[1])


def test_projectors_that_follow_the_gradient_stay_below_the_threshold_after_the_first_turn() -> (
    None
):
    gradient = low_rank(41, 29, 2)
    projection = matrix(41, 29, 13, 4, threshold=0.3, projector_values="followed", learned=False)
    assert projection.refresh(gradient).after is not None and projection.turn == 1
    left = projection.left
    second = projection.refresh(gradient)
    assert second.before < 0.3 and second.after is None
    assert projection.left is left and projection.turn == 1


def test_the_threshold_itself_is_too_large() -> None:
    projection, gradient = matrix(41, 29, 13, 4), normal(41, 29)
    projection.config = projection.config.model_copy(
        update={"threshold": relative_bias(projection.left, projection.right, gradient)}
    )
    assert projection.refresh(gradient).after is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("learned", [False, True])
def test_a_gradient_that_is_not_finite_leaves_projectors_as_they_are(
    value: float, learned: bool
) -> None:
    plane, gradient = Plane(), low_rank(41, 29, 2)
    projection = matrix(41, 29, 13, 4, plane=plane, threshold=0.0, learned=learned)
    projection.refresh(gradient)
    left, right, gain, turn = projection.left, projection.right, projection.gain, projection.turn
    tables = sides(left, right)
    gradient[3, 5] = value
    look = projection.refresh(gradient)
    assert (
        math.isnan(look.before)
        and look.after is None
        and look.carry is None
        and look.momentum == look.energy == 1
    )
    assert (
        projection.left is left
        and projection.right is right
        and (projection.gain, projection.turn) == (gain, turn) == (projection.gain, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(sides(left, right), tables, strict=True))
    first, second = normal(*projection.sizes), normal(*projection.sizes).square()
    moved = carried(first, second, look)
    assert moved[0] is first and moved[1] is second
    assert projection.refresh(normal(41, 29, seed=5)).after is not None and projection.turn == 2


def test_exact_pairs_are_never_drawn_again() -> None:
    projection = matrix(9, 8, 10, 3, threshold=0.0)
    look = projection.refresh(normal(9, 8))
    assert (
        look.before <= 1e-3
        and look.after is None
        and look.carry is None
        and projection.turn == 0
        and projection.gain == 1
    )


def test_drawn_projectors_are_drawn_again_and_not_learned() -> None:
    projection, gradient = matrix(41, 29, 13, 4, learned=False), low_rank(41, 29, 2)
    look = projection.refresh(gradient)
    for actual, drawn in zip(
        sides(projection.left, projection.right), sides(*projection.drawn(1)), strict=True
    ):
        assert torch.equal(actual, drawn)
    assert look.after == relative_bias(projection.left, projection.right, gradient)


def test_matrices_and_turns_have_their_own_random_numbers() -> None:
    tables = [
        table(side)
        for number in (0, 1)
        for turn in (0, 1)
        for side in matrix(40, 40, 13, 4, number).drawn(turn)
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


def test_learning_that_does_not_help_leaves_projectors_as_they_are() -> None:
    projection, gradient = matrix(60, 45, 20, 4, threshold=0.0), low_rank(60, 45, 2)
    projection.put(
        *[
            getattr(fit(projection.left, projection.right, gradient, rounds=12), side)
            for side in ("left", "right")
        ]
    )
    left, before = projection.left, relative_bias(projection.left, projection.right, gradient)
    look = projection.refresh(gradient)
    assert (
        (look.before, look.after, look.carry) == (before, None, None)
        and projection.left is left
        and projection.turn == 1
    )


def test_a_matrix_begins_with_the_pair_of_turn_0() -> None:
    """A checkpoint of before the first refresh names that turn."""
    projection = matrix(41, 29, 13, 4)
    assert projection.turn == 0
    for actual, drawn in zip(
        sides(projection.left, projection.right), sides(*projection.drawn(0)), strict=True
    ):
        assert torch.equal(actual, drawn)
