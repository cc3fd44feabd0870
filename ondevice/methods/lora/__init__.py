"""First-order LoRA by backpropagation, with peft's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.capabilities import AnyDecoder, LearnsPreferences, Packs, Refuses, Writes
from ondevice.core.method import MemoryModel, MethodSpec, OpenSession
from ondevice.core.program import TorchProgram
from ondevice.methods.lora.config import LoraConfig
from ondevice.methods.precision import base_problems, refuse_base
from ondevice.methods.step_model import adapter_step_cost, backward_bytes, loss_bytes

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims


def open_torch() -> OpenSession[LoraConfig]:
    """Return what opens a session."""
    from ondevice.methods.lora.torch import open_session

    return open_session


def memory(
    dims: ModelDims,
    config: LoraConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes by part: adapter, its gradients and AdamW moments, and activations kept for
    backward."""
    linears = dims.adapted(config)
    a = config.rank * sum(linear.inputs * linear.experts for linear in linears)
    b = config.rank * sum(linear.outputs * linear.experts for linear in linears)
    trained = b
    if config.trains_a:
        trained = a + b
    rows = min(batch_size, config.micro_batch_size or batch_size)
    tokens = rows * length_tokens
    return {
        "adapter": (a + b) * 4 + trained * 4,
        "noise": 0,
        "activations": backward_bytes(dims, rows, length_tokens, activation_bytes),
        "logits": loss_bytes(dims, tokens, config.loss_tiles),
        "optimizer": trained * 8,
    }


MEMORY = MemoryModel(memory)
TORCH_PROGRAM = TorchProgram(base_problems, trains_a=lambda config: config.trains_a)
"""The step over packed weights: it stays PyTorch's."""

METHOD = MethodSpec(
    name="lora",
    config=LoraConfig,
    summary="first-order LoRA by backpropagation",
    words="Trains a small adapter in the usual way: slightly faster steps, and more memory.",
    keeps="A, B, two moments, activations of all layers",
    page="lora.md",
    trains="adapter",
    order="first",
    preference=2,
    sessions={"torch": open_torch},
    memory=lambda: MEMORY,
    cost=lambda: adapter_step_cost,
    programs={"torch": lambda: TORCH_PROGRAM},
    capabilities=(
        AnyDecoder(),
        LearnsPreferences(("torch",), programs=("torch",)),
        Packs(("torch",)),
        Refuses(refuse_base),
        Writes(programs=("torch",)),
    ),
)
