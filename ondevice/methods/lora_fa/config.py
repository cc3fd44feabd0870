"""Settings of first-order LoRA-FA with AdamW (P-RGE Table 8, FO-LoRA-FA)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ondevice.core.flags import LEARNING_RATE
from ondevice.methods.lora.config import LoraConfig


class LoraFaConfig(LoraConfig):
    """First-order LoRA-FA: A is frozen, B is trained (peft, AdamW)."""

    trains_a: ClassVar[bool] = False

    name: Literal["lora-fa"] = "lora-fa"  # type: ignore[assignment]
    """Method name."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=1e-3, gt=0)
    """AdamW's learning rate; only B moves, so it is three times LoRA's."""
