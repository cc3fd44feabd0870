"""Settings of MeZO over all parameters; defaults are the paper's (Table 8, ZO-Full) but for the
rate and the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ondevice.core.config import AnswerLossConfig, LossOver
from ondevice.core.errors import ConfigError
from ondevice.core.flags import LEARNING_RATE, PERTURBATION_SCALE, QUERIES


class MezoConfig(AnswerLossConfig):
    """MeZO: four sequential passes over the parameters, noise from a seed (P-RGE appendix A.1,
    Algorithm 2)."""

    name: Literal["mezo"] = "mezo"
    """Method name."""

    queries: Annotated[int, QUERIES] = Field(default=1, ge=1, le=256)
    """q: random directions a step, one after the other."""

    fresh_batches: bool = False
    """Cut a step's rows among its queries, so that each has a batch of its own (Algorithm 2); off,
    each sees them all."""

    perturbation_scale: Annotated[float, PERTURBATION_SCALE] = Field(default=1e-3, gt=0)
    """epsilon."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=1e-5, gt=0)
    """eta of ZO-SGD. The paper's is 1e-6, with which 500 steps change no answer of SmolLM2-135M on
    SST-2."""

    loss: LossOver = "auto"
    """As `prge` has it: over the answers of a task whose rows share them, over the `vocabulary`
    (the paper's) elsewhere."""

    noise: Literal["gaussian", "rademacher"] = "gaussian"
    """Distribution of the directions."""

    loss_tiles: int = Field(default=8, ge=1)
    """Vocabulary tiles of the cross-entropy."""

    def check_rows(self, rows: int) -> None:
        """Refuse steps of fewer rows than `fresh_batches` cuts with ConfigError."""
        if self.fresh_batches and rows < self.queries:
            raise ConfigError(
                "method.fresh_batches cuts a step's rows among its queries, and there are too few",
                expected=f"train.batch_size of at least {self.queries} (without data.packing)",
                received=rows,
                hint="fewer queries, or fresh_batches off",
            )
