"""Kahneman-Tversky optimisation (Ethayarajh et al., arXiv 2402.01306, equation 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from ondevice.core.errors import DataError
from ondevice.objectives.base import Graded, Objective, Scores, sigmoid


@dataclass(frozen=True)
class Kto(Objective):
    """1 - sigmoid(beta (log ratio - KL)) of a liked answer, 1 - sigmoid(beta (KL - log ratio)) of another.

    KL is the mean log ratio of other rows' answers after these rows' prompts, at least 0; it has no
    gradient. A step's rows share it.

    Attributes:
        desirable_weight, undesirable_weight: of the losses of liked and of disliked answers.
    """

    name: ClassVar[str] = "kto"
    rows: ClassVar[Literal["pairs", "thumbs"]] = "thumbs"
    texts: ClassVar[int] = 1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def grade(self, scores: Scores) -> Graded:
        """See `Objective.grade`.

        Raises:
            DataError: the rows are not rated.
        """
        if scores.liked is None:
            raise DataError("kto learns from rated answers", received="preference pairs")
        ratios = scores.log_ratios
        kl = max(0.0, float(ratios[:, 1].mean()))
        sign = np.where(scores.liked, 1.0, -1.0)
        weights = np.where(scores.liked, self.desirable_weight, self.undesirable_weight)
        value = sigmoid(sign * self.beta * (ratios[:, 0] - kl))
        slopes = np.zeros_like(ratios)
        slopes[:, 0] = -weights * sign * self.beta * value * (1 - value) / len(ratios)
        rewards = self.beta * ratios[:, 0]
        right = (rewards > self.beta * kl) == scores.liked
        figures = {"accuracy": float(right.mean()), "kl": kl}
        for name, some in (("chosen", scores.liked), ("rejected", ~scores.liked)):
            if some.any():
                figures[f"rewards_{name}"] = float(rewards[some].mean())
        if len(figures) == 4:
            figures["margin"] = figures["rewards_chosen"] - figures["rewards_rejected"]
        return Graded(float((weights * (1 - value)).mean()), slopes, figures, right)
