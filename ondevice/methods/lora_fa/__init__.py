"""LoRA-FA: LoRA's session with A frozen."""

from ondevice.core.capabilities import AnyDecoder, Packs
from ondevice.core.method import MethodSpec
from ondevice.methods.lora import memory_model, open_torch, step_cost, torch_program
from ondevice.methods.lora_fa.config import LoraFaConfig

METHOD = MethodSpec(
    name="lora-fa",
    config=LoraFaConfig,
    summary="first-order LoRA with A frozen",
    keeps="B, two moments, activations of all layers",
    page="lora.md",
    trains="adapter",
    order="first",
    sessions={"torch": open_torch},
    memory=memory_model,
    cost=step_cost,
    programs={"torch": torch_program},
    capabilities=(AnyDecoder(), Packs(("torch",))),
)
