"""Losses and coefficients of preferences, against TRL's formulas in torch's float64 autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ondevice.core.errors import ConfigError, DataError
from ondevice.objectives import OBJECTIVES, Scores, objective


def dpo(logps: Tensor, reference: Tensor, tokens: Tensor, liked: Tensor, s: dict) -> Tensor:
    ratios = logps - reference
    x = s["beta"] * (ratios[:, 0] - ratios[:, 1])
    wrong = s["label_smoothing"]
    return (-(1 - wrong) * logsigmoid(x) - wrong * logsigmoid(-x)).mean()


def ipo(logps: Tensor, reference: Tensor, tokens: Tensor, liked: Tensor, s: dict) -> Tensor:
    average = (logps - reference) / tokens
    return ((average[:, 0] - average[:, 1] - 1 / (2 * s["beta"])) ** 2).mean()


def orpo(logps: Tensor, reference: Tensor, tokens: Tensor, liked: Tensor, s: dict) -> Tensor:
    mean = logps / tokens
    rest = torch.log1p(-mean.exp())
    odds = (mean[:, 0] - mean[:, 1]) - (rest[:, 0] - rest[:, 1])
    return -logps[:, 0].sum() / tokens[:, 0].sum() - s["beta"] * logsigmoid(odds).mean()


def simpo(logps: Tensor, reference: Tensor, tokens: Tensor, liked: Tensor, s: dict) -> Tensor:
    mean = logps / tokens
    x = s["beta"] * (mean[:, 0] - mean[:, 1] - s["margin"] / s["beta"])
    wrong = s["label_smoothing"]
    return (-(1 - wrong) * logsigmoid(x) - wrong * logsigmoid(-x)).mean()


def kto(logps: Tensor, reference: Tensor, tokens: Tensor, liked: Tensor, s: dict) -> Tensor:
    ratios = logps - reference
    kl = ratios[:, 1].mean().clamp(min=0).detach()
    good = 1 - torch.sigmoid(s["beta"] * (ratios[liked, 0] - kl))
    bad = 1 - torch.sigmoid(s["beta"] * (kl - ratios[~liked, 0]))
    return torch.cat([s["desirable_weight"] * good, s["undesirable_weight"] * bad]).mean()


FORMULAS = {"dpo": dpo, "ipo": ipo, "orpo": orpo, "simpo": simpo, "kto": kto}
SETTINGS = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "ipo": {"beta": 0.2},
    "orpo": {"beta": 0.4},
    "simpo": {"beta": 2.5, "label_smoothing": 0.05, "margin": 0.7},
    "kto": {"beta": 0.25, "desirable_weight": 1.3, "undesirable_weight": 0.7},
}


def draw(seed: int, rows: int = 5) -> Scores:
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 9, (rows, 2))
    logps = -tokens * random.uniform(0.05, 4, (rows, 2))
    reference = logps + random.normal(0, 2, (rows, 2))
    return Scores(logps, reference, tokens, random.random(rows) < 0.5)


def test_every_objective_has_a_formula_here() -> None:
    assert set(OBJECTIVES) == set(FORMULAS)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_coefficients_match_autograd(name: str, seed: int) -> None:
    scores = draw(seed)
    logps = torch.tensor(scores.log_likelihoods, requires_grad=True)
    others = (torch.tensor(a) for a in (scores.reference, scores.tokens, scores.liked))
    expected = FORMULAS[name](logps, *others, SETTINGS[name])
    (slopes,) = torch.autograd.grad(expected, logps)
    graded = objective(name, **SETTINGS[name]).grade(scores)
    assert graded.loss == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(graded.coefficients, slopes.numpy(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_texts_that_are_certain_or_impossible_give_finite_coefficients(name: str) -> None:
    logps = np.array([[0.0, -1e5], [-1e5, 0.0], [-1e-15, -1e-15]])
    liked = np.array([True, False, True])
    scores = Scores(logps, np.zeros((3, 2)), np.full((3, 2), 3), liked)
    graded = objective(name).grade(scores)
    assert np.isfinite(graded.loss)
    assert np.isfinite(graded.coefficients).all()


def test_a_pair_in_the_right_order_counts_as_right_and_a_tie_does_not() -> None:
    logps = np.array([[-1.0, -2.0], [-3.0, -1.0], [-2.0, -2.0], [-4.0, -2.5], [-1.0, -1.5]])
    scores = Scores(logps, np.zeros((5, 2)), np.ones((5, 2), int))
    for name, beta in (("dpo", 0.1), ("ipo", 0.1), ("orpo", 0.1), ("simpo", 2.0)):
        graded = objective(name).grade(scores)
        assert graded.right.tolist() == [True, False, False, False, True], name
        assert graded.figures["accuracy"] == 0.4
        assert graded.figures["rewards_chosen"] == pytest.approx(beta * -2.2)
        assert graded.figures["rewards_rejected"] == pytest.approx(beta * -1.8)
        assert graded.figures["margin"] == pytest.approx(beta * -0.4)
        assert objective(name).texts == 2
    assert objective("kto").texts == 1


def test_kto_refuses_pairs_and_unknown_settings_are_named() -> None:
    with pytest.raises(DataError):
        objective("kto").grade(Scores(*(np.zeros((2, 2)) for _ in range(3))))
    with pytest.raises(ConfigError) as caught:
        objective("dpo", margin=0.5)
    assert "label_smoothing" in caught.value.expected
    with pytest.raises(ConfigError):
        objective("ppo")


def test_kto_s_figures_are_of_each_answer_and_not_of_the_other_row_s() -> None:
    """Four rated answers by hand: log ratios 2, -1, 0.5, 3; the other rows' have a mean of 1."""
    ratios = np.array([[2.0, 1.5], [-1.0, 0.5], [0.5, 0.0], [3.0, 2.0]])
    zeros = np.zeros_like(ratios)
    liked = np.array([True, True, False, False])
    scores = Scores(ratios, zeros, np.full(ratios.shape, 4), liked)
    graded = objective("kto", **{**SETTINGS["kto"], "beta": 0.2}).grade(scores)
    assert graded.right.tolist() == [True, False, True, False]
    expected = {"accuracy": 0.5, "kl": 1.0, "rewards_chosen": 0.1, "rewards_rejected": 0.35}
    assert graded.figures == pytest.approx({**expected, "margin": -0.25})
