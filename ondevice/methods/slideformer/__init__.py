"""SlideFormer: all parameters of a model larger than the accelerator; layers slide through it."""

from __future__ import annotations

from typing import Any

from ondevice.core.capabilities import (
    AnyDecoder,
    Classifies,
    DecidesFromMemory,
    DrivesLoops,
    LearnsPreferences,
    Offloads,
    OwnPrecision,
    Ranked,
    Refuses,
)
from ondevice.core.method import MethodSpec, OpenSession
from ondevice.methods.slideformer.auto import lanes, resolve_request, step_s
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.memory import MEMORY, step_cost


def open_torch() -> OpenSession[SlideformerConfig]:
    """Return what opens a session."""
    from ondevice.methods.slideformer.torch import open_session

    return open_session


def open_loop() -> type[Any]:
    """Return the engine of a loop of one's own."""
    from ondevice.methods.slideformer.loop import Offloaded

    return Offloaded


def resolve(request: Any, rates: Any, host_bytes: int | None) -> tuple[SlideformerConfig, str]:
    """Decide settings that are `auto`; see `DecidesFromMemory`."""
    config = request.method
    if not config.is_auto:
        return config, ""
    if request.device.torch_device == "cpu":
        return config.fixed(), ""
    return resolve_request(request, rates, host_bytes)


METHOD = MethodSpec(
    name="slideformer",
    config=SlideformerConfig,
    summary="all parameters; layers slide through the accelerator, the host updates",
    words="Trains the whole model on a GPU that is too small for it: "
    "its layers pass through one by one.",
    keeps="12 bytes a parameter in host memory; a window of layers on the GPU",
    page="slideformer.md",
    trains="all",
    order="first",
    sessions={"torch": open_torch},
    memory=lambda: MEMORY,
    cost=lambda: step_cost,
    capabilities=(
        LearnsPreferences(("torch",)),
        Offloads(lanes, step_s),
        DecidesFromMemory(resolve),
        Classifies(),
        Ranked(),
        Refuses[SlideformerConfig](lambda asked: asked.config.check_training()),
        OwnPrecision("compute"),
        DrivesLoops(open_loop),
        AnyDecoder(tries=True),
    ),
)
