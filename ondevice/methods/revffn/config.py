"""Settings of RevFFN: how a block is coupled, in which numbers its streams are kept, and how it is
trained.

Sections and equations are the paper's. What goes beyond it says so.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ModelError, Need
from ondevice.core.flags import LEARNING_RATE, MAX_GRAD_NORM, MICRO_BATCH_SIZE, WEIGHT_DECAY, Flag
from ondevice.core.traits import BlockTraits, check_traits

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims

STAGE1_STEPS = 100
"""Steps of stage 1 if the settings name none and the coupling has adapters."""

Recompute = Literal["auto", "reversible", "stored"] | NonNegativeInt


class RevffnConfig(StrictConfig):
    """First-order fine-tuning of all parameters; blocks are reversible: no activation waits for the
    backward pass."""

    name: Literal["revffn"] = "revffn"
    """Method name."""

    coupling: Literal["full", "exact", "paper"] = "full"
    """`full`: two streams of full width that start at the pretrained function. `exact`: half-width
    streams with adapters, in an order that inverts in closed form. `paper`: Eqs. (1) and (2),
    inverted by fixed-point iteration."""

    streams: Literal["int32", "float32", "bfloat16"] = "int32"
    """Numbers of the residual streams. `int32` (fixed point) inverts without a differing bit at any
    depth; `float32` is summed in float64, at twice the bytes; `bfloat16` loses the inputs, and is
    there for comparison."""

    fraction_bits: int | None = Field(default=None, ge=1, le=30)
    """Bits after the point of int32 streams. None: as many as the model's own activations leave
    room for, found by one pass over tokens that are the same for every run; a step that overflows
    takes fewer and begins again. A number is kept, and an overflow is an error."""

    gamma_bits: int = Field(default=4, ge=0, le=8)
    """`full`: the older stream has weight -2^-bits, and as many bits a value and layer are kept for
    the inversion. With more of them the network is nearer to the pretrained one. 0 is the midpoint
    rule, far from it."""

    gamma_bits_on: Literal["host", "device"] = "host"
    """`full`: where those bits wait. On the host, in pinned memory, the accelerator's memory is
    that of any depth."""

    max_iterations: int = Field(default=50, ge=1)
    """`paper`: fixed-point iterations a block, at most; 1 is what the paper does."""

    tolerance: float = Field(default=1e-6, gt=0)
    """`paper`: an iteration has converged if the stream moves by no more than this part of its
    norm."""

    not_converged: Literal["refuse", "store"] = "refuse"
    """`paper`: a block whose iteration does not converge is an error that names it, or its input is
    stored."""

    recompute: Recompute = "auto"
    """Blocks that the backward pass computes again: `reversible` all, `stored` none; a number keeps
    the last ones. `auto` keeps what fits the GPU's memory. Results have the same bits."""

    optimizer: Literal["adamw", "adamw8bit", "adafactor", "sgd"] = "adamw"
    """Bytes of state a parameter: `adamw` 8, `adamw8bit` (bitsandbytes) 2, `adafactor` and `sgd`
    next to none. `sgd` with the fused update is LOMO."""

    fused_update: bool = True
    """Update a block as soon as its gradients are known, and free them: one block's gradients exist
    at a time."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=1e-5, gt=0)
    """Learning rate of stage 2."""

    weight_decay: Annotated[float, WEIGHT_DECAY] = Field(default=0.0, ge=0)
    """Decoupled weight decay, of every optimizer."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay rate."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second decay rate."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How an updated bfloat16 weight is rounded. To the nearest, steps below 1/256 of a weight
    vanish; stochastic rounding keeps them on average, with bits that are a function of seed, step
    and element."""

    max_grad_norm: Annotated[float | None, MAX_GRAD_NORM] = Field(default=None, gt=0)
    """Clip gradients to this norm; None does not clip."""

    clip: Literal["block", "global"] = "block"
    """`block` clips each block's gradients separately, in the same backward pass. `global`
    divides by the norm of the whole gradient: with the fused update it takes two passes, once for
    the norm and once to update."""

    micro_batch_size: Annotated[int | None, MICRO_BATCH_SIZE] = Field(default=None, ge=1)
    """Rows that pass through a block at once. A batch of more is accumulated block by block: every
    part of the batch goes back through a block, its gradients are summed in float32, then the block
    is updated."""

    loss_tiles: int = Field(default=8, ge=1)
    """Vocabulary tiles of the cross-entropy."""

    stage1_steps: int | None = Field(default=None, ge=0)
    """Section 3.3: the first so many steps train the adapters only; None: 100 if the coupling
    has adapters, 0 with `full`, which has none."""

    stage1_learning_rate: float = Field(default=1e-4, gt=0)
    """Learning rate of stage 1; it follows the same schedule."""

    skip_stage1: Annotated[bool, Flag("--skip-stage1")] = False
    """Train all parameters from the first step (Table 3, without stage 1)."""

    stage1_only: Annotated[bool, Flag("--stage1-only")] = False
    """Train only the adapters, in every step (Table 3, without stage 2)."""

    train_router: bool = False
    """Train the experts' router in stage 2, too; the paper keeps it frozen."""

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.skip_stage1 and self.stage1_only:
            raise ValueError("skip_stage1 and stage1_only leave nothing to train")
        if self.coupling == "full" and (self.stage1_only or self.stage1_steps):
            raise ValueError(
                "stage 1 trains adapters, and coupling: full has none; take coupling: exact or paper"
            )
        amplifies = self.coupling == "full" and self.gamma_bits > 0 and self.streams != "int32"
        if amplifies and self.recompute != "stored":
            raise ValueError(
                f"coupling: full multiplies an error by {2**self.gamma_bits} a layer on the way back, so only "
                "streams: int32 inverts it; or take recompute: stored"
            )
        return self

    @property
    def stage1(self) -> int | None:
        """Steps of stage 1; None: all of them."""
        if self.stage1_only:
            return None
        if self.skip_stage1 or self.coupling == "full":
            return 0
        if self.stage1_steps is None:
            return STAGE1_STEPS
        return self.stage1_steps


_OF_OTHERS = ("mixers", "key_layers", "layer_input", "output_scale", "logit_cap")
KNOWN = tuple(field.name for field in fields(BlockTraits) if field.name not in _OF_OTHERS)
"""Traits that the modelling file computes, with queries, keys and values of one stream."""


def check_family(dims: ModelDims, crossed: bool = False) -> None:
    """Refuse a model whose training could not be kept.

    Args:
        crossed: queries are of another stream than keys and values (`coupling: paper`).

    Raises:
        ModelError: the modelling file does not know the family, or a trait of its blocks.
    """
    # The modelling file calls each block's norms, `self_attn` and `mlp`.
    if not dims.gated:
        raise ModelError(
            "revffn does not train this family",
            expected="RMS norms, rotary embedding, a gated MLP",
            received=dims.family,
            needs=Need.TRAINS_ALL,
        )
    what = "method revffn"
    if crossed:
        what = "method revffn with coupling: paper"
    check_traits(dims, what, ("windows",) if crossed else KNOWN)
