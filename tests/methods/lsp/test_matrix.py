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
from tests.methods.lsp.made import changed, each_shape, larger, matrix, projected  # noqa: E402


@each_shape
def test_factors_of_two_micro_batches_give_the_projected_gradient(m: int, n: int, size: int, nonzeros: int) -> None:
    made = matrix(m, n, size, nonzeros, plane=larger())
    whole = torch.zeros(m, n)
    for tokens in (17, 5):
        rows, columns = normal(tokens, m, seed=tokens), normal(tokens, n, seed=tokens + 1)
        made.collect(rows, columns)
        whole += rows.T @ columns
    assert made.sizes == (min(size, m), min(size, n)) and made.numel == min(size, m) * min(size, n)
    assert made.gradient is not None
    near(made.gradient, projected(made, whole))


@each_shape
def test_whole_gradients_and_rows_give_the_same(m: int, n: int, size: int, nonzeros: int) -> None:
    made = matrix(m, n, size, nonzeros, plane=larger())
    first, some, rows = normal(m, n), torch.tensor([m - 1, 0, m - 1, m // 2]), normal(4, n, seed=1)
    made.collect_whole(first)
    assert made.gradient is not None
    near(made.gradient, projected(made, first))
    made.collect_rows(some, rows)
    near(made.gradient, projected(made, first.index_add(0, some, rows)))


@pytest.mark.parametrize("how", ["factors", "whole", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("m", "n"), [(41, 29), (11, 29), (41, 12), (11, 12)])
def test_bfloat16_is_collected_in_the_dtype_of_the_memory(m: int, n: int, dtype: Any, how: str) -> None:
    """Beside 4096 bfloat16 keeps no number below 8; float32 keeps what was computed in bfloat16."""
    made, rows, columns = matrix(m, n, 13, 4), normal(17, m).bfloat16(), normal(17, n, seed=1).bfloat16()
    whole = (rows.float().T @ columns.float()).bfloat16()
    memory = made.gradient = torch.zeros(made.sizes, dtype=dtype)

    def collect() -> None:
        if how == "factors":
            made.collect(rows, columns)
        elif how == "whole":
            made.collect_whole(whole)
        else:
            made.collect_rows(torch.arange(m), whole)

    collect()
    collect()
    assert made.gradient is memory and memory.dtype == dtype
    near(memory, 2 * projected(made, whole), 0.02)
    memory.fill_(4096)
    rows, columns, whole = rows / 16, columns / 16, whole / 256
    collect()
    if dtype == torch.float32:
        near(memory - 4096, projected(made, whole), 0.02)
    else:
        assert bool((memory == 4096).all())


def test_float32_is_collected_in_bfloat16_too() -> None:
    made, gradient = matrix(41, 29, 13, 4), normal(41, 29)
    memory = made.gradient = torch.zeros(made.sizes, dtype=torch.bfloat16)
    made.collect_whole(gradient)
    near(memory, projected(made, gradient), 0.01)


@pytest.mark.parametrize("how", ["factors", "whole", "rows"])
def test_a_look_sees_the_whole_gradient_once(how: str) -> None:
    made, seen = matrix(41, 29, 13, 4), list[tuple[Matrix, Tensor]]()
    rows, columns = normal(7, 41), normal(7, 29, seed=1)
    some, whole = torch.tensor([40, 3, 40]), normal(3, 29)

    def watch(who: Matrix, gradient: Tensor) -> None:
        assert who.gradient is not None and not bool(who.gradient.any())
        seen.append((who, gradient.clone()))

    made.watch = watch
    for factor in (1, 2):
        if how == "factors":
            made.collect(factor * rows, columns)
        elif how == "whole":
            made.collect_whole(factor * (rows.T @ columns))
        else:
            made.collect_rows(some, factor * whole)
    expected = torch.zeros(41, 29).index_add(0, some, whole) if how == "rows" else rows.T @ columns
    assert len(seen) == 1 and seen[0][0] is made and made.watch is None
    near(seen[0][1], expected, 1e-6)
    assert made.gradient is not None
    near(made.gradient, 3 * projected(made, expected))


def test_projectors_put_by_a_look_are_those_that_collect() -> None:
    made = matrix(41, 29, 13, 4)
    before = table(made.left)
    made.watch = lambda who, gradient: who.put(*who.drawn(9))
    gradient = normal(41, 29)
    made.collect_whole(gradient)
    assert not torch.equal(table(made.left), before)
    assert made.gradient is not None
    near(made.gradient, projected(made, gradient))


def test_without_memory_nothing_is_collected() -> None:
    made = matrix(41, 29, 13, 4)
    made.gradient = None
    with pytest.raises(RuntimeError, match="w: no memory"):
        made.collect_whole(normal(41, 29))


@each_shape
@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("learned", [False, True])
def test_effective_weights(m: int, n: int, size: int, nonzeros: int, decay: float, learned: bool) -> None:
    made = matrix(m, n, size, nonzeros, plane=larger(), threshold=0.0)
    if learned:
        assert made.refresh(low_rank(m, n, 3)).after is not None
    base, change = normal(m, n), normal(*made.sizes, seed=1)
    expected, out = changed(made, base, change, decay), torch.full((m, n), 7.0)
    kept = base.clone()
    assert made.effective(base, change, decay, out) is out
    near(out, expected)
    assert torch.equal(base, kept)
    some = torch.tensor([m - 1, 0, m // 2, 0])
    near(made.effective_rows(base[some], some, change, decay), expected[some])
    made.effective(base, change, decay, base)
    assert torch.equal(base, out)
    rough = kept.bfloat16()
    assert made.effective(rough, change.bfloat16(), decay, rough) is rough
    near(rough, expected, 0.02)
    found = made.effective_rows(kept.bfloat16()[some], some, change.bfloat16(), decay)
    assert found.dtype == torch.bfloat16
    near(found, expected[some], 0.02)


@each_shape
@pytest.mark.parametrize("learned", [False, True])
def test_a_change_comes_back_as_large_as_it_is(m: int, n: int, size: int, nonzeros: int, learned: bool) -> None:
    """The mean of 400 random ones, by the square; 5 standard errors and 2%, for the mean is not over projectors."""
    made = matrix(m, n, size, nonzeros, threshold=0.0)
    if learned:
        made.refresh(low_rank(m, n, 3))
        assert abs(made.gain - 1) > 0.1
    p, q = sides(made.left, made.right)
    changes = normal(400, *made.sizes).double()
    ratios = (made.gain * p @ changes @ q.T).square().mean((1, 2)) / changes.square().mean()
    assert abs(float(ratios.mean()) - 1) <= 5 * float(ratios.std()) / 20 + 0.02


def test_projectors_below_the_threshold_stay() -> None:
    gradient = low_rank(41, 29, 2)
    made = matrix(41, 29, 13, 4, threshold=0.3)
    first = made.refresh(gradient)
    assert first.before > 0.3 and first.after is not None and first.after < 0.3 and made.turn == 1
    left, right, gain = made.left, made.right, made.gain
    second = made.refresh(gradient)
    assert second == BiasCheck(first.after)
    assert made.left is left and made.right is right and made.gain == gain and made.turn == 1
    assert made.refresh(normal(41, 29)).after is not None
    assert made.turn == 2 and made.left is not left
    positions = [side.positions for side in (made.left, left, made.drawn(2)[0])]
    assert positions[0] is not None and positions[1] is not None and positions[2] is not None
    assert torch.equal(positions[0], positions[2]) and not torch.equal(positions[0], positions[1])


def test_the_threshold_itself_is_too_large() -> None:
    made, gradient = matrix(41, 29, 13, 4), normal(41, 29)
    made.config = made.config.model_copy(update={"threshold": relative_bias(made.left, made.right, gradient)})
    assert made.refresh(gradient).after is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("learned", [False, True])
def test_a_gradient_that_is_not_finite_leaves_projectors_as_they_are(value: float, learned: bool) -> None:
    plane, gradient = Plane(), low_rank(41, 29, 2)
    made = matrix(41, 29, 13, 4, plane=plane, threshold=0.0, learned=learned)
    made.refresh(gradient)
    left, right, gain, turn = made.left, made.right, made.gain, made.turn
    tables = sides(left, right)
    gradient[3, 5] = value
    look = made.refresh(gradient)
    assert math.isnan(look.before) and look.after is None and look.carry is None and look.energy == 1
    assert made.left is left and made.right is right and (made.gain, made.turn) == (gain, turn) == (made.gain, 1)
    assert all(torch.equal(a, b) for a, b in zip(sides(left, right), tables, strict=True))
    first, second = normal(*made.sizes), normal(*made.sizes).square()
    found = carried(first, second, look)
    assert found[0] is first and found[1] is second
    assert made.refresh(normal(41, 29, seed=5)).after is not None and made.turn == 2


def test_exact_pairs_are_never_drawn_again() -> None:
    made = matrix(9, 8, 10, 3, threshold=0.0)
    look = made.refresh(normal(9, 8))
    assert look.before <= 1e-3 and look.after is None and look.carry is None and made.turn == 0 and made.gain == 1


def test_drawn_projectors_are_drawn_again_and_not_learned() -> None:
    made, gradient = matrix(41, 29, 13, 4, learned=False), low_rank(41, 29, 2)
    look = made.refresh(gradient)
    for found, drawn in zip(sides(made.left, made.right), sides(*made.drawn(1)), strict=True):
        assert torch.equal(found, drawn)
    assert look.after == relative_bias(made.left, made.right, gradient)


def test_matrices_and_turns_have_their_own_random_numbers() -> None:
    tables = [table(side) for number in (0, 1) for turn in (0, 1) for side in matrix(40, 40, 13, 4, number).drawn(turn)]
    assert all(not torch.equal(a, b) for i, a in enumerate(tables) for b in tables[:i])


def test_learning_that_does_not_help_leaves_projectors_as_they_are() -> None:
    made, gradient = matrix(60, 45, 20, 4, threshold=0.0), low_rank(60, 45, 2)
    made.put(*[getattr(fit(made.left, made.right, gradient, rounds=12), side) for side in ("left", "right")])
    left, before = made.left, relative_bias(made.left, made.right, gradient)
    look = made.refresh(gradient)
    assert (look.before, look.after, look.carry) == (before, None, None) and made.left is left and made.turn == 1
