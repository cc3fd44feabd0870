"""Settings of first-order LoRA with AdamW."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ondevice.core.config import AnswerLossConfig, FrozenBaseConfig
from ondevice.core.flags import (
    ALPHA,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MICRO_BATCH_SIZE,
    RANK,
    TARGET_MODULES,
    WEIGHT_DECAY,
)


class LoraConfig(AnswerLossConfig, FrozenBaseConfig):
    """First-order LoRA: both matrices are trained by backpropagation (peft, AdamW)."""

    RENAMED: ClassVar[dict[str, str]] = {"targets": "target_modules"}
    trains_a: ClassVar[bool] = True
    """False freezes A (LoRA-FA)."""
    adapts_experts: ClassVar[bool] = True
    """`target_modules` may name the parameters that hold the matrices of experts."""

    name: Literal["lora"] = "lora"
    """Method name."""

    rank: Annotated[int, RANK] = Field(default=16, ge=1, le=1024)
    """LoRA rank r."""

    alpha: Annotated[float, ALPHA] = Field(default=16.0, gt=0)
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""

    target_modules: Annotated[tuple[str, ...], TARGET_MODULES] = Field(
        default=("q_proj", "v_proj"), min_length=1
    )
    """Linear layers that carry an adapter, by the last part of their names. If a model lacks the
    default's, its projections into attention, or into the layer in its place. The matrices of
    experts, one parameter a layer, carry a pair for each expert: `experts.gate_up_proj`,
    `experts.down_proj`."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=3e-4, gt=0)
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

    cuda_graphs: bool = True
    """Run batches of up to 8,192 tokens, fewer of large models, as CUDA graphs (torch on CUDA)."""
