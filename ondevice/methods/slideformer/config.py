"""Settings of SlideFormer: those of the engines, how states are spread, and AdamW's learning rate."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ondevice.offload.config import EngineConfig


class SlideformerConfig(EngineConfig):
    """First-order fine-tuning of all parameters; layers slide through the accelerator while the host updates."""

    RENAMED: ClassVar[dict[str, str]] = {"vocabulary_chunks": "loss_tiles"}

    name: Literal["slideformer"] = "slideformer"
    """Method name."""

    learning_rate: float = Field(default=1e-5, gt=0)
    """AdamW's learning rate."""

    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """AdamW's moments: 8, 4 or 2 bytes a parameter. Fewer bytes make a faster update, too."""

    window: int = Field(default=3, ge=2)
    """Layers on the accelerator at once."""

    resident_layers: int = Field(default=0, ge=0)
    """The first so many layers keep their masters and moments on the accelerator and are updated there: 14 bytes a
    parameter of its memory, for a shorter boundary between steps and less work on the host."""

    gradient_buffers: int = Field(default=4, ge=2)
    """Layers whose gradients wait in host memory for their update. More of them hide a slow update behind the next
    forward pass, too."""

    activations: Literal["device", "host", "disk"] = "host"
    """Where each layer's input waits for the backward pass."""

    disk_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of the layers whose moments are kept in a file."""

    disk_folder: Path | None = None
    """Folder of those files, on a local disk; None: a temporary folder."""

    loss_tiles: int = Field(default=1, ge=1)
    """Vocabulary tiles: ranges of the output head's rows that are on the accelerator one after the other; more than one
    computes the logits twice."""

    @property
    def moments_dtype(self) -> Literal["float32", "bfloat16", "int8"]:
        """See `moments`."""
        return self.moments

    @property
    def disk_tier(self) -> Path | None:
        """See `disk_folder`."""
        return (self.disk_folder or Path(tempfile.gettempdir())) if self.disk_fraction > 0 else None
