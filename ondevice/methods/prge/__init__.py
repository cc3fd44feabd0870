"""P-RGE: zeroth-order LoRA-FA, all queries and both signs in one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.capabilities import (
    AnyDecoder,
    LearnsPreferences,
    Packs,
    Replays,
    TrainingDefaults,
)
from ondevice.core.method import CostFunction, MemoryModel, MethodSpec, OpenSession
from ondevice.methods.prge.config import PrgeConfig

if TYPE_CHECKING:
    from ondevice.core.program import GraphProgram, TorchProgram


def open_torch() -> OpenSession[PrgeConfig]:
    """Return what opens a session."""
    from ondevice.methods.prge.torch import open_session

    return open_session


def memory_model() -> MemoryModel[PrgeConfig]:
    """Return the memory model."""
    from ondevice.methods.prge.memory import MEMORY

    return MEMORY


def step_cost() -> CostFunction[PrgeConfig]:
    """Return the cost of a step."""
    from ondevice.methods.prge.memory import step_cost as cost

    return cost


def executorch_program() -> GraphProgram:
    """Return the step as a program."""
    from ondevice.methods.prge.program import EXECUTORCH

    return EXECUTORCH


def qnn_program() -> GraphProgram:
    """Return the step as a program."""
    from ondevice.methods.prge.npu import QNN

    return QNN


def torch_program() -> TorchProgram:
    """Return the step as a program."""
    from ondevice.methods.prge.program import TORCH

    return TORCH


METHOD = MethodSpec(
    name="prge",
    config=PrgeConfig,
    summary="zeroth-order LoRA-FA, all random directions in one forward pass",
    words="Trains a small adapter without gradients, on devices that cannot compute them. "
    "It needs many more steps.",
    keeps="A, C, a diagonal R and its moments; as in the paper one copy of B",
    page="prge.md",
    trains="adapter",
    order="zeroth",
    preference=3,
    sessions={"torch": open_torch},
    memory=memory_model,
    cost=step_cost,
    programs={"executorch": executorch_program, "qnn": qnn_program, "torch": torch_program},
    capabilities=(
        LearnsPreferences(("torch",), programs=("torch",)),
        AnyDecoder(),
        Packs(("torch",)),
        Replays(),
        TrainingDefaults[PrgeConfig](
            PrgeConfig.for_training, lambda config: config.default_schedule
        ),
    ),
)
