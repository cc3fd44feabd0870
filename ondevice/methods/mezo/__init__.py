"""MeZO: zeroth-order training of all parameters, in place."""

from __future__ import annotations

from ondevice.core.capabilities import (
    AnyDecoder,
    Classifies,
    LearnsPreferences,
    Packs,
    Refuses,
    Replays,
)
from ondevice.core.method import MethodSpec, OpenSession
from ondevice.methods.mezo.config import MezoConfig
from ondevice.methods.mezo.memory import MEMORY, step_cost


def open_torch() -> OpenSession[MezoConfig]:
    """Return what opens a session."""
    from ondevice.methods.mezo.torch import open_session

    return open_session


METHOD = MethodSpec(
    name="mezo",
    config=MezoConfig,
    summary="zeroth-order training of all parameters, in place",
    words="Trains the whole model without gradients, in the memory that answering takes. "
    "It needs very many steps.",
    keeps="nothing",
    page="mezo.md",
    trains="all",
    order="zeroth",
    sessions={"torch": open_torch},
    memory=lambda: MEMORY,
    cost=lambda: step_cost,
    capabilities=(
        AnyDecoder(),
        Classifies(),
        LearnsPreferences(("torch",)),
        Packs(("torch",)),
        Refuses[MezoConfig](lambda asked: asked.config.check_rows(asked.rows)),
        Replays(),
    ),
)
