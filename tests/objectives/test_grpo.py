"""GRPO's loss and coefficients against autograd in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ondevice.objectives import Answers, Grpo


def sampled(seed: int, size: int = 3, spread: float = 1.0, reference: bool = True) -> Answers:
    draw = np.random.default_rng(seed)
    count = 4 * size
    tokens = draw.integers(1, 20, count)
    old = -draw.uniform(0.1, 3, count) * tokens
    return Answers(
        log_likelihoods=old + spread * draw.normal(size=count) * tokens * 0.3,
        old=old,
        reference=old + draw.normal(size=count) * tokens * 0.2 if reference else None,
        tokens=tokens,
        rewards=draw.normal(size=count),
        size=size,
    )


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_coefficients_are_the_loss_derivatives(seed: int, reference: bool, spread: float) -> None:
    answers = sampled(seed, spread=spread, reference=reference)
    made = Grpo(beta=0.3, clip=0.2)
    graded = made.grade(answers)
    values = torch.tensor(answers.log_likelihoods, requires_grad=True)
    tokens = torch.tensor(answers.tokens, dtype=torch.float64)
    groups = torch.tensor(answers.rewards).view(-1, answers.size)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = (centred / (groups.std(1, correction=0, keepdim=True) + 1e-4)).view(-1)
    ratios = ((values - torch.tensor(answers.old)) / tokens).exp()
    clipped = ratios.clamp(0.8, 1.2)
    loss = -torch.minimum(ratios * advantages, clipped * advantages)
    if answers.reference is not None:
        distance = (torch.tensor(answers.reference) - values) / tokens
        loss = loss + 0.3 * (distance.exp() - distance - 1)
    loss.mean().backward()
    assert graded.loss == pytest.approx(loss.mean().item(), abs=1e-12)
    np.testing.assert_allclose(graded.coefficients, values.grad.numpy(), atol=1e-12)
    if spread == 3.0:  # some are clipped, and those have only the KL term's gradient
        assert 0 < graded.figures["clipped"] < 1


def test_the_kl_term_is_as_strong_as_in_the_paper_unless_set() -> None:
    answers = sampled(0)
    loss, kl = (Grpo(beta=beta).grade(answers).loss for beta in (0.0, 1.0))
    assert Grpo().grade(answers).loss == pytest.approx(loss + 0.04 * (kl - loss), rel=1e-12)


def test_the_first_update_is_the_papers_per_token_gradient() -> None:
    """The ratio of each token is 1 there, so the paper's gradient is the advantage over the length."""
    answers = sampled(0, spread=0.0, reference=False)
    expected = -answers.advantages / answers.tokens / len(answers.tokens)
    np.testing.assert_allclose(Grpo().grade(answers).coefficients, expected, atol=1e-12)


def test_equal_rewards_move_nothing_and_far_likelihoods_do_not_overflow() -> None:
    answers = sampled(1, reference=False)
    equal = Answers(answers.log_likelihoods, answers.old, None, answers.tokens, np.ones(12), 3)
    assert not Grpo().grade(equal).coefficients.any()
    far = Answers(
        answers.log_likelihoods - 1e6, answers.old, answers.old, answers.tokens, answers.rewards, 3
    )
    graded = Grpo().grade(far)
    assert np.isfinite(graded.loss) and np.isfinite(graded.coefficients).all()
