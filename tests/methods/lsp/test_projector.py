"""Sparse projectors against dense matrices, their random numbers, and that the estimate begins without bias."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from ondevice.methods.lsp.fit import relative_bias  # noqa: E402
from ondevice.methods.lsp.projector import (  # noqa: E402
    POSITIONS,
    Projector,
    draw,
    followed,
    widened,
)
from ondevice.runtime_ops import generator  # noqa: E402
from tests.methods.lsp.dense import low_rank, near, normal, pair, table  # noqa: E402

SIZES = [(33, 32, 4), (101, 37, 5), (64, 7, 3), (50, 9, 9), (13, 1, 1), (29, 8, 20), (5, 2, 1)]
"""Rows, size, nonzeros; d divides s in few of them, and is larger than s in one."""


def parts(side: Projector) -> tuple[Tensor, Tensor]:
    assert side.positions is not None and side.values is not None
    return side.positions, side.values


@pytest.mark.parametrize(("rows", "size", "nonzeros"), SIZES)
def test_a_row_has_one_value_in_each_block(rows: int, size: int, nonzeros: int) -> None:
    positions, values = parts(draw(rows, size, nonzeros, 3, 1, 4))
    d = min(nonzeros, size)
    assert positions.shape == values.shape == (rows, d)
    assert (positions.dtype, values.dtype) == (torch.int64, torch.float32)
    for block in range(d):
        low, high = block * size // d, (block + 1) * size // d
        assert high - low in (size // d, size // d + 1)
        assert bool(((positions[:, block] >= low) & (positions[:, block] < high)).all())
    assert all(len(set(row)) == d for row in positions.tolist())
    assert bool((values != 0).all())


@pytest.mark.parametrize(("size", "nonzeros"), [(10, 3), (16, 4), (7, 1)])
def test_every_position_is_as_likely_as_the_others_of_its_block(size: int, nonzeros: int) -> None:
    rows = 40_000
    positions, _ = parts(draw(rows, size, nonzeros, 0, 0, 0))
    counts = torch.bincount(positions.flatten(), minlength=size).double()
    for block in range(nonzeros):
        low, high = block * size // nonzeros, (block + 1) * size // nonzeros
        share = 1 / (high - low)
        assert bool(
            (
                (counts[low:high] / rows - share).abs() <= 5 * (share * (1 - share) / rows) ** 0.5
            ).all()
        )


@pytest.mark.parametrize("nonzeros", [1, 4, 7])
def test_values_are_normal_with_variance_one_in_d(nonzeros: int) -> None:
    values = parts(draw(30_000, 16, nonzeros, 1, 0, 0))[1].double() * nonzeros**0.5
    count = values.numel()
    for power, (mean, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs(float((values**power).mean()) - mean) <= 5 * (variance / count) ** 0.5


def test_values_of_neighbours_are_not_correlated() -> None:
    values = parts(draw(30_000, 16, 4, 1, 0, 0))[1].double() * 2
    flat = values.flatten()
    for shift in (1, 2, 3, 4):
        products = flat[shift:] * flat[:-shift]
        assert abs(float(products.mean())) <= 5 * len(products) ** -0.5


def test_it_is_a_pure_function_of_seed_turn_and_tensor() -> None:
    first = parts(draw(40, 15, 4, 7, 2, 5))
    again = parts(draw(40, 15, 4, 7, 2, 5))
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    for other in [(8, 2, 5), (7, 3, 5), (7, 2, 6), (7, 5, 2), (2, 7, 5)]:
        positions, values = parts(draw(40, 15, 4, *other))
        assert not torch.equal(first[0], positions)
        assert not bool((first[1] == values).any())


def test_its_numbers_are_those_of_the_generator() -> None:
    """A run is its seed: other numbers, however random, would be another run."""
    rows, size, d, seed, turn, tensor = 40, 15, 4, 7, 2, 5
    positions, values = parts(draw(rows, size, d, seed, turn, tensor))
    normals = generator.normal(seed, turn, tensor, 1, 0, rows * d).reshape(rows, d)
    assert torch.equal(values, torch.from_numpy(normals / np.float32(2)))
    words = generator.words(generator.stream_key(seed, turn, POSITIONS, tensor), 0, rows * d)
    for entry, word in enumerate(int(word) for word in words):
        block = entry % d
        low, high = block * size // d, (block + 1) * size // d
        assert positions.flatten()[entry] == low + ((word >> 32) * (high - low) >> 32)


@pytest.mark.parametrize(("rows", "size", "nonzeros"), SIZES)
def test_it_is_made_dense(rows: int, size: int, nonzeros: int) -> None:
    side = draw(rows, size, nonzeros, 1, 0, 0)
    dense = table(side)
    assert torch.equal(side.dense(torch.float64), dense)
    assert torch.equal(side.dense(torch.bfloat16), dense.bfloat16())
    some = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(side.rows_of(some, torch.float64), dense[some])
    assert torch.equal(side.rows_of(some, torch.bfloat16), dense[some].bfloat16())
    assert side.bytes == rows * min(nonzeros, size) * (8 + 4)
    low, high = rows // 3, rows // 3 + 2
    assert torch.equal(side.part(slice(low, high)).dense(torch.float64), dense[low:high])


@pytest.mark.parametrize("rows", [1, 12, 13])
def test_a_side_no_longer_than_the_subspace_is_the_identity(rows: int) -> None:
    side = draw(rows, 13, 4, 0, 0, 0)
    assert (side.exact, side.rows, side.size, side.bytes) == (True, rows, rows, 0)
    assert torch.equal(side.dense(torch.float32), torch.eye(rows))
    some = torch.tensor([rows - 1, 0])
    assert torch.equal(side.rows_of(some, torch.float32), torch.eye(rows)[some])
    assert side.part(slice(0, 1)) is side
    assert not draw(14, 13, 4, 0, 0, 0).exact


@pytest.mark.parametrize("signs", [False, True])
@pytest.mark.parametrize(("m", "n", "size", "nonzeros"), [(7, 6, 3, 2), (9, 4, 5, 3), (5, 8, 2, 1)])
def test_the_estimate_begins_without_bias(
    m: int, n: int, size: int, nonzeros: int, signs: bool
) -> None:
    """The mean over 3000 pairs, of every element and along the gradient and 30 other directions, by 5 standard errors.
    Its standard error along the gradient is 0.03 of it."""
    count, gradient = 3000, normal(m, n).double()
    actual = []
    for seed in range(count):
        p, q = (side.dense(torch.float64) for side in pair(m, n, size, nonzeros, seed, signs))
        actual.append((p @ (p.T @ gradient @ q) @ q.T).flatten())
    estimates, wanted = torch.stack(actual), gradient.flatten()
    directions = torch.cat(
        [torch.eye(m * n), wanted[None].float(), normal(30, m * n, seed=1)]
    ).double()
    along = estimates @ directions.T
    error = along.std(0) / count**0.5
    assert bool(((along.mean(0) - directions @ wanted).abs() <= 5 * error).all())
    assert float(error[m * n] / wanted.square().sum()) < 0.05


@pytest.mark.parametrize(("rows", "size", "nonzeros"), SIZES)
def test_signs_are_balanced_and_rows_have_length_one(rows: int, size: int, nonzeros: int) -> None:
    side = draw(rows, size, nonzeros, 3, 1, 4, signs=True)
    if side.exact:
        return
    positions, values = parts(side)
    d = min(nonzeros, size)
    torch.testing.assert_close(values.abs(), torch.full((rows, d), d**-0.5))
    counts = torch.bincount(positions.flatten(), minlength=size)
    for block in range(d):
        low, high = block * size // d, (block + 1) * size // d
        assert int(counts[low:high].max()) - int(counts[low:high].min()) <= 1
        assert int(counts[low:high].sum()) == rows


def test_signs_are_independent_and_positions_of_all_kinds() -> None:
    positions, values = parts(draw(40_000, 16, 4, 1, 0, 0, signs=True))
    flat = values.sign().flatten()
    for shift in range(1, 5):
        assert abs(float((flat[shift:] * flat[:-shift]).mean())) <= 5 * len(flat) ** -0.5
    assert abs(float(flat.mean())) <= 5 * len(flat) ** -0.5
    assert not torch.equal(positions, parts(draw(40_000, 16, 4, 1, 1, 0, signs=True))[0])
    together = positions[:, 0] * 4 + positions[:, 1] - 4
    shares = torch.bincount(together, minlength=16).double() / len(positions)
    assert bool(((shares - 1 / 16).abs() <= 5 * (1 / 16 / len(positions)) ** 0.5).all())


def test_one_sign_a_row_makes_orthogonal_columns_and_errs_least() -> None:
    """A count sketch: of orthogonal columns of equal length, whose estimate is a projection times m n / s^2, which errs
    by sqrt(m n / s^2 - 1) of a gradient without any direction."""
    m, n, size = 48, 36, 12
    left, right = (draw(side, size, 1, 1, 0, i, signs=True) for i, side in enumerate((m, n)))
    for side in (left, right):
        table_of = side.dense(torch.float64)
        assert torch.equal(table_of.T @ table_of, torch.eye(size).double() * side.rows / size)
    gradient = normal(m, n)
    least = (m * n / size**2 - 1) ** 0.5
    found = relative_bias(left, right, gradient)
    # The part of a random gradient in a subspace of 144 of 1,728 dimensions: chi-squares over the same.
    assert abs(found / least - 1) <= 5 * (2 / 144 + 2 / 1728) ** 0.5
    normals = [draw(side, size, 4, 1, 0, i) for i, side in enumerate((m, n))]
    assert relative_bias(*normals, gradient) > 1.3 * found


@pytest.mark.parametrize(("rows", "size"), [(33, 7), (50, 9), (13, 1), (8, 8)])
def test_drawn_signs_are_widened_to_orthonormal_columns(rows: int, size: int) -> None:
    side = widened(draw(rows, size, 1, 3, 0, 4, signs=True))
    assert side.is_dense == (rows > size) and side.exact == (rows <= size)
    dense = side.dense(torch.float64)
    near(dense.T @ dense, torch.eye(side.size, dtype=torch.float64), 1e-6)


@pytest.mark.parametrize(("m", "n", "size"), [(41, 29, 5), (29, 61, 7), (50, 4, 9)])
def test_a_followed_projector_turns_to_the_leading_directions_of_many_gradients(
    m: int, n: int, size: int
) -> None:
    """Gradients of a common part of rank `size` with a quarter of noise: against the singular
    vectors of the part in float64."""
    common = low_rank(m, n, min(size, n))
    side = widened(draw(m, size, 1, 0, 0, 0, signs=True))
    kept = []
    for step in range(30):
        noise = normal(m, n, seed=step + 1)
        gradient = common / common.norm() + 0.25 * noise / noise.norm()
        side = followed(side, gradient)
        values = side.dense(torch.float64)
        near(values.T @ values, torch.eye(size, dtype=torch.float64), 1e-5)
        part = values.T @ common.double()
        kept.append(float(part.square().sum() / common.double().square().sum()))
    assert kept[-1] > 0.97 and kept[-1] > kept[0]


def test_one_gradient_moves_a_followed_subspace_by_its_share_only() -> None:
    """What was followed for long outweighs one other gradient, and loses to many."""
    first, other = (low_rank(40, 30, 3, seed=seed) for seed in (1, 2))
    side = widened(draw(40, 3, 1, 0, 0, 0, signs=True))

    def share(gradient: Tensor) -> float:
        part = side.dense(torch.float32).T @ gradient
        return float(part.square().sum() / gradient.square().sum())

    for _ in range(8):
        side = followed(side, first)
    assert share(first) == pytest.approx(1.0, abs=1e-4)
    side = followed(side, other)
    assert share(first) > 0.8 > share(other)
    for _ in range(40):
        side = followed(side, other)
    assert share(other) > 0.95


def test_parts_and_rows_of_a_dense_projector_are_those_of_its_values() -> None:
    side = widened(draw(33, 7, 1, 3, 0, 4, signs=True))
    dense = side.dense(torch.float32)
    assert torch.equal(side.part(slice(4, 9)).dense(torch.float32), dense[4:9])
    rows = torch.tensor([30, 2, 2])
    assert torch.equal(side.rows_of(rows, torch.float32), dense[rows])
    assert side.bytes == 33 * 7 * 4 + 7 * 4
