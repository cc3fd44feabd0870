"""The chunked loss and its gradients against torch's cross_entropy and autograd in float64, in one pass and in two."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from ondevice.offload.gradients import ChunkedLoss  # noqa: E402

SIZES = [(11, 37, 16, 4), (1, 5, 8, 100), (64, 260, 32, 64), (65, 261, 32, 64)]
"""Tokens, vocabulary, hidden, tokens of a chunk."""


def case(size: tuple[int, int, int, int], dtype: Any, largest: float = 1.0) -> Any:
    count, vocab, width, _ = size
    random = torch.Generator().manual_seed(count)
    hidden = (largest * torch.randn(count, width, generator=random)).to(dtype)
    weight = torch.randn(vocab, width, generator=random).to(dtype)
    labels = torch.randint(0, vocab, (count,), generator=random)
    labels[1::3] = -100
    if count > 3:
        labels[0], labels[3] = 0, vocab - 1
    return hidden, weight, labels


def expected(hidden: Any, weight: Any, labels: Any, scale: float) -> Any:
    """Each token's loss, and the gradients of `scale` times their sum, float64."""
    hidden, weight = hidden.double().requires_grad_(True), weight.double().requires_grad_(True)
    losses = functional.cross_entropy(
        hidden @ weight.t(), labels, ignore_index=-100, reduction="none"
    )
    (scale * losses.sum()).backward()
    return losses.detach(), hidden.grad, weight.grad


def in_parts(score: ChunkedLoss, weight: Any, gradient: Any, parts: int) -> Any:
    rows = -(-len(weight) // parts)
    for low in range(0, len(weight), rows):
        score.forward(weight[low : low + rows], low)
    for low in range(0, len(weight), rows):
        score.backward(weight[low : low + rows], low, gradient[low : low + rows])
    return score.tokens().sum()


def close(received: Any, wanted: Any, tolerance: float) -> None:
    """In norm: rounding to bfloat16 is relative to the largest terms of a sum."""
    assert float((received.double() - wanted).norm()) <= tolerance * float(wanted.norm())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize("parts", [None, 1, 2, 3, 1000])
@pytest.mark.parametrize("size", SIZES)
def test_loss_and_gradients_match_pytorch(
    size: Any, parts: int | None, dtype: Any, tolerance: float
) -> None:
    hidden, weight, labels = case(size, dtype)
    losses, grad_hidden, grad_weight = expected(hidden, weight, labels, 0.37)
    score, gradient = ChunkedLoss(hidden, labels, 0.37, size[3]), torch.zeros_like(weight)
    total = (
        score.forward_backward(weight, gradient)
        if parts is None
        else in_parts(score, weight, gradient, parts)
    )
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(float(losses.sum()), rel=tolerance)
    close(score.grad_hidden, grad_hidden, tolerance)
    close(gradient, grad_weight, tolerance)
    assert not score.grad_hidden[labels == -100].any()
    if parts is not None:
        torch.testing.assert_close(score.tokens().double(), losses, rtol=tolerance, atol=tolerance)


def test_gradients_of_several_batches_accumulate() -> None:
    hidden, weight, labels = case(SIZES[0], torch.float32)
    once, twice = torch.zeros_like(weight), torch.zeros_like(weight)
    ChunkedLoss(hidden, labels, 1.0, 4).forward_backward(weight, once)
    for _ in range(2):
        ChunkedLoss(hidden, labels, 1.0, 4).forward_backward(weight, twice)
    torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize("parts", [None, 3])
def test_huge_logits_stay_finite(parts: int | None) -> None:
    hidden, weight, labels = case(SIZES[2], torch.float32, largest=1e4)
    losses, grad_hidden, grad_weight = expected(hidden, weight, labels, 1.0)
    score, gradient = ChunkedLoss(hidden, labels, 1.0, 64), torch.zeros_like(weight)
    total = (
        score.forward_backward(weight, gradient)
        if parts is None
        else in_parts(score, weight, gradient, parts)
    )
    assert float(total) == pytest.approx(float(losses.sum()), rel=1e-4)
    close(score.grad_hidden, grad_hidden, 1e-2)
    close(gradient, grad_weight, 1e-2)


def test_tokens_without_labels_have_zero_loss_and_gradients() -> None:
    hidden, weight, labels = case(SIZES[0], torch.float32)
    score, gradient = (
        ChunkedLoss(hidden, torch.full_like(labels, -100), 1.0, 4),
        torch.zeros_like(weight),
    )
    assert float(score.forward_backward(weight, gradient)) == 0
    assert not gradient.any() and not score.grad_hidden.any()
