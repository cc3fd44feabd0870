"""Odds ratio preference optimisation (Hong et al., arXiv 2403.07691, equations 6 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ondevice.objectives.base import Graded, Objective, Scores, log_sigmoid, sigmoid

_SMALLEST = 1e-12
"""A mean log likelihood is at most minus this: the odds of a certain text are infinite."""


@dataclass(frozen=True)
class Orpo(Objective):
    """The chosen answer's loss a token, and -beta log sigmoid(log odds ratio).

    The paper's lambda is `beta`. The first part is over the chosen answers' tokens, as in the
    paper; TRL's is over their prompts too.
    """

    name: ClassVar[str] = "orpo"
    has_reference: ClassVar[bool] = False

    def grade(self, scores: Scores) -> Graded:
        """See `Objective.grade`."""
        counts = np.maximum(scores.tokens, 1)
        means = np.minimum(scores.means, -_SMALLEST)
        log_rest = np.log(-np.expm1(means))  # log(1 - p)
        odds = (means - log_rest) @ np.array([1.0, -1.0])
        pairs = -self.beta * log_sigmoid(odds)
        slope = -self.beta * sigmoid(-odds)
        # d(log odds) / d(mean log p) = 1 / (1 - p)
        slopes = slope[:, None] * np.array([1.0, -1.0]) / -np.expm1(means) / counts
        total = max(int(scores.tokens[:, 0].sum()), 1)
        graded = self.graded_pairs(scores, pairs, slopes)
        coefficients = graded.coefficients.copy()
        coefficients[:, 0] -= 1 / total
        chosen = -float(scores.log_likelihoods[:, 0].sum()) / total
        figures = {**graded.figures, "log_odds": float(odds.mean()), "chosen_loss": chosen}
        return Graded(graded.loss + chosen, coefficients, figures, graded.right)

    def rewards(self, scores: Scores) -> np.ndarray:
        """Return beta times the mean log likelihood a token, float64 [n, 2]."""
        return self.beta * scores.means
