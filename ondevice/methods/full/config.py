"""Settings of first-order full fine-tuning with AdamW (P-RGE Table 8, FO-Full)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ondevice.core.config import AnswerLossConfig
from ondevice.core.flags import LEARNING_RATE, MAX_GRAD_NORM, MICRO_BATCH_SIZE, WEIGHT_DECAY


class FullConfig(AnswerLossConfig):
    """First-order fine-tuning of all parameters (AdamW)."""

    name: Literal["full"] = "full"
    """Method name."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=1e-5, gt=0)
    """AdamW's learning rate."""

    weight_decay: Annotated[float, WEIGHT_DECAY] = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""

    max_grad_norm: Annotated[float | None, MAX_GRAD_NORM] = Field(default=None, gt=0)
    """Clip the whole gradient to this norm; None does not clip."""

    micro_batch_size: Annotated[int | None, MICRO_BATCH_SIZE] = Field(default=None, ge=1)
    """Rows computed at once; the gradients of a batch of more are accumulated. None computes all
    rows at once."""

    loss_tiles: int = Field(default=8, ge=1)
    """Vocabulary tiles of the cross-entropy."""
