"""LSP-Offload: all parameters over a slow bus, through sparse projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ondevice.core.capabilities import Advises, Classifies, Offloads, OwnPrecision, Ranked
from ondevice.core.method import CostFunction, MemoryModel, MethodSpec, OpenSession
from ondevice.methods.lsp.config import LspConfig


def open_torch() -> OpenSession[LspConfig]:
    """Return what opens a session."""
    from ondevice.methods.lsp.torch import open_session

    return open_session


def memory_model() -> MemoryModel[LspConfig]:
    """Return the memory model."""
    from ondevice.methods.lsp.memory import MEMORY

    return MEMORY


def step_cost() -> CostFunction[LspConfig]:
    """Return the cost of a step."""
    from ondevice.methods.lsp.memory import step_cost as cost

    return cost


def lanes(request: Any, rates: Any, rows: int, flops: float) -> dict[str, float]:
    """Return the seconds that each lane of a step takes; see `Offloads`."""
    from ondevice.methods.lsp.planner import lanes

    return lanes(request, rates, rows, flops)


def recommend(plan: Any, rates: Any, plan_of: Callable[[Any], Any]) -> dict[str, Any]:
    """Recommend settings; see `Advises`."""
    from ondevice.methods.lsp.planner import recommend

    return recommend(plan, rates, plan_of)


METHOD = MethodSpec(
    name="lsp",
    config=LspConfig,
    summary="all parameters over a slow bus; gradients cross it in a subspace",
    keeps="weights and projectors on the GPU; 8 bytes for each number of the subspaces in host memory",
    page="lsp.md",
    trains="all",
    order="first",
    sessions={"torch": open_torch},
    memory=memory_model,
    cost=step_cost,
    capabilities=(
        Offloads(lanes),
        Advises(recommend),
        Classifies(),
        Ranked(),
        OwnPrecision("compute"),
    ),
)
