"""Identity preference optimisation (Azar et al., arXiv 2310.12036, equation 17)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ondevice.objectives.base import Graded, Objective, Scores


@dataclass(frozen=True)
class Ipo(Objective):
    """(chosen's log ratio a token - rejected's - 1 / (2 beta))^2.

    The mean over an answer's tokens is TRL's form; the paper's is the sum.
    """

    name: ClassVar[str] = "ipo"

    def grade(self, scores: Scores) -> Graded:
        """See `Objective.grade`."""
        counts = np.maximum(scores.tokens, 1)
        ratios = scores.log_ratios / counts
        distance = ratios[:, 0] - ratios[:, 1] - 1 / (2 * self.beta)
        slopes = 2 * distance[:, None] * np.array([1.0, -1.0]) / counts
        return self.graded_pairs(scores, distance**2, slopes)

    def rewards(self, scores: Scores) -> np.ndarray:
        """Return beta times the log ratio a token, float64 [n, 2]: what the loss compares."""
        return self.beta * scores.log_ratios / np.maximum(scores.tokens, 1)
