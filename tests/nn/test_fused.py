"""Fused kernels against the same operations in float64: on a GPU where there is one, else in
Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.interpreter import needs_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [] if DEVICE == "cuda" else needs_interpreter
ERRS = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Of a norm, relative; the interpreter cuts a number to bfloat16 where a GPU rounds it."""
DTYPES = list(ERRS)


@pytest.fixture(scope="module")
def fused() -> Iterator[ModuleType]:
    """The kernels; the interpreter is asked for as they are decorated, and again in each call."""
    module = importlib.import_module("ondevice.nn.fused")
    if DEVICE == "cuda":
        yield module
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield importlib.reload(module)
    importlib.reload(module)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape).to(dtype).to(DEVICE)


def close(actual: Tensor, wanted: Tensor, dtype: torch.dtype, times: float = 1.0) -> None:
    assert actual.dtype == dtype and actual.shape == wanted.shape
    assert (actual.double() - wanted).norm() <= times * ERRS[dtype] * wanted.norm()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.double(), x.shape[-1:], weight.double(), 1e-5)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.double().split((half, half, x.shape[-1] - 2 * half), -1)
    c = cos.double()
    s = sin.double()
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


def angles(dtype: torch.dtype, rows: int, length: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, length, 1, half, dtype=torch.float64) * 6
    return angle.cos().to(dtype).to(DEVICE), angle.sin().to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 3), (37, 96), (2, 1500)])
@pytest.mark.parametrize("wide", [False, True])
def test_a_norm_and_its_gradient_are_those_of_float64(fused, dtype, rows, width, wide) -> None:
    torch.manual_seed(width)
    weight = random(torch.float32 if wide else dtype, width)
    # Rows of a wider matrix, as a fused projection leaves them.
    x, gn, g = (random(dtype, rows, width + 8)[:, :width] for _ in range(3))
    leaf = x.double().requires_grad_(True)
    wanted = norm(leaf, weight)
    close(fused.rms_norm(x, weight, 1e-5), wanted.detach(), dtype)
    (gradient,) = torch.autograd.grad(wanted, leaf, gn.double())
    close(fused.rms_norm_backward(x, weight, 1e-5, gn, g.clone()), g.double() + gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("heads", "width", "half"), [(3, 16, 8), (2, 20, 10), (5, 12, 4)])
def test_a_rotation_turns_pairs_and_leaves_the_rest(
    fused, dtype, by_row, heads, width, half
) -> None:
    cos, sin = angles(dtype, 2 if by_row else 1, 7, half)
    whole = random(dtype, 2, 7, heads * width + 4)
    x = whole[..., : heads * width].unflatten(-1, (heads, width))
    assert fused.can_rotate(x)
    wanted = turned(x, cos, sin)
    rest = whole[..., heads * width :].clone()
    close(fused.rotate(x, cos, sin), wanted, dtype)
    assert torch.equal(whole[..., heads * width :], rest)


def test_heads_that_lie_apart_are_not_rotated_here(fused) -> None:
    assert not fused.can_rotate(random(torch.float32, 2, 3, 7, 8).transpose(1, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(3, 16), (2, 20)])
def test_a_norm_with_its_rotation_is_those_of_float64(fused, dtype, wide, heads, width) -> None:
    cos, sin = angles(dtype, 1, 9, width // 2)
    weight = random(torch.float32 if wide else dtype, width)
    x = random(dtype, 2, 9, heads, width)
    g = random(dtype, 2, 9, heads, width)
    leaf = x.double().requires_grad_(True)
    wanted = turned(norm(leaf, weight), cos, sin)
    (gradient,) = torch.autograd.grad(wanted, leaf, g.double())
    close(fused.norm_rotate(x, weight, 1e-5, cos, sin), wanted.detach(), dtype)
    close(fused.norm_rotate_backward(x, weight, 1e-5, cos, sin, g.clone()), gradient, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize(("rows", "width", "rank"), [(1, 5, 1), (33, 130, 8), (40, 64, 17)])
def test_swiglu_with_low_rank_parts_is_that_of_float64(
    fused, dtype, missing, rows, width, rank
) -> None:
    gate, up, g = (random(dtype, rows, width) for _ in range(3))
    parts = [
        None
        if number in missing
        else fused.LowRank(
            random(dtype, rows, rank) * 0.3, random(dtype, width, rank).t() * 0.3, 1.5
        )
        for number in range(3)
    ]
    sums = [
        x.double() if part is None else x.double() + 1.5 * part.h.double() @ part.b.double()
        for x, part in zip((gate, up, g), parts)
    ]
    leaves = [x.detach().requires_grad_(True) for x in sums[:2]]
    wanted = functional.silu(leaves[0]) * leaves[1]
    gradients = torch.autograd.grad(wanted, leaves, sums[2])
    close(fused.swiglu(gate, up, parts[0], parts[1]), wanted.detach(), dtype)
    actual = fused.swiglu_backward(gate, up, g, tuple(parts))
    for ours, theirs in zip(actual, (*gradients, wanted.detach()), strict=True):
        close(ours, theirs, dtype)
    assert actual[0].data_ptr() == gate.data_ptr() and actual[2].data_ptr() == g.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocab", "block"),
    [
        (2, None),
        (1000, None),
        (1301, 256),
        pytest.param(4200, None, marks=pytest.mark.nightly),
        pytest.param(21001, None, marks=pytest.mark.nightly),
    ],
)
def test_the_loss_of_rows_and_its_gradient_are_those_of_float64(
    fused, dtype, vocab, block, monkeypatch
) -> None:
    """Of six blocks of columns, the last one a part, with small blocks: the interpreter is slow."""
    if block is not None:
        monkeypatch.setattr(fused, "VOCAB_BLOCK", block)
    logits = random(torch.float32, 5, vocab) * 4
    logits[1] += 100  # no exponential may overflow
    targets = torch.tensor([0, vocab - 1, vocab // 2, 1, 1], device=DEVICE)
    leaf = logits.double().requires_grad_(True)
    wanted = functional.cross_entropy(leaf, targets, reduction="none")
    (gradient,) = torch.autograd.grad(wanted.sum() * 0.25, leaf)
    nll, actual = fused.loss_rows(logits, targets, 0.25, dtype)
    # A logit of 100 is rounded to 8e-6 in float32.
    close(nll, wanted.detach(), torch.float32, 5.0)
    close(actual, gradient, dtype, 5.0)
    assert actual.data_ptr() == logits.data_ptr()
