"""RevFFN: all parameters through reversible blocks; no activation waits for the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.core.capabilities import OpensNetwork
from ondevice.core.method import CostFunction, MemoryModel, MethodSpec, OpenSession
from ondevice.methods.revffn.config import RevffnConfig

if TYPE_CHECKING:
    from ondevice.core.session import OpenedNetwork


def open_torch() -> OpenSession[RevffnConfig]:
    """Return what opens a session."""
    from ondevice.methods.revffn.torch import open_session

    return open_session


def memory_model() -> MemoryModel[RevffnConfig]:
    """Return the memory model."""
    from ondevice.methods.revffn.memory import MEMORY

    return MEMORY


def step_cost() -> CostFunction[RevffnConfig]:
    """Return the cost of a step."""
    from ondevice.methods.revffn.cost import step_cost as cost

    return cost


def open_network(folder: Path, device: str) -> OpenedNetwork:
    """Open the reversible network in a folder."""
    from ondevice.methods.revffn.torch import open_network

    return open_network(folder, device)


METHOD = MethodSpec(
    name="revffn",
    config=RevffnConfig,
    summary="all parameters through reversible blocks",
    keeps="one block's gradients, the optimizer's state, two streams",
    page="revffn.md",
    trains="all",
    order="first",
    sessions={"torch": open_torch},
    memory=memory_model,
    cost=step_cost,
    capabilities=(OpensNetwork(open_network),),
)
