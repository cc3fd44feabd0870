"""LoRA-FA: LoRA's session with A frozen."""

from ondevice.core.capabilities import AnyDecoder, LearnsPreferences, Packs
from ondevice.core.method import MethodSpec
from ondevice.methods.lora import MEMORY, TORCH_PROGRAM, open_torch
from ondevice.methods.lora_fa.config import LoraFaConfig
from ondevice.methods.step_model import adapter_step_cost

METHOD = MethodSpec(
    name="lora-fa",
    config=LoraFaConfig,
    summary="first-order LoRA with A frozen",
    words="Trains one half of a small adapter: a little less memory, and a little less able.",
    keeps="B, two moments, activations of all layers",
    page="lora.md",
    trains="adapter",
    order="first",
    sessions={"torch": open_torch},
    memory=lambda: MEMORY,
    cost=lambda: adapter_step_cost,
    programs={"torch": lambda: TORCH_PROGRAM},
    capabilities=(AnyDecoder(), LearnsPreferences(("torch",)), Packs(("torch",))),
)
