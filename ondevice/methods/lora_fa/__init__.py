"""LoRA-FA: LoRA's session with A frozen."""

from ondevice.core.method import MethodSpec
from ondevice.methods.lora_fa.config import LoraFaConfig

METHOD = MethodSpec(
    name="lora-fa",
    package=__name__,
    config=LoraFaConfig,
    summary="first-order LoRA with A frozen",
    keeps="B, two moments, activations of all layers",
    page="lora.md",
    trains="adapter",
    order="first",
    sessions={"torch": "ondevice.methods.lora.torch:open_session"},
    packs=("torch",),
    memory="ondevice.methods.lora.memory:MEMORY",
    cost="ondevice.methods.step_model:adapter_step_cost",
    programs={"torch": "ondevice.methods.lora.program:TORCH"},
    any_decoder=True,
)
