"""Objectives over preferences: log likelihoods of rows in, a loss and each row's coefficient out.

Every loss here is a function of the rows' log likelihoods. So its gradient is
sum_r c_r d(log p_r), with c_r = dL / d(log p_r): a training method multiplies each row's own
gradient by one number, and knows nothing else of the objective.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ondevice.core.errors import ConfigError
from ondevice.objectives.base import Graded, Objective, Scores
from ondevice.objectives.dpo import Dpo
from ondevice.objectives.grpo import Answers, Grpo
from ondevice.objectives.ipo import Ipo
from ondevice.objectives.kto import Kto
from ondevice.objectives.orpo import Orpo
from ondevice.objectives.simpo import Simpo

__all__ = [
    "OBJECTIVES",
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
]
OBJECTIVES: dict[str, type[Objective]] = {kind.name: kind for kind in (Dpo, Ipo, Kto, Orpo, Simpo)}
"""Every objective over preferences, by name."""


def objective(name: str, **settings: Any) -> Objective:
    """Return the objective of a name; a setting that is None is the objective's own.

    Raises:
        ConfigError: an unknown name, or a setting that the objective lacks.
    """
    if name not in OBJECTIVES:
        raise ConfigError(
            f"unknown objective {name!r}", expected=", ".join(OBJECTIVES), received=name
        )
    kind = OBJECTIVES[name]
    known = {one.name for one in fields(kind)}
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(
                f"objective {name} has no setting {key}",
                expected=", ".join(sorted(known)),
                received=f"{key}={value}",
            )
    return kind(**given)
