"""Settings of the offload engines, to which methods add their own, and those that `torchrun` made."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError
from ondevice.core.flags import BUS_LIMIT, MAX_GRAD_NORM, MICRO_BATCH_SIZE, WEIGHT_DECAY

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a value, by `EngineConfig.compute`."""
RECORD_BYTES = {"float32": 4.40625, "bfloat16": 5.15625, "int8": 3.28125}
"""Of an update that may be taken back (`runtime_ops.adam_undo`), bytes a parameter, by `moments`."""
CODED_BYTES = 18 / 32
"""Of a number in 4 bits, with its part of a scale: see `runtime_ops.gradient_codes`."""
FEW_EXPERTS = 0.5
"""`experts: auto` copies those that are used if they are expected to be less than this part: what
the router has not chosen yet cannot be copied ahead."""


def copied_share(setting: str, experts: int, chosen: int, tokens: int) -> float:
    """Return the part of the experts that is expected to be copied for tokens of which each goes to
    `chosen` of them, all as likely; 1 if all of them are."""
    if setting == "all" or not experts or not chosen:
        return 1.0
    used = 1 - (1 - chosen / experts) ** tokens
    if setting == "auto" and used >= FEW_EXPERTS:
        return 1.0
    return used


class EngineConfig(StrictConfig):
    """Settings that every method that offloads has: precision, AdamW on the host, how a batch
    passes the layers."""

    compute: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of computed weights, activations and gradients; masters are float32. By default, a
    run on a CPU that is slow in bfloat16 takes float32, and says so."""

    optimizer: Literal["auto", "native", "torch", "muon"] = "auto"
    """AdamW on the host: one fused C++ pass (`auto` with a compiler), or torch's. `muon` is Muon for
    the layers' matrices."""

    muon_rate: Literal["adamw", "original"] = "adamw"
    """Length of Muon's steps: AdamW's, or as published."""

    weight_decay: Annotated[float, WEIGHT_DECAY] = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""

    moments: Literal["float32", "bfloat16", "int8"] = "float32"
    """AdamW's moments: 8, 4 or 2 bytes a parameter."""

    decayed: Literal["all", "matrices"] = "all"
    """What weight decay shrinks: all parameters, or `matrices`, no norms and biases."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay rate."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second decay rate."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    max_grad_norm: Annotated[float | None, MAX_GRAD_NORM] = Field(default=None, gt=0)
    """Clip gradients to this norm; None does not clip."""

    clip: Literal["previous", "layer", "global"] = "previous"
    """`previous` divides by the last step's global norm, and no layer may exceed the limit; `layer`
    clips each layer; `global` is exact, and all gradients wait in host memory."""

    micro_batch_size: Annotated[int | None, MICRO_BATCH_SIZE] = Field(default=None, ge=1)
    """Rows that pass through a layer at once; a batch of more is accumulated, layer by layer."""

    loss_chunk_tokens: int = Field(default=2048, ge=1)
    """Tokens whose logits exist at once."""

    loss_tiles: int = Field(default=1, ge=1)
    """Ranges of the output head's rows that are on the accelerator one after the other; more than
    one computes the logits twice."""

    mlp_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens of a row whose MLP is computed at once, for long rows: twice forwards."""

    kernels: Literal["auto", "torch", "liger"] = "auto"
    """Norm, rotary embedding and MLP of the layers: liger-kernel's on a GPU if installed, else
    PyTorch's."""

    disk_fraction: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the layers whose moments are in a file."""

    disk_masters: bool = False
    """Keep the masters of those layers in a file, too."""

    disk_folder: Path | None = None
    """Folder of those files; None: a temporary one."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of the update; None leaves two processors to the rest."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for a transfer or an update before the step gives up."""

    bus_limit_gb_per_s: Annotated[float | None, BUS_LIMIT] = Field(default=None, gt=0)
    """Simulated bus: no direction moves more than this many GB/s; None is the real one."""

    @property
    def slots(self) -> int:
        """Layers on the accelerator at once."""
        raise NotImplementedError

    @property
    def buffers(self) -> int:
        """Layers whose gradients wait in host memory at once."""
        raise NotImplementedError

    @property
    def kept_layers(self) -> int:
        """Layers whose states stay on the accelerator."""
        return 0

    @property
    def keeps_tables(self) -> bool:
        """True if the states of embedding and head stay there."""
        return False

    @property
    def fetched_experts(self) -> Literal["auto", "all", "used"]:
        """Experts of a mixture that go to the accelerator."""
        return "all"

    @property
    def coded(self) -> bool:
        """True if the layers' gradients cross the bus in 4 bits (`gradient_codes`), a layer's in one piece."""
        return False

    @property
    def updates_last(self) -> bool:
        """True if updates count only from the end of the backward pass on."""
        return self.max_grad_norm is not None and self.clip == "global"

    @property
    def presumes(self) -> bool:
        """True if layers may be updated before then: the C++ update can be taken back."""
        exact = self.max_grad_norm is not None and self.clip == "global"
        return exact and self.optimizer in ("auto", "native")

    @property
    def presumed(self) -> int:
        """Layers that may be updated before then, as if the step were not clipped."""
        return 0

    @property
    def uses_disk(self) -> bool:
        """True if states or inputs of layers are on a disk."""
        return self.disk_fraction > 0

    @property
    def disk_tier(self) -> Path | None:
        """The folder of moments that are kept on a disk; None: all are in host memory."""
        if self.disk_fraction > 0:
            return self.disk_folder or Path(tempfile.gettempdir())
        return None

    def check_training(self) -> None:
        """Refuse settings that exclude each other, with ConfigError."""
        if self.optimizer == "muon":
            self._check_muon()
        if self.disk_masters and not self.disk_fraction:
            raise ConfigError(
                "masters go to the disk with the moments of their layers, but no moments do",
                expected="disk_fraction above 0, or disk_masters: false",
                received="disk_masters: true, disk_fraction: 0",
            )

    def _check_muon(self) -> None:
        """Refuse settings under which a momentum would not come to its whole matrix."""
        refused = {
            "moments: float32 or bfloat16": self.moments == "int8",
            "no max_grad_norm: a step is as long whatever the gradient": self.max_grad_norm
            is not None,
            "resident_layers: 0 and resident_tables: false": self.kept_layers or self.keeps_tables,
            "disk_fraction: 0": self.disk_fraction > 0,
            "experts: auto or all: momenta move experts without tokens, too": self.fetched_experts
            == "used",
        }
        for expected, is_refused in refused.items():
            if is_refused:
                raise ConfigError(
                    "optimizer: muon does not go with this setting", expected=expected
                )


@dataclass(frozen=True)
class Rates:
    """Rates of a machine: operations, bytes and parameters a second; None for a rate not needed.

    A simulated bus (`bus_limit_gb_per_s`) is in those of the copies.
    """

    flops_s: float
    h2d_bytes_s: float | None
    d2h_bytes_s: float | None
    parameters_s: float
    disk_bytes_s: float | None


def launched() -> tuple[int, int]:
    """Return rank and number of processes that `torchrun` set, else 0 and 1."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def check_rows(rows: int, world: int) -> None:
    """Check that every rank has the same number of rows, so that all do the same transfers.

    Raises:
        ConfigError: the rows do not divide.
    """
    if rows % world:
        raise ConfigError(
            f"{rows} rows cannot be divided among {world} ranks",
            expected=f"train.batch_size, the rows of all ranks together, a multiple of {world}",
            received=rows,
        )
