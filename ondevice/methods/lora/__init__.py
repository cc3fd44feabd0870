"""First-order LoRA by backpropagation, with peft's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.capabilities import AnyDecoder, Packs
from ondevice.core.method import CostFunction, MemoryModel, MethodSpec, OpenSession
from ondevice.methods.lora.config import LoraConfig

if TYPE_CHECKING:
    from ondevice.core.program import TorchProgram


def open_torch() -> OpenSession[LoraConfig]:
    """Return what opens a session."""
    from ondevice.methods.lora.torch import open_session

    return open_session


def memory_model() -> MemoryModel[LoraConfig]:
    """Return the memory model."""
    from ondevice.methods.lora.memory import MEMORY

    return MEMORY


def step_cost() -> CostFunction[LoraConfig]:
    """Return the cost of a step."""
    from ondevice.methods.step_model import adapter_step_cost

    return adapter_step_cost


def torch_program() -> TorchProgram:
    """Return the step as a program."""
    from ondevice.methods.lora.program import TORCH

    return TORCH


METHOD = MethodSpec(
    name="lora",
    config=LoraConfig,
    summary="first-order LoRA by backpropagation",
    keeps="A, B, two moments, activations of all layers",
    page="lora.md",
    trains="adapter",
    order="first",
    preference=2,
    sessions={"torch": open_torch},
    memory=memory_model,
    cost=step_cost,
    programs={"torch": torch_program},
    capabilities=(AnyDecoder(), Packs(("torch",))),
)
