"""Settings of SlideFormer: those of the engines, how states are spread, and AdamW's learning
rate."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field

from ondevice.core.config import MemorySize
from ondevice.core.errors import ConfigError
from ondevice.core.flags import HOST_MEMORY, LEARNING_RATE
from ondevice.offload.config import EngineConfig

WINDOW = 3
BUFFERS = 4
"""The values of a run whose sizes or machine are not known."""


class SlideformerConfig(EngineConfig):
    """First-order fine-tuning of all parameters; layers slide through the accelerator while the
    host updates."""

    RENAMED: ClassVar[dict[str, str]] = {"vocabulary_chunks": "loss_tiles"}

    name: Literal["slideformer"] = "slideformer"
    """Method name."""

    learning_rate: Annotated[float, LEARNING_RATE] = Field(default=1e-5, gt=0)
    """AdamW's learning rate."""

    window: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Layers on the accelerator at once. Here and below `auto` decides by memory and measured
    rates; results do not depend on it."""

    resident_layers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """The first so many layers keep their masters and moments on the accelerator and are updated
    there."""

    resident_tables: bool | Literal["auto"] = "auto"
    """Embedding and output head keep theirs there, too; like layers, not with `clip: global`."""

    gradient_buffers: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Layers whose gradients wait in host memory for their update."""

    presumed_layers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """With `clip: global`, layers that are updated before the norm is known, with a record each in
    host memory."""

    host_memory_bytes: Annotated[MemorySize, HOST_MEMORY] = Field(default=None, ge=1 << 20)
    """Most host memory, such as 96GiB; None is all that is free. `auto` decides within it, and within
    `train.memory_limit_bytes` on the GPU."""

    activations: Literal["device", "host", "disk"] = "host"
    """Placement of each layer's input until the backward pass."""

    experts: Literal["auto", "all", "used"] = "auto"
    """Experts of a mixture that are copied: `used` are those of the batch's tokens, for which each
    layer waits; `auto` takes these if they are few."""

    @property
    def is_auto(self) -> bool:
        """True if something is left to decide."""
        return "auto" in (
            self.window,
            self.resident_layers,
            self.resident_tables,
            self.gradient_buffers,
            self.presumed_layers,
        )

    def decided(self, **values: int | bool) -> Self:
        """Return the settings, with those of `values` for the ones that are `auto`."""
        open_names = [name for name in values if getattr(self, name) == "auto"]
        return self.model_copy(update={name: values[name] for name in open_names})

    def fixed(self) -> Self:
        """Return the settings of a machine that is not known."""
        return self.decided(
            window=WINDOW, resident_layers=0, resident_tables=False, gradient_buffers=BUFFERS,
            presumed_layers=0,
        )  # fmt: skip

    @property
    def slots(self) -> int:
        """See `window`; undecided, the number that always does."""
        if self.window == "auto":
            return WINDOW
        return self.window

    @property
    def buffers(self) -> int:
        """See `gradient_buffers`, likewise."""
        if self.gradient_buffers == "auto":
            return BUFFERS
        return self.gradient_buffers

    @property
    def presumed(self) -> int:
        """See `presumed_layers`, likewise."""
        if self.presumed_layers == "auto" or not self.presumes:
            return 0
        return self.presumed_layers

    @property
    def kept_layers(self) -> int:
        """See `resident_layers`, likewise."""
        if self.resident_layers == "auto":
            return 0
        return self.resident_layers

    @property
    def keeps_tables(self) -> bool:
        """See `resident_tables`, likewise."""
        return self.resident_tables is True

    @property
    def fetched_experts(self) -> Literal["auto", "all", "used"]:
        """See `experts`."""
        return self.experts

    @property
    def uses_disk(self) -> bool:
        """True if states or inputs of layers are on a disk."""
        return super().uses_disk or self.activations == "disk"

    def check_training(self) -> None:
        """Refuse settings that exclude each other, `auto` decided, with ConfigError."""
        kept = self.kept_layers or self.keeps_tables
        if kept and self.max_grad_norm is not None and self.clip == "global":
            raise ConfigError(
                "resident units are updated at once, before a global norm is known",
                expected="resident_layers: 0 and resident_tables: false, or clip: previous or layer",
                received=f"resident_layers: {self.kept_layers}, resident_tables: {self.keeps_tables}",
            )
        super().check_training()
