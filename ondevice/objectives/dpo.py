"""Direct preference optimisation (Rafailov et al., arXiv 2305.18290, equation 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ondevice.objectives.base import Graded, Objective, Scores, log_sigmoid, sigmoid


@dataclass(frozen=True)
class Dpo(Objective):
    """-log sigmoid(beta (chosen's log ratio - rejected's)).

    Attributes:
        label_smoothing: share of pairs that are taken to be the wrong way round (cDPO).
    """

    name: ClassVar[str] = "dpo"
    label_smoothing: float = 0.0

    def grade(self, scores: Scores) -> Graded:
        """See `Objective.grade`."""
        ratios = scores.log_ratios
        x = self.beta * (ratios[:, 0] - ratios[:, 1])
        wrong = self.label_smoothing
        losses = -(1 - wrong) * log_sigmoid(x) - wrong * log_sigmoid(-x)
        slope = self.beta * (wrong * sigmoid(x) - (1 - wrong) * sigmoid(-x))
        return self.graded_pairs(scores, losses, np.stack([slope, -slope], 1))
