"""Settings of MeSP; rank and target modules are the paper's (section 5.1), the optimizer is AdamW
unless SGD is asked for.

A tile is a part of a matrix's width (the vocabulary, or the MLP's inner dimension), a chunk a part
of the tokens.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from ondevice.core.config import AnswerLossConfig, FrozenBaseConfig, TargetModule
from ondevice.core.flags import (
    ALPHA,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    MICRO_BATCH_SIZE,
    RANK,
    TARGET_MODULES,
    WEIGHT_DECAY,
)

ALL_TARGETS: tuple[TargetModule, ...] = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
GROUP_SIZE = 64
"""Weights that share a scale in NF4, and in MLX."""


Recompute = Literal["auto", "all", "none"] | tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]


class MespConfig(AnswerLossConfig, FrozenBaseConfig):
    """First-order LoRA whose backward pass is written by hand: block inputs are all that a forward
    pass keeps."""

    adapts_experts: ClassVar[bool] = True
    """`target_modules` may name the parameters that hold the matrices of experts."""
    RENAMED: ClassVar[dict[str, str]] = {"targets": "target_modules", "weights": "weight_placement"}
    REMOVED: ClassVar[dict[str, str]] = {
        "gradients": "mesp always computes its own backward pass (gradients: manual); leave the "
        "key out, or take --method lora for automatic differentiation",
        "store_h": "x A^T is always computed again; leave the key out",
    }

    name: Literal["mesp"] = "mesp"
    """Method name."""

    rank: Annotated[int, RANK] = Field(default=8, ge=1, le=1024)
    """LoRA rank r."""

    alpha: Annotated[float, ALPHA] = Field(default=16.0, gt=0)
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""

    target_modules: Annotated[tuple[str, ...], TARGET_MODULES] = Field(
        default=ALL_TARGETS, min_length=1
    )
    """Linear layers that carry an adapter; a family with fused projections takes them as they are.
    A mixture of experts takes `experts.gate_up_proj` and `experts.down_proj` too: a pair for each
    expert (torch)."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=3e-4, gt=0)
    """Learning rate; the paper trains with SGD at 1e-4."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    """`adamw` keeps two moments of the adapter, `sgd` keeps nothing (the paper's)."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay rate."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second decay rate."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    weight_decay: Annotated[float, WEIGHT_DECAY] = Field(default=0.0, ge=0)
    """Decoupled weight decay, of either optimizer."""

    max_grad_norm: Annotated[float | None, MAX_GRAD_NORM] = Field(default=None, gt=0)
    """Clip the gradient of all matrices to this norm; they are collected first, in the adapter's
    size in float32. None does not clip."""

    micro_batch_size: Annotated[int | None, MICRO_BATCH_SIZE] = Field(default=None, ge=1)
    """Rows computed at once; the gradients of a batch of more are accumulated, in the adapter's
    size in float32. None computes all rows at once, and every gradient is applied and dropped where
    it arises."""

    weight_placement: Literal["resident", "streamed"] = "resident"
    """`streamed` reads the frozen weights from their files block by block, in every pass; two
    blocks are in memory."""

    bits: Literal[4, 8] | None = None
    """Frozen matrices in so many bits. torch: 4 is NF4 through bitsandbytes (CUDA), 8 integers with
    a scale a row. MLX: affine groups."""

    loss_tiles: int = Field(default=8, ge=1)
    """Vocabulary tiles of the cross-entropy; a block program has more if one of them would take
    over 8 MiB."""

    loss_chunk_tokens: int | None = Field(default=None, ge=1)
    """Labelled tokens whose logits exist at once, in each tile; None is all of them."""

    mlp_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens that pass through a block's MLP at once, in the backward pass too; None is 128 on a
    CPU, and a quarter of all on a GPU, 1024 to 4096 (torch)."""

    mlp_tiles: int = Field(default=8, ge=1)
    """Tiles of the MLP's inner dimension that are computed one after the other, for all tokens
    (MLX)."""

    activations: Literal["device", "host"] = "device"
    """Where each block's input waits for the backward pass; `host` is pinned host memory (CUDA)."""

    recompute: Recompute = "auto"
    """What the backward pass computes again: `all` of a block; `none`, for about six times the
    memory of the block inputs; or numbers of layers, the last ones, that keep attention's output,
    gate and up, and the other projections. `auto` keeps what fits in the GPU's memory, before the
    first step (torch on CUDA). Results have the same bits."""

    cuda_graphs: bool = True
    """Run batches of up to 8,192 tokens, fewer of large models, as CUDA graphs (torch on CUDA)."""

    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Norms, rotation, SwiGLU and loss: PyTorch's, or one Triton kernel for each chain of operations
    on a GPU; `auto` takes Triton's if it is installed."""

    @model_validator(mode="before")
    @classmethod
    def _as_before(cls, values: Any) -> Any:
        """Take artifacts and checkpoints in which the removed setting has its default, or whose
        kernels were liger-kernel's, for which Triton's are in place."""
        if isinstance(values, dict) and values.get("store_h") is False:
            values = {key: value for key, value in values.items() if key != "store_h"}
        if isinstance(values, dict) and values.get("kernels") == "liger":
            values = values | {"kernels": "triton"}
        return values

    @model_validator(mode="after")
    def _no_target_twice(self) -> Self:
        if len(set(self.target_modules)) != len(self.target_modules):
            raise ValueError("target_modules: a linear layer is named twice")
        return self

    @property
    def scale(self) -> float:
        """Factor of the adapter's output, alpha / rank."""
        return self.alpha / self.rank
