"""A matrix in its subspace against dense float64: what is collected, what comes back, its refresh and its moments, and
what a group of matrices shows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ondevice.offload.lsp.config import ProjectorConfig  # noqa: E402
from ondevice.offload.lsp.learn import learn, relative_bias  # noqa: E402
from ondevice.offload.lsp.matrix import Look, Matrix, carried  # noqa: E402
from ondevice.offload.lsp.plane import Group, Plane  # noqa: E402
from ondevice.offload.lsp.projector import Projector  # noqa: E402
from tests.offload.lsp.dense import low_rank, near, normal, sides, table  # noqa: E402

SHAPES = [(41, 29, 13, 4), (29, 41, 13, 3), (90, 14, 11, 11), (11, 50, 12, 5), (50, 12, 12, 1), (30, 31, 1, 1)]
"""Rows, columns, subspace, nonzeros; one side is exact in two."""
each_shape = pytest.mark.parametrize(("m", "n", "size", "nonzeros"), SHAPES)


def matrix(
    m: int, n: int, size: int, nonzeros: int, number: int = 0, plane: Plane | None = None, **config: Any
) -> Matrix:
    """In a group of its own."""
    group = Group(plane or Plane(), "cpu")
    made = Matrix("w", (m, n), number, ProjectorConfig(subspace=size, nonzeros=nonzeros, **config), 5, group)
    made.gradient = torch.zeros(made.sizes)
    return made


def larger() -> Plane:
    """Memory with the values of a larger matrix in it."""
    plane = Plane()
    matrix(120, 130, 40, 7, 1, plane).collect(normal(3, 120), normal(3, 130))
    return plane


MEMBERS = [(41, 29), (11, 50), (29, 41), (50, 12), (9, 8), (90, 14), (12, 13)]
"""Rows and columns in a group of subspace 12: the left side, the right side and both sides of one are exact, and the
left one of the last."""


def members(plane: Plane, shapes: list[tuple[int, int]] = MEMBERS, first: int = 0, device: str = "cpu") -> list[Matrix]:
    """Matrices of one group."""
    group, config = Group(plane, device), ProjectorConfig(subspace=12, nonzeros=5, threshold=0.0)
    made = [Matrix(f"w{i}", shape, first + i, config, 5, group) for i, shape in enumerate(shapes)]
    for one in made:
        one.gradient = torch.zeros(one.sizes)
    return made


def shows(group: list[Matrix], dtype: Any) -> None:
    """Dense projectors of all members are there together, and are right to the bit."""
    pairs = [one.dense_pair(dtype) for one in reversed(group)][::-1]
    for one, pair in zip(group, pairs, strict=True):
        for side, found in zip((one.left, one.right), pair, strict=True):
            assert (found is None) == side.exact == (side.rows <= 12)
            if found is not None:
                assert found.dtype == dtype
                assert torch.equal(found, table(side).to(dtype))


def projected(made: Matrix, gradient: Tensor) -> Tensor:
    p, q = sides(made.left, made.right)
    return p.T @ gradient.double() @ q


def changed(made: Matrix, base: Tensor, change: Tensor, decay: float) -> Tensor:
    p, q = sides(made.left, made.right)
    gain = 1.0
    for side, dense in ((made.left, p), (made.right, q)):
        if not side.exact:
            gain *= float(dense.square().sum() / len(dense)) ** -0.5
    return decay * base.double() + gain * p @ change.double() @ q.T


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_group_shows_the_dense_projectors_of_each_member(dtype: Any) -> None:
    plane = Plane()
    group, other = members(plane), members(plane, [(120, 61), (77, 130)], first=len(MEMBERS))
    shows(group, dtype)
    for changed in range(len(group)):
        group[changed].put(*group[changed].drawn(changed + 1))
        shows(group, dtype)
    shows(other, dtype)
    shows(group, dtype)
    other[1].dense_pair(dtype)
    group[2].put(*group[2].drawn(20))  # while another group is shown
    other[0].put(*other[0].drawn(20))
    shows(group, dtype)
    shows(other, dtype)


def test_a_group_shows_its_projectors_in_two_dtypes_at_once() -> None:
    plane = Plane()
    group, other = members(plane), members(plane, [(120, 61)], first=len(MEMBERS))
    for turn, dtypes in enumerate([(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]):
        rough, fine = [[one.dense_pair(dtype)[1] for one in group[:3]] for dtype in dtypes]
        shows(group, dtypes[0])
        for found, dtype in ((rough, dtypes[0]), (fine, dtypes[1])):
            for one, seen in zip(group[:3], found, strict=True):
                assert torch.equal(seen, table(one.right).to(dtype))
        shows(other, dtypes[0])
        shows(group, dtypes[1])
        shows(group, dtypes[0])
        group[0].put(*group[0].drawn(turn + 1))
        shows(other, dtypes[1])
        for dtype in dtypes:
            shows(group, dtype)
            shows(other, dtype)


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_projectors_are_made_dense_only_where_others_were(device: str) -> None:
    """What is written over them stays until they must be made anew, in the same memory. A device with an index is the
    one without, as `cuda` is where tensors say `cuda:0`."""
    plane, dtypes = Plane(), (torch.float32, torch.bfloat16)
    group, other = members(plane, device=device), members(plane, [(31, 33)], len(MEMBERS), device)
    for dtype in dtypes:
        shows(group, dtype)
    memory = dict(plane.memory)
    sizes = [side.rows * side.size for one in group for side in (one.left, one.right) if not side.exact]
    assert {dtype: (found.dtype, found.numel()) for dtype, found in memory.items()} == {
        dtype: (dtype, sum(sizes)) for dtype in dtypes
    }

    def made_anew(one: Matrix, dtype: Any = torch.float32) -> bool:
        plane.memory[dtype].fill_(7.0)
        return not bool((one.dense_pair(dtype)[1] == 7).all())

    other[0].put(*other[0].drawn(1))
    assert not any(made_anew(one, dtype) for one in (group[0], group[-1]) for dtype in dtypes)
    group[0].put(*group[0].drawn(1))
    for dtype in dtypes:
        assert made_anew(group[-1], dtype) and not made_anew(group[0], dtype)
    assert made_anew(other[0]) and not made_anew(other[0])
    assert not made_anew(group[0], torch.bfloat16) and made_anew(group[0])
    for dtype in dtypes:
        shows(other, dtype)
        shows(group, dtype)
    assert plane.memory.keys() == memory.keys()
    assert all(found is memory[dtype] for dtype, found in plane.memory.items())


def test_members_of_a_group_collect_and_change_as_they_do_alone() -> None:
    """Backward through the group and the other one, with projectors put by a look on the way."""
    plane = Plane()
    group, other = members(plane), members(plane, [(31, 33)], first=len(MEMBERS))
    group[3].watch = lambda who, gradient: who.put(*who.drawn(9))
    wanted = dict[str, Tensor]()
    for step, one in enumerate([*group[:2:-1], other[0], *group[2::-1]]):
        rows, columns, gradient = normal(5, one.shape[0], seed=step), normal(5, one.shape[1]), normal(*one.shape)
        one.collect(rows, columns)
        one.collect_whole(gradient)
        wanted[one.name if one is not other[0] else "other"] = rows.T @ columns + gradient
    for one in (*group, other[0]):
        assert one.gradient is not None
        near(one.gradient, projected(one, wanted[one.name if one is not other[0] else "other"]))
        base, change = normal(*one.shape), normal(*one.sizes, seed=1)
        near(one.effective(base, change, 0.9, torch.empty_like(base)), changed(one, base, change, 0.9))


def test_a_group_of_exact_matrices_needs_no_memory() -> None:
    plane = Plane()
    (made,) = members(plane, [(9, 8)])
    gradient, base, change = normal(9, 8), normal(9, 8, seed=1), normal(9, 8, seed=2)
    made.collect(normal(5, 9), normal(5, 8))
    made.collect_whole(gradient)
    made.collect_rows(torch.tensor([8, 3]), gradient[:2])
    assert made.gradient is not None
    near(made.gradient, (normal(5, 9).T @ normal(5, 8) + gradient).index_add(0, torch.tensor([8, 3]), gradient[:2]))
    near(made.effective(base, change, 0.9, torch.empty_like(base)), 0.9 * base + change)
    assert not plane.memory and made.dense_pair(torch.float32) == (None, None)


def test_projectors_below_the_threshold_stay() -> None:
    gradient = low_rank(41, 29, 2)
    made = matrix(41, 29, 13, 4, threshold=0.3)
    first = made.refresh(gradient)
    assert first.before > 0.3 and first.after is not None and first.after < 0.3 and made.turn == 1
    left, right, gain = made.left, made.right, made.gain
    second = made.refresh(gradient)
    assert second == Look(first.after)
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


@each_shape
@pytest.mark.parametrize("learned", [False, True])
def test_moments_are_carried_by_the_old_and_new_projectors(
    m: int, n: int, size: int, nonzeros: int, learned: bool
) -> None:
    made = matrix(m, n, size, nonzeros, threshold=0.0, learned=learned)
    old_p, old_q = sides(made.left, made.right)
    gradient = low_rank(m, n, 3)
    look = made.refresh(gradient)
    assert look.carry is not None
    p, q = sides(made.left, made.right)
    a, b = p.T @ old_p, old_q.T @ q
    known = a.square() @ (old_p.T @ gradient.double() @ old_q).square() @ b.square()
    energy = float((p.T @ gradient.double() @ q).square().sum() / known.sum())
    assert look.energy == pytest.approx(energy, rel=1e-4) and abs(energy - 1) > 0.01
    first, second = normal(*made.sizes), normal(*made.sizes, seed=1).square()
    found = carried(first, second, look)
    near(found[0], a @ first.double() @ b, 1e-5)
    near(found[1], energy * a.square() @ second.double() @ b.square(), 1e-4)
    assert bool((found[1] >= 0).all())


@each_shape
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str)
def test_on_the_gradient_of_the_look_the_carried_second_moment_has_the_right_sum(
    m: int, n: int, size: int, nonzeros: int, learned: bool, dtype: Any, tolerance: float
) -> None:
    made, gradient = matrix(m, n, size, nonzeros, threshold=0.0, learned=learned), low_rank(m, n, 3).to(dtype)
    for turn in (1, 2):
        old = projected(made, gradient)
        look = made.refresh(gradient)
        assert made.turn == turn
        wanted = float(projected(made, gradient).square().sum())
        found = carried(old.float(), old.square().float(), look)[1]
        assert float(found.sum()) == pytest.approx(wanted, rel=tolerance)
        gradient = low_rank(m, n, 3, seed=1).to(dtype)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_energy_does_not_depend_on_the_gradients_size(factor: float) -> None:
    found = [matrix(41, 29, 13, 4).refresh(size * low_rank(41, 29, 3)).energy for size in (1.0, factor)]
    assert found[1] == pytest.approx(found[0], rel=1e-2) and abs(found[0] - 1) > 0.05


def test_a_gradient_that_the_old_subspace_does_not_see_leaves_the_second_moments_size() -> None:
    made, gradient = matrix(41, 29, 13, 4), torch.zeros(41, 29)
    assert made.left.values is not None
    made.left.values[7] = 0.0
    gradient[7] = normal(29)
    look = made.refresh(gradient)
    assert look.before == 1 and look.after is not None and look.carry is not None and look.energy == 1


def spanning(rows: int, size: int, seed: int) -> Projector:
    """One value in each row, and columns of unit length that are orthogonal to each other."""
    positions = torch.arange(rows)[:, None] % size
    values = normal(rows, 1, seed=seed)
    lengths = torch.zeros(size).index_add(0, positions[:, 0], values[:, 0].square()).sqrt()
    return Projector(rows, size, torch.device("cpu"), positions, values / lengths[positions])


def test_learning_that_does_not_help_leaves_projectors_as_they_are() -> None:
    made, gradient = matrix(60, 45, 20, 4, threshold=0.0), low_rank(60, 45, 2)
    made.put(*[getattr(learn(made.left, made.right, gradient, rounds=12), side) for side in ("left", "right")])
    left, before = made.left, relative_bias(made.left, made.right, gradient)
    look = made.refresh(gradient)
    assert (look.before, look.after, look.carry) == (before, None, None) and made.left is left and made.turn == 1


def test_the_first_moment_of_gradients_in_the_span_is_carried_exactly() -> None:
    """There P P^T G Q Q^T = G, and so the carried moment is what the new projectors would have given."""
    made = matrix(60, 45, 20, 4, threshold=0.0, learned=False)
    made.put(spanning(60, 20, 1), spanning(45, 20, 2))
    p, q = sides(made.left, made.right)
    gradients = [p @ normal(20, 20, seed=step).double() @ q.T for step in range(10)]
    old = averaged([p.T @ gradient @ q for gradient in gradients])
    look = made.refresh(gradients[-1].float())
    assert look.before <= 1e-3 and look.carry is not None
    new = averaged([projected(made, gradient) for gradient in gradients])
    near(carried(old[0].float(), old[1].float(), look)[0], new[0], 1e-5)


def averaged(gradients: list[Tensor], beta1: float = 0.9, beta2: float = 0.99) -> tuple[Tensor, Tensor]:
    """Adam's moments."""
    m, v = torch.zeros_like(gradients[0]), torch.zeros_like(gradients[0])
    for gradient in gradients:
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient.square()
    return m, v


@pytest.mark.parametrize(
    ("kind", "sums", "correlations"),
    [
        ("learned to learned", (1.0, 2.0), (0.2, 0.4)),
        ("drawn to learned", (1.1, 1.9), (-0.3, 0.13)),
        ("drawn to drawn", (0.7, 1.2), (-0.1, 0.18)),
    ],
)
def test_how_good_the_carried_second_moment_is(
    kind: str, sums: tuple[float, float], correlations: tuple[float, float]
) -> None:
    """Gradients of rank 4 and noise of 0.3, 200 steps, twelve seeds: the carried second moment's sum over what the new
    projectors would have given, and the correlation of its elements with that.

                           sum: geometric mean (lowest to highest)   without `energy`       correlation: mean
        learned to learned   1.44 (0.68 to 3.99)                     0.16 (0.06 to 0.36)    0.48 (0.31 to 0.76)
        drawn to learned     1.48 (1.09 to 2.65)                     2.15 (0.85 to 5.00)    0.21 (-0.12 to 0.45)
        drawn to drawn       0.92 (0.48 to 1.82)                     10.1 (5.27 to 32.1)    0.26 (0.04 to 0.56)

    `sums` bounds the geometric mean; no seed is off by more than a factor of 6. `correlations` bounds every seed, and
    the mean, from below.
    """
    totals, without, alike = [], [], []
    for seed in range(12):
        random = torch.Generator().manual_seed(seed)
        tall, wide = torch.randn(60, 4, generator=random), torch.randn(45, 4, generator=random)
        gradients = [
            (tall * torch.randn(4, generator=random)) @ wide.T / 2 + 0.3 * torch.randn(60, 45, generator=random)
            for _ in range(202)
        ]
        made = matrix(60, 45, 20, 4, threshold=0.0, learned=kind.endswith("to learned"))
        made.seed = seed
        made.put(*made.drawn(0))
        if kind.startswith("learned"):
            made.refresh(gradients[-1])
        old = averaged([projected(made, gradient) for gradient in gradients[:200]])
        look = made.refresh(gradients[-2])
        new = averaged([projected(made, gradient) for gradient in gradients[:200]])[1]
        found = carried(old[0].float(), old[1].float(), look)[1]
        totals.append(float(found.sum() / new.sum()))
        without.append(totals[-1] / look.energy)
        alike.append(float(np.corrcoef(found.flatten(), new.flatten())[0, 1]))
    mean, before = (float(np.log(x).mean()) for x in (totals, without))
    assert sums[0] <= math.exp(mean) <= sums[1], totals
    assert min(totals) >= 1 / 6 and max(totals) <= 6, totals
    assert abs(mean) < abs(before), (totals, without)
    assert min(alike) >= correlations[0] and float(np.mean(alike)) >= correlations[1], alike
