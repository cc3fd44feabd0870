"""Settings of LSP-Offload: those of its engine and its projectors, and AdamW's learning rate."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ondevice.offload.lsp.config import LspEngineConfig


class LspConfig(LspEngineConfig):
    """First-order fine-tuning of all parameters; what crosses the bus is each gradient in a learned subspace."""

    name: Literal["lsp"] = "lsp"
    """Method name."""

    learning_rate: float = Field(default=1e-4, gt=0)
    """AdamW's learning rate."""

    @model_validator(mode="after")
    def _kept_where_they_train(self) -> Self:
        if not self.project and self.weights != "compute":
            raise ValueError(
                f"weights: {self.weights} is for project: true; without it all weights are in the compute dtype"
            )
        return self
