"""RevFFN: all parameters through reversible blocks; no activation waits for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.core.capabilities import (
    DecidesFromMemory,
    HalfOnGpu,
    LearnsPreferences,
    OpensNetwork,
    Refuses,
)
from ondevice.core.method import MethodSpec, OpenSession
from ondevice.methods.revffn.config import RevffnConfig, check_family
from ondevice.methods.revffn.memory import MEMORY, resolve, step_cost

if TYPE_CHECKING:
    from ondevice.core.capabilities import OpenedNetwork


def open_torch() -> OpenSession[RevffnConfig]:
    """Return what opens a session."""
    from ondevice.methods.revffn.torch import open_session

    return open_session


def open_network(folder: Path, device: str) -> OpenedNetwork:
    """Open the reversible network in a folder."""
    from ondevice.methods.revffn.torch import open_network

    return open_network(folder, device)


METHOD = MethodSpec(
    name="revffn",
    config=RevffnConfig,
    summary="all parameters through reversible blocks",
    words="Trains the whole model with less memory for what lies between its layers. "
    "It changes the model's shape.",
    keeps="one block's gradients, the optimizer's state, two streams",
    page="revffn.md",
    trains="all",
    order="first",
    sessions={"torch": open_torch},
    memory=lambda: MEMORY,
    cost=lambda: step_cost,
    capabilities=(
        DecidesFromMemory(resolve),
        HalfOnGpu(),
        LearnsPreferences(("torch",)),
        OpensNetwork(open_network),
        Refuses[RevffnConfig](
            lambda asked: check_family(asked.dims, asked.config.coupling == "paper")
        ),
    ),
)
