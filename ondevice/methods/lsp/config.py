"""Settings of LSP-Offload: those of the engines, of its projectors, and AdamW's learning rate."""

from __future__ import annotations

import sys
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ondevice.core.config import StrictConfig
from ondevice.core.flags import LEARNING_RATE
from ondevice.offload.config import EngineConfig

FOLDED = 1 << 24
"""Elements of a weight that take their change at once."""


class ProjectorConfig(StrictConfig):
    """The subspace that a weight matrix is updated in, and when it is refreshed."""

    subspace: int = Field(default=512, ge=1)
    """Size s: a matrix of m x n sends s x s numbers; a side no longer than s stays as it is."""

    nonzeros: int = Field(default=8, ge=1)
    """Values other than zero in each row of a projector (d)."""

    projector_values: Literal["normal", "signs", "followed"] = "normal"
    """Normal numbers, balanced signs, which err less, or dense ones that follow the gradient."""

    project_tables: bool = True
    """Project embedding and output head, too."""

    check_every: int = Field(default=1000, ge=1)
    """Steps between two checks of the projectors' bias, on the first micro-batch of the step that
    has a label; drawn projectors are not checked in the first step."""

    threshold: float = Field(default=0.3, ge=0)
    """Projectors are refreshed if ||P P^T G Q Q^T - G|| / ||G|| is at least this."""

    learned: bool = False
    """Learn projectors from the check's gradient, as the paper does; else draw new ones."""

    learn_rounds: int = Field(default=1, ge=1)
    """Products with the gradient, for each side, when projectors are learned."""

    learn_steps: int = Field(default=12, ge=1)
    """Steps of conjugate gradients of a side in a round."""

    gamma: float = Field(default=1e-3, ge=0)
    """Weight of the projectors' mean squares, relative to the bias, while they are learned."""

    @model_validator(mode="after")
    def _one_way_to_values(self) -> Self:
        if self.learned and self.projector_values == "followed":
            raise ValueError("learned: true fits drawn values; projector_values: followed has none")
        return self


def checks_bias(config: ProjectorConfig, step: int) -> bool:
    """Return True if step `step` (from 0) checks the projectors.

    Drawn ones are fresh in the first step: there is nothing to replace them with."""
    return step % config.check_every == 0 and (step > 0 or config.learned)


class LspConfig(EngineConfig, ProjectorConfig):
    """First-order fine-tuning of all parameters; gradients cross the bus in a learned subspace."""

    RENAMED: ClassVar[dict[str, str]] = {
        "weights=host": "weight_placement=host",
        "weights": "weight_dtype",
    }

    name: Literal["lsp"] = "lsp"
    """Method name."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=3e-5, gt=0)
    """AdamW's learning rate."""

    project: bool = True
    """False sends complete gradients and weights: ZeRO-Offload, for comparison."""

    schedule: Literal["layerwise", "zero"] = "layerwise"
    """`layerwise` overlaps the layers' transfers (Algorithm 3); `zero` updates after the backward
    pass and waits for it (Algorithm 1)."""

    weight_placement: Literal["device", "host"] = "device"
    """Placement of the layers' weights: the accelerator, or host memory, from which they slide."""

    weight_dtype: Literal["compute", "float32", "int8", "nf4"] = "compute"
    """Type of the layers' weights: the compute dtype, float32, or 8 or 4 bits by bitsandbytes; on
    the host the compute dtype."""

    gradient_dtype: Literal["compute", "int4"] = "compute"
    """Type on the bus of the gradients of layers and projected tables; `int4` takes 4.5 bits."""

    window: int = Field(default=3, ge=2)
    """Layers whose weights are on the accelerator as they are computed with."""

    gradient_buffers: int = Field(default=4, ge=2)
    """Layers whose gradients wait in host memory for their update."""

    activations: Literal["device", "host"] = "device"
    """Placement of each layer's input until the backward pass."""

    cuda_graphs: bool = True
    """Run a layer's passes as CUDA graphs; the first four repeated batch shapes get them."""

    @property
    def slots(self) -> int:
        """See `window`."""
        return self.window

    @property
    def buffers(self) -> int:
        """See `gradient_buffers`."""
        return self.gradient_buffers

    @property
    def coded(self) -> bool:
        """See `gradient_dtype`."""
        return self.gradient_dtype == "int4"

    @property
    def updates_last(self) -> bool:
        """True if updates wait for the end of the backward pass."""
        return self.schedule == "zero" or super().updates_last

    @property
    def presumed(self) -> int:
        """All layers, as little crosses the bus of each; none if complete ones do."""
        if self.presumes and self.project and self.schedule != "zero":
            return sys.maxsize
        return 0

    @model_validator(mode="after")
    def _weights_that_exist(self) -> Self:
        if self.optimizer == "muon":
            raise ValueError(
                "optimizer: muon is slideformer's: a change in a subspace is not a weight"
            )
        if self.projector_values == "followed" and self.weight_dtype in ("int8", "nf4"):
            raise ValueError(
                "projector_values: followed changes projectors at each check, and "
                f"weight_dtype: {self.weight_dtype} retains all former ones; use compute or float32"
            )
        if self.moments == "int8":
            raise ValueError(
                "moments: int8 cannot be carried into another subspace; float32 or bfloat16 can"
            )
        whole = {
            "gradient_dtype": "compute",
            "weight_placement": "device",
            "weight_dtype": "compute",
        }
        for key, value in whole.items():
            if not self.project and getattr(self, key) != value:
                raise ValueError(
                    f"{key}: {getattr(self, key)} is for project: true; "
                    "without it all is in the compute dtype"
                )
        if self.weight_placement == "host" and self.weight_dtype != "compute":
            raise ValueError(
                f"weight_dtype: {self.weight_dtype} is for weights on the device; on the host it is compute"
            )
        return self
