"""MeSP: exact LoRA gradients from hand-derived backward passes, a block at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.capabilities import (
    AnyDecoder,
    DecidesFromMemory,
    KnowsBlocks,
    LearnsPreferences,
    Packs,
    Quantises,
    ReadsFiles,
    Refuses,
    Writes,
)
from ondevice.core.method import MethodSpec, OpenSession, metal
from ondevice.methods.mesp.check import refuse, resolve
from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.mesp.memory import MEMORY
from ondevice.methods.step_model import adapter_step_cost

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.program import GraphProgram, StagesProgram, TorchProgram


def open_torch() -> OpenSession[MespConfig]:
    """Return what opens a session."""
    from ondevice.methods.mesp.torch.session import open_session

    return open_session


def open_mlx() -> OpenSession[MespConfig]:
    """Return what opens a session in MLX."""
    from ondevice.methods.mesp.mlx.session import open_session

    return open_session


def executorch_program() -> GraphProgram:
    """Return the step as a program."""
    from ondevice.methods.mesp.program import EXECUTORCH

    return EXECUTORCH


def qnn_program() -> GraphProgram:
    """Return the step as a program."""
    from ondevice.methods.mesp.npu import QNN

    return QNN


def torch_program() -> TorchProgram:
    """Return the step as a program."""
    from ondevice.methods.mesp.program import TORCH

    return TORCH


def mlx_program() -> StagesProgram:
    """Return the step as a program."""
    from ondevice.methods.mesp.mlx.program import STAGES

    return STAGES


def knows(dims: ModelDims) -> bool:
    """Return True if its passes know the model's blocks; MLX, which a Mac would take, has no experts."""
    return dims.gated and not (dims.experts and metal())


METHOD = MethodSpec(
    name="mesp",
    config=MespConfig,
    summary="exact LoRA gradients from hand-derived backward passes, a block at a time",
    words="Trains a small adapter with little memory: the results of LoRA, in less space.",
    keeps="A, B, two moments or none, one block's activations",
    page="mesp.md",
    trains="adapter",
    order="first",
    preference=1,
    sessions={"torch": open_torch, "mlx": open_mlx},
    memory=lambda: MEMORY,
    cost=lambda: adapter_step_cost,
    programs={
        "executorch": executorch_program,
        "qnn": qnn_program,
        "torch": torch_program,
        "mlx": mlx_program,
    },
    capabilities=(
        LearnsPreferences(("torch", "mlx"), programs=("executorch", "qnn", "torch", "mlx")),
        AnyDecoder(tries=True),
        DecidesFromMemory(resolve),
        KnowsBlocks(knows),
        Packs(("torch",)),
        Quantises[MespConfig](lambda config: config.bits is not None),
        ReadsFiles[MespConfig](lambda config: config.weight_placement == "streamed"),
        Refuses(refuse),
        Writes(("torch", "mlx"), programs=("executorch", "qnn", "torch", "mlx")),
    ),
)
