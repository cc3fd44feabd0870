"""First-order fine-tuning of all parameters with AdamW."""

from __future__ import annotations

from ondevice.core.capabilities import AnyDecoder, Classifies, Packs
from ondevice.core.method import CostFunction, MemoryModel, MethodSpec, OpenSession
from ondevice.methods.full.config import FullConfig


def open_torch() -> OpenSession[FullConfig]:
    """Return what opens a session."""
    from ondevice.methods.full.torch import open_session

    return open_session


def memory_model() -> MemoryModel[FullConfig]:
    """Return the memory model."""
    from ondevice.methods.full.memory import MEMORY

    return MEMORY


def step_cost() -> CostFunction[FullConfig]:
    """Return the cost of a step."""
    from ondevice.methods.full.cost import step_cost as cost

    return cost


METHOD = MethodSpec(
    name="full",
    config=FullConfig,
    summary="first-order fine-tuning of all parameters",
    keeps="gradients, two moments, activations of all layers",
    page="full.md",
    trains="all",
    order="first",
    preference=4,
    sessions={"torch": open_torch},
    memory=memory_model,
    cost=step_cost,
    capabilities=(AnyDecoder(), Classifies(), Packs(("torch",))),
)
