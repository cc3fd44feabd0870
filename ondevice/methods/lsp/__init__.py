"""LSP-Offload: all parameters over a slow bus, through sparse projections."""

from __future__ import annotations

from ondevice.core.capabilities import (
    Advises,
    AnyDecoder,
    Classifies,
    LearnsPreferences,
    Offloads,
    OwnPrecision,
    Ranked,
)
from ondevice.core.method import MethodSpec, OpenSession
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.lsp.memory import MEMORY, step_cost
from ondevice.methods.lsp.planner import lanes, recommend


def open_torch() -> OpenSession[LspConfig]:
    """Return what opens a session."""
    from ondevice.methods.lsp.torch import open_session

    return open_session


METHOD = MethodSpec(
    name="lsp",
    config=LspConfig,
    summary="all parameters over a slow bus; gradients cross it in a subspace",
    words="Trains the whole model on a GPU that is too small for it, "
    "over a slow connection to the main memory.",
    keeps="weights and projectors on the GPU; 12 bytes for each number of the subspaces in host memory",
    page="lsp.md",
    trains="all",
    order="first",
    sessions={"torch": open_torch},
    memory=lambda: MEMORY,
    cost=lambda: step_cost,
    capabilities=(
        LearnsPreferences(("torch",)),
        Offloads(lanes),
        Advises(recommend),
        Classifies(),
        Ranked(),
        OwnPrecision("compute"),
        AnyDecoder(tries=True),
    ),
)
