"""LoRA-FA: LoRA's session with A frozen."""

from dataclasses import replace

from ondevice.methods import lora
from ondevice.methods.lora_fa.config import LoraFaConfig

METHOD = replace(
    lora.METHOD,
    name="lora-fa",
    config=LoraFaConfig,
    summary="first-order LoRA with A frozen",
    words="Trains one half of a small adapter: a little less memory, and a little less able.",
    keeps="B, two moments, activations of all layers",
    preference=0,
)
