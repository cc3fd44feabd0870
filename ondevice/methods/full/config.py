"""Settings of first-order full fine-tuning with AdamW (P-RGE Table 8, FO-Full)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ondevice.core.config import AnswerLossConfig


class FullConfig(AnswerLossConfig):
    """First-order fine-tuning of all parameters (AdamW)."""

    name: Literal["full"] = "full"
    """Method name."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """AdamW's learning rate."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""

    loss_tiles: int = Field(default=8, ge=1)
    """Vocabulary tiles of the cross-entropy."""
