"""First-order LoRA by backpropagation, with peft's layers."""

from ondevice.core.method import MethodSpec
from ondevice.methods.lora.config import LoraConfig

METHOD = MethodSpec(
    name="lora",
    package=__name__,
    config=LoraConfig,
    summary="first-order LoRA by backpropagation",
    keeps="A, B, two moments, activations of all layers",
    page="lora.md",
    trains="adapter",
    order="first",
    preference=2,
    sessions={"torch": ".torch:open_session"},
    packs=("torch",),
    memory=".memory:MEMORY",
    cost="ondevice.methods.step_model:adapter_step_cost",
    programs={"torch": ".program:TORCH"},
    any_decoder=True,
)
