"""Objectives over preferences: log likelihoods of rows in, a loss and each row's coefficient out.

Every loss here is a function of the rows' log likelihoods. So its gradient is
sum_r c_r d(log p_r), with c_r = dL / d(log p_r): a training method multiplies each row's own
gradient by one number, and knows nothing else of the objective.
"""

from __future__ import annotations

from ondevice.objectives.base import Graded, Objective, Scores, objective, objective_names
from ondevice.objectives.dpo import Dpo
from ondevice.objectives.grpo import Answers, Grpo
from ondevice.objectives.ipo import Ipo
from ondevice.objectives.kto import Kto
from ondevice.objectives.orpo import Orpo
from ondevice.objectives.simpo import Simpo

__all__ = [
    "Answers",
    "Dpo",
    "Graded",
    "Grpo",
    "Ipo",
    "Kto",
    "Objective",
    "Orpo",
    "Scores",
    "Simpo",
    "objective",
    "objective_names",
]
