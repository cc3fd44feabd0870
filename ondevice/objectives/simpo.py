"""Simple preference optimisation (Meng et al., arXiv 2405.14734, equation 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ondevice.objectives.base import Graded, Objective, Scores, log_sigmoid, sigmoid


@dataclass(frozen=True)
class Simpo(Objective):
    """-log sigmoid(beta (chosen's mean log likelihood a token - rejected's) - margin).

    Attributes:
        label_smoothing: share of pairs that are taken to be the wrong way round.
        margin: by which a chosen answer's reward shall be larger; the paper's gamma.
    """

    name: ClassVar[str] = "simpo"
    has_reference: ClassVar[bool] = False
    beta: float = 2.0
    label_smoothing: float = 0.0
    margin: float = 0.5

    def grade(self, scores: Scores) -> Graded:
        """See `Objective.grade`."""
        rewards = self.rewards(scores)
        x = rewards[:, 0] - rewards[:, 1] - self.margin
        wrong = self.label_smoothing
        losses = -(1 - wrong) * log_sigmoid(x) - wrong * log_sigmoid(-x)
        slope = self.beta * (wrong * sigmoid(x) - (1 - wrong) * sigmoid(-x))
        slopes = slope[:, None] * np.array([1.0, -1.0]) / np.maximum(scores.tokens, 1)
        return self.graded_pairs(scores, losses, slopes)

    def rewards(self, scores: Scores) -> np.ndarray:
        """Return beta times the mean log likelihood a token, float64 [n, 2]."""
        return self.beta * scores.means
