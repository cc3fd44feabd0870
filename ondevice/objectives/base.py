"""The interface of objectives over preferences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np


@dataclass(frozen=True)
class Scores:
    """The log likelihoods of n rows, two texts each: float64 [n, 2], nats, summed over the answer.

    The two texts of a preference pair are the chosen answer and the rejected one. Those of a rated
    answer are the answer, and another row's answer after the same prompt (`Kto`).

    Attributes:
        log_likelihoods: by the model as it is.
        reference: by the model before training; zeros for an objective that needs none.
        tokens: labelled tokens of each text, int64 [n, 2].
        liked: of rated answers, bool [n]; None for pairs.
    """

    log_likelihoods: np.ndarray
    reference: np.ndarray
    tokens: np.ndarray
    liked: np.ndarray | None = None

    @property
    def log_ratios(self) -> np.ndarray:
        """Return log p / p_reference, float64 [n, 2]."""
        return self.log_likelihoods - self.reference

    @property
    def means(self) -> np.ndarray:
        """Return the mean log likelihood a token, float64 [n, 2]."""
        return self.log_likelihoods / np.maximum(self.tokens, 1)


@dataclass(frozen=True)
class Graded:
    """The loss of some rows, with the coefficient of each text.

    Attributes:
        loss: mean over the rows.
        coefficients: dL / d(log p), float64 [n, 2].
        figures: of the rows: `rewards_chosen`, `rewards_rejected`, `margin`, `accuracy`, `kl`.
        right: rows that the model orders rightly, bool [n].
    """

    loss: float
    coefficients: np.ndarray
    figures: dict[str, float]
    right: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))


@dataclass(frozen=True)
class Objective(ABC):
    """A loss of preferences.

    Attributes:
        beta: strength; each objective multiplies a term of its own by it.
    """

    name: ClassVar[str]
    rows: ClassVar[Literal["pairs", "thumbs"]] = "pairs"
    """The rows it takes: pairs of a chosen and a rejected answer, or rated answers."""
    texts: ClassVar[int] = 2
    """The texts of a row that have a gradient; the others are only scored."""
    has_reference: ClassVar[bool] = True
    """Whether it compares with the model before training."""
    beta: float = 0.1

    @abstractmethod
    def grade(self, scores: Scores) -> Graded:
        """Return loss, coefficients and figures of some rows."""

    def rewards(self, scores: Scores) -> np.ndarray:
        """Return the implicit reward of each text, float64 [n, 2]."""
        return self.beta * scores.log_ratios

    def graded_pairs(self, scores: Scores, losses: np.ndarray, slopes: np.ndarray) -> Graded:
        """Return the mean of the pairs' losses, float64 [n], with their derivatives [n, 2]."""
        rewards = self.rewards(scores)
        margins = rewards[:, 0] - rewards[:, 1]
        figures = {
            "rewards_chosen": float(rewards[:, 0].mean()),
            "rewards_rejected": float(rewards[:, 1].mean()),
            "margin": float(margins.mean()),
            "accuracy": float((margins > 0).mean()),
        }
        return Graded(float(losses.mean()), slopes / len(losses), figures, margins > 0)


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    """Return log(1 / (1 + exp(-x))) without overflow."""
    return -np.logaddexp(0.0, -x)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))
