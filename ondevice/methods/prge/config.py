"""Settings of P-RGE; defaults are the paper's (Table 8, ZO-LoRA-FA)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from ondevice.core.config import AnswerLossConfig


class PrgeConfig(AnswerLossConfig):
    """P-RGE: zeroth-order LoRA-FA with all queries and both signs in one forward pass (sections 3.1 to 3.3)."""

    RENAMED: ClassVar[dict[str, str]] = {
        "targets": "target_modules",
        "inner_loop": "batch_signs",
        "outer_loop": "batch_queries",
    }
    REMOVED: ClassVar[dict[str, str]] = {
        "form": "the state is one copy of B, and the noise is made again (form: master)"
    }

    name: Literal["prge"] = "prge"
    """Method name."""

    rank: int = Field(default=16, ge=1, le=1024)
    """LoRA rank r."""

    alpha: float = Field(default=16.0, gt=0)
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""

    target_modules: tuple[str, ...] = Field(default=("q_proj", "v_proj"), min_length=1)
    """Linear layers that carry an adapter, by the last part of their names. Where a model lacks the default's, its
    projections into attention, or into what stands in attention's place."""

    queries: int = Field(default=4, ge=1, le=256)
    """q: random directions a step."""

    perturbation_scale: float = Field(default=1e-2, gt=0)
    """epsilon: how far B is moved along a direction."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """eta of ZO-SGD."""

    noise: Literal["gaussian", "rademacher"] = "gaussian"
    """Distribution of the directions."""

    estimator: Literal["central", "one_sided"] = "central"
    """`central`: (L+ - L-) / 2 epsilon, 2q copies. `one_sided`: (L_i - L_0) over the standard deviation of the
    losses, q + 1 copies (FZOO, ICLR 2026); the learning rate then has another scale."""

    top_layers: int | None = Field(default=None, ge=1)
    """Perturb only the last so many layers; the layers below run once for all copies."""

    batch_signs: bool = True
    """Run both signs in one forward pass (the paper's inner-loop parallelization, section 3.2); off runs one after the
    other, with half the activations (eager only)."""

    batch_queries: bool = True
    """Run all queries in one forward pass (the paper's outer-loop parallelization, section 3.1); off runs one after the
    other, with 1/q of the activations (eager only)."""

    loss: Literal["auto", "answers", "vocabulary"] = "auto"
    """What the loss is over: all tokens (`vocabulary`, the paper's), or the `answers` of a task whose rows share them,
    of one token each; `auto` is the answers where there are such."""

    loss_tiles: int = Field(default=8, ge=1)
    """Vocabulary tiles of the cross-entropy; 1 computes all logits at once."""

    @model_validator(mode="after")
    def _combinations(self) -> PrgeConfig:
        if len(set(self.target_modules)) != len(self.target_modules):
            raise ValueError("target_modules: a linear layer is named twice")
        if self.estimator == "one_sided" and self.queries < 2:
            raise ValueError("estimator one_sided needs queries >= 2: it divides by the losses' standard deviation")
        return self

    @property
    def copies(self) -> int:
        """Perturbed copies of B a step: 2q, or q + 1 for the one-sided estimator."""
        return 2 * self.queries if self.estimator == "central" else self.queries + 1
