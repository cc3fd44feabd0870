"""Moments that a refresh carries into another subspace, against dense float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ondevice.methods.lsp.matrix import carried  # noqa: E402
from ondevice.methods.lsp.projector import Projector  # noqa: E402
from tests.methods.lsp.dense import low_rank, near, normal, sides  # noqa: E402
from tests.methods.lsp.matrices import each_shape, matrix, projected  # noqa: E402


@each_shape
@pytest.mark.parametrize("learned", [False, True])
def test_moments_are_carried_by_the_old_and_new_projectors(
    m: int, n: int, size: int, nonzeros: int, learned: bool
) -> None:
    projection = matrix(m, n, size, nonzeros, threshold=0.0, learned=learned)
    old_p, old_q = sides(projection.left, projection.right)
    gradient = low_rank(m, n, 3)
    look = projection.refresh(gradient)
    assert look.carry is not None
    p, q = sides(projection.left, projection.right)
    a, b = p.T @ old_p, old_q.T @ q
    known = a.square() @ (old_p.T @ gradient.double() @ old_q).square() @ b.square()
    energy = float((p.T @ gradient.double() @ q).square().sum() / known.sum())
    assert look.energy == pytest.approx(energy, rel=1e-4) and abs(energy - 1) > 0.01
    whole, kept = p.T @ gradient.double() @ q, a @ (old_p.T @ gradient.double() @ old_q) @ b
    momentum = max(0.0, float((whole * kept).sum() / kept.square().sum()))
    assert look.momentum == pytest.approx(momentum, rel=1e-4) and abs(momentum - 1) > 0.01
    first, second = normal(*projection.sizes), normal(*projection.sizes, seed=1).square()
    moved = carried(first, second, look)
    near(moved[0], momentum * a @ first.double() @ b, 1e-5)
    near(moved[1], energy * a.square() @ second.double() @ b.square(), 1e-4)
    assert bool((moved[1] >= 0).all())


@each_shape
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)], ids=str
)
def test_the_carried_second_moment_has_the_right_sum_on_the_checked_gradient(
    m: int, n: int, size: int, nonzeros: int, learned: bool, dtype: Any, tolerance: float
) -> None:
    projection, gradient = (
        matrix(m, n, size, nonzeros, threshold=0.0, learned=learned),
        low_rank(m, n, 3).to(dtype),
    )
    for turn in (1, 2):
        old = projected(projection, gradient)
        look = projection.refresh(gradient)
        assert projection.turn == turn
        wanted = float(projected(projection, gradient).square().sum())
        actual = carried(old.float(), old.square().float(), look)[1]
        assert float(actual.sum()) == pytest.approx(wanted, rel=tolerance)
        gradient = low_rank(m, n, 3, seed=1).to(dtype)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_the_factors_do_not_depend_on_the_gradients_size(factor: float) -> None:
    looks = [matrix(41, 29, 13, 4).refresh(size * low_rank(41, 29, 3)) for size in (1.0, factor)]
    for one, other in ((looks[0].energy, looks[1].energy), (looks[0].momentum, looks[1].momentum)):
        assert other == pytest.approx(one, rel=1e-2) and abs(one - 1) > 0.05


def test_a_gradient_that_the_old_subspace_does_not_see_leaves_the_moments_sizes() -> None:
    projection, gradient = matrix(41, 29, 13, 4), torch.zeros(41, 29)
    assert projection.left.values is not None
    projection.left.values[7] = 0.0
    gradient[7] = normal(29)
    look = projection.refresh(gradient)
    assert look.before == 1 and look.after is not None and look.carry is not None
    assert look.momentum == look.energy == 1


def spanning(rows: int, size: int, seed: int) -> Projector:
    """One value in each row, and columns of unit length that are orthogonal to each other."""
    positions = torch.arange(rows)[:, None] % size
    values = normal(rows, 1, seed=seed)
    lengths = torch.zeros(size).index_add(0, positions[:, 0], values[:, 0].square()).sqrt()
    return Projector(rows, size, torch.device("cpu"), positions, values / lengths[positions])


def test_the_first_moment_of_gradients_in_the_span_is_carried_exactly() -> None:
    """There P P^T G Q Q^T = G, and so the carried moment is what the new projectors would have given."""
    projection = matrix(60, 45, 20, 4, threshold=0.0, learned=False)
    projection.put(spanning(60, 20, 1), spanning(45, 20, 2))
    p, q = sides(projection.left, projection.right)
    gradients = [p @ normal(20, 20, seed=step).double() @ q.T for step in range(10)]
    old = averaged([p.T @ gradient @ q for gradient in gradients])
    look = projection.refresh(gradients[-1].float())
    assert look.before <= 1e-3 and look.carry is not None
    new = averaged([projected(projection, gradient) for gradient in gradients])
    near(carried(old[0].float(), old[1].float(), look)[0], new[0], 1e-5)


def averaged(
    gradients: list[Tensor], beta1: float = 0.9, beta2: float = 0.99
) -> tuple[Tensor, Tensor]:
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

    The next step, as long as the first moment over the root of the second, is 0.67, 0.39 and 0.19 of what it would have
    been; without `momentum` 0.59, 1.8 and 3.9: no shorter for what is not known.

    `sums` bounds the geometric mean; no seed is off by more than a factor of 6. `correlations` bounds every seed, and
    the mean, from below.
    """
    totals, without, alike, steps = [], [], [], []
    for seed in range(12):
        random = torch.Generator().manual_seed(seed)
        tall, wide = torch.randn(60, 4, generator=random), torch.randn(45, 4, generator=random)
        gradients = [
            (tall * torch.randn(4, generator=random)) @ wide.T / 2
            + 0.3 * torch.randn(60, 45, generator=random)
            for _ in range(202)
        ]
        projection = matrix(60, 45, 20, 4, threshold=0.0, learned=kind.endswith("to learned"))
        projection.seed = seed
        projection.put(*projection.drawn(0))
        if kind.startswith("learned"):
            projection.refresh(gradients[-1])
        old = averaged([projected(projection, gradient) for gradient in gradients[:200]])
        look = projection.refresh(gradients[-2])
        momentum, new = averaged([projected(projection, gradient) for gradient in gradients[:200]])
        first, actual = carried(old[0].float(), old[1].float(), look)
        steps.append(float((first / actual.sqrt()).norm() / (momentum / new.sqrt()).norm()))
        totals.append(float(actual.sum() / new.sum()))
        without.append(totals[-1] / look.energy)
        alike.append(float(np.corrcoef(actual.flatten(), new.flatten())[0, 1]))
    mean, before = (float(np.log(x).mean()) for x in (totals, without))
    assert sums[0] <= math.exp(mean) <= sums[1], totals
    assert min(totals) >= 1 / 6 and max(totals) <= 6, totals
    assert abs(mean) < abs(before), (totals, without)
    assert max(steps) <= 1, steps
    assert min(alike) >= correlations[0] and float(np.mean(alike)) >= correlations[1], alike


@each_shape
def test_followed_projectors_carry_moments_without_factors(
    m: int, n: int, size: int, nonzeros: int
) -> None:
    """New ones fit the checked gradient better than others; a factor made of it would let the
    second moment grow with each check."""
    projection = matrix(m, n, size, nonzeros, learned=False, projector_values="followed")
    second = torch.ones(projection.sizes)
    for step in range(20):
        look = projection.refresh(low_rank(m, n, 3, seed=step))
        assert (look.momentum, look.energy) == (1.0, 1.0)
        _, second = carried(second, second, look)
    assert float(second.sum()) <= second.numel() * (1 + 1e-4)
