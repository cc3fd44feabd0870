"""SlideFormer: all parameters of a model larger than the accelerator; layers slide through it."""

from __future__ import annotations

from typing import Any

from ondevice.core.capabilities import Classifies, DecidesFromMemory, Offloads, OwnPrecision, Ranked
from ondevice.core.method import CostFunction, MemoryModel, MethodSpec, OpenSession
from ondevice.methods.slideformer.config import SlideformerConfig


def open_torch() -> OpenSession[SlideformerConfig]:
    """Return what opens a session."""
    from ondevice.methods.slideformer.torch import open_session

    return open_session


def memory_model() -> MemoryModel[SlideformerConfig]:
    """Return the memory model."""
    from ondevice.methods.slideformer.memory import MEMORY

    return MEMORY


def step_cost() -> CostFunction[SlideformerConfig]:
    """Return the cost of a step."""
    from ondevice.methods.slideformer.memory import step_cost as cost

    return cost


def lanes(request: Any, rates: Any, rows: int, flops: float) -> dict[str, float]:
    """Return the seconds that each lane of a step takes; see `Offloads`."""
    from ondevice.methods.slideformer.auto import lanes

    return lanes(request, rates, rows, flops)


def resolve(request: Any, rates: Any, host_bytes: int | None) -> tuple[SlideformerConfig, str]:
    """Decide settings that are `auto`; see `DecidesFromMemory`."""
    from ondevice.methods.slideformer.auto import resolve_request

    return resolve_request(request, rates, host_bytes)


METHOD = MethodSpec(
    name="slideformer",
    config=SlideformerConfig,
    summary="all parameters; layers slide through the accelerator, the host updates",
    keeps="12 bytes a parameter in host memory; a window of layers on the GPU",
    page="slideformer.md",
    trains="all",
    order="first",
    sessions={"torch": open_torch},
    memory=memory_model,
    cost=step_cost,
    capabilities=(
        Offloads(lanes),
        DecidesFromMemory(resolve),
        Classifies(),
        Ranked(),
        OwnPrecision("compute"),
    ),
)
