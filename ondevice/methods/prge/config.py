"""Settings of P-RGE; rank, targets and scale are the paper's (Table 8, ZO-LoRA-FA), the rest what
was found best."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ondevice.core.config import AnswerLossConfig, LossOver
from ondevice.core.errors import ConfigError
from ondevice.core.flags import (
    ALPHA,
    LEARNING_RATE,
    PERTURBATION_SCALE,
    QUERIES,
    RANK,
    TARGET_MODULES,
    Flag,
)

PAPER = {"subspace": "random", "optimizer": "sgd", "loss": "vocabulary"}
"""The settings that `paper` stands for."""


class PrgeConfig(AnswerLossConfig):
    """P-RGE: zeroth-order LoRA-FA with all queries and both signs in one forward pass (sections 3.1
    to 3.3)."""

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

    rank: Annotated[int, RANK] = Field(default=16, ge=1, le=1024)
    """LoRA rank r. In a gradient's subspace four directions are trained for each."""

    alpha: Annotated[float, ALPHA] = Field(default=16.0, gt=0)
    """LoRA alpha; the adapter's output is scaled by alpha / rank."""

    target_modules: Annotated[tuple[str, ...], TARGET_MODULES] = Field(
        default=("q_proj", "v_proj"), min_length=1
    )
    """Linear layers that carry an adapter, by the last part of their names. If a model lacks the
    default's, its projections into attention, or into what stands in attention's place."""

    queries: Annotated[int, QUERIES] = Field(default=4, ge=1, le=256)
    """q: random directions a step."""

    perturbation_scale: Annotated[float, PERTURBATION_SCALE] = Field(default=1e-2, gt=0)
    """epsilon: how far B is moved along a direction."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=5e-3, gt=0)
    """eta."""

    paper: Annotated[bool, Flag("--paper")] = False
    """The paper's settings: a random subspace, SGD, the loss over the vocabulary."""

    subspace: Literal["auto", "gradient", "random"] = "auto"
    """The parameters that a step moves. `random`: B behind a random A (the paper's). `gradient`: a
    diagonal R of A R C, where A and C are singular vectors of an exact gradient of
    `calibration_rows` rows, as one backward pass a row gives it; a hundredth of the numbers,
    learned with far fewer steps. `auto` is gradient if a run trains in PyTorch and in exported
    programs with `factors`, random in other programs."""

    refresh_every: int | None = Field(default=100, ge=2)
    """Steps after which a new exact gradient gives a new subspace; null keeps the first one."""

    factors: Path | None = None
    """A subspace that a run wrote (`subspace-*.safetensors` in its folder), for an export: the
    program begins in its leading directions, four for each unit of `rank`. With `refresh_every` it
    has room for what earlier subspaces changed, and takes new ones."""

    calibration_rows: int = Field(default=64, ge=1)
    """Rows of an exact gradient."""

    optimizer: Literal["auto", "sgd", "adam"] = "auto"
    """The optimizer that takes the estimate: `sgd` (the paper's), or `adam` with two moments of
    the trained parameters. `auto` is adam in a gradient's subspace, else sgd."""

    noise: Literal["gaussian", "rademacher"] = "gaussian"
    """Distribution of the directions."""

    estimator: Literal["central", "one_sided"] = "central"
    """`central`: (L+ - L-) / 2 epsilon, 2q copies. `one_sided`: (L_i - L_0) over the standard
    deviation of the losses, q + 1 copies (FZOO, ICLR 2026); the learning rate then has another
    scale."""

    top_layers: int | None = Field(default=None, ge=1)
    """Perturb only the last so many layers; the layers below run once for all copies."""

    batch_signs: bool = True
    """Run both signs in one forward pass (the paper's inner-loop parallelization, section 3.2); off
    runs one after the other, with half the activations (eager only)."""

    batch_queries: bool = True
    """Run all queries in one forward pass (the paper's outer-loop parallelization, section 3.1);
    off runs one after the other, with 1/q of the activations (eager only)."""

    loss: LossOver = "auto"
    """The tokens that the loss is over: all (`vocabulary`, the paper's), or the `answers` of a task
    whose rows share them, of one token each; `auto` is the answers if there are any."""

    labelled_tokens: int | None = Field(default=None, ge=1)
    """Most labelled tokens of a row, for an exported program, which has fixed shapes: the head is
    computed at so many positions instead of all. A batch with more has no loss (not a number). With
    a loss over answers it is 1."""

    loss_tiles: int = Field(default=8, ge=1)
    """Vocabulary tiles of the cross-entropy; 1 computes all logits at once."""

    cuda_graphs: bool = True
    """Run the pass of all copies as CUDA graphs (torch on CUDA)."""

    @model_validator(mode="before")
    @classmethod
    def _paper(cls, values: Any) -> Any:
        """Fill in what `paper` stands for."""
        if not isinstance(values, dict) or not values.get("paper"):
            return values
        for key, value in PAPER.items():
            if values.get(key, value) not in ("auto", value):
                raise ValueError(f"paper sets {key} to {value}: leave paper or {key} out")
        return values | PAPER

    @model_validator(mode="after")
    def _combinations(self) -> PrgeConfig:
        if len(set(self.target_modules)) != len(self.target_modules):
            raise ValueError("target_modules: a linear layer is named twice")
        if self.estimator == "one_sided" and self.queries < 2:
            raise ValueError(
                "estimator one_sided needs queries >= 2: it divides by the losses' standard deviation"
            )
        if self.subspace == "gradient" and self.top_layers is not None:
            raise ValueError(
                "top_layers goes with subspace random: a gradient's subspace is taken in all layers"
            )
        if self.factors is not None and (self.subspace == "random" or self.top_layers is not None):
            raise ValueError(
                "factors are of all layers and of a gradient: leave out top_layers and subspace random"
            )
        return self

    def for_training(self) -> Self:
        """Return the settings of a run that can compute a gradient: `auto` becomes what was found
        best.

        Raises:
            ConfigError: settings of an exported program.
        """
        self.check_training()
        return self._decided()

    def _decided(self) -> Self:
        subspace = self.subspace
        optimizer = self.optimizer
        if subspace == "auto":
            subspace = "gradient" if self.top_layers is None else "random"
        if optimizer == "auto":
            optimizer = "adam" if subspace == "gradient" else "sgd"
        return self.model_copy(update={"subspace": subspace, "optimizer": optimizer})

    def check_training(self) -> None:
        """Refuse settings of an exported program with ConfigError."""
        if self.factors is not None:
            raise ConfigError(
                "method.factors is for exported programs",
                received=str(self.factors),
                hint="a run in PyTorch takes its own subspace: --set method.subspace=gradient",
            )

    def for_program(self) -> Self:
        """Return the settings of an exported program, which begins in `factors` if it has them."""
        if self.factors is not None:
            return self._decided()
        return self.model_copy(update={"subspace": "random"})._decided()

    @property
    def default_schedule(self) -> str | None:
        """Schedule of a run that names none; None for the loop's own."""
        return "linear" if self.subspace == "gradient" or self.factors is not None else None

    @property
    def copies(self) -> int:
        """Perturbed copies of B a step: 2q, or q + 1 for the one-sided estimator."""
        return 2 * self.queries if self.estimator == "central" else self.queries + 1
