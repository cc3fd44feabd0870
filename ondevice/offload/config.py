"""Settings of the offload engines, to which methods add their own, and those that `torchrun` made."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError
from ondevice.core.flags import BUS_LIMIT, MAX_GRAD_NORM, MICRO_BATCH_SIZE, WEIGHT_DECAY

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a value, by `EngineConfig.compute`."""


class EngineConfig(StrictConfig):
    """Settings that every method that offloads has: precision, AdamW on the host, how a batch
    passes the layers."""

    compute: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of computed weights, activations and gradients; masters are float32. By default, a
    run on a CPU that is slow in bfloat16 takes float32, and says so."""

    optimizer: Literal["auto", "native", "torch"] = "auto"
    """AdamW on the host: one fused C++ pass, or torch's with separate conversions. `auto` takes the
    first if there is a C++ compiler."""

    weight_decay: Annotated[float, WEIGHT_DECAY] = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay rate."""

    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second decay rate."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""

    max_grad_norm: Annotated[float | None, MAX_GRAD_NORM] = Field(default=None, gt=0)
    """Clip gradients to this norm; None does not clip."""

    clip: Literal["previous", "layer", "global"] = "previous"
    """`previous` divides by the last step's global norm (in the first step by each layer's own,
    times the root of their number), and no single layer may exceed the limit; `layer` clips each
    layer to the limit; `global` is exact and updates only after the backward pass, with all
    gradients in host memory (2 bytes a parameter more)."""

    micro_batch_size: Annotated[int | None, MICRO_BATCH_SIZE] = Field(default=None, ge=1)
    """Rows that pass through a layer at once; a batch of more is accumulated, layer by layer."""

    loss_chunk_tokens: int = Field(default=2048, ge=1)
    """Tokens whose logits exist at once."""

    kernels: Literal["auto", "torch", "liger"] = "auto"
    """Norm, rotary embedding and MLP of the layers: liger-kernel's on a GPU if installed, else
    PyTorch's."""

    threads: int | None = Field(default=None, ge=1)
    """Threads of the update; None leaves two processors to the rest."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Longest wait for a transfer or an update before the step gives up."""

    bus_limit_gb_per_s: Annotated[float | None, BUS_LIMIT] = Field(default=None, gt=0)
    """Simulated bus: no direction moves more than this many GB/s; None is the real one."""

    @property
    def moments_dtype(self) -> Literal["float32", "bfloat16", "int8"]:
        """Type of AdamW's moments on the host."""
        return "float32"

    @property
    def disk_tier(self) -> Path | None:
        """The folder of moments that are kept on a disk; None: all are in host memory."""
        return None


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
