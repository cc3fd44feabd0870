"""Settings of SlideFormer: those of the offload engine, and AdamW's learning rate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ondevice.offload.config import OffloadConfig


class SlideformerConfig(OffloadConfig):
    """First-order fine-tuning of all parameters; layers slide through the accelerator while the host updates."""

    name: Literal["slideformer"] = "slideformer"
    """Method name."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """AdamW's learning rate."""
