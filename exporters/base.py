"""The exporter's contract: list every problem first, then write the whole artifact or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field, model_validator

from ondevice.artifact.manifest import MANIFEST_NAME, Share
from ondevice.config import ModelConfig, Section
from ondevice.errors import ArtifactError

TORCH_TARGETS = ("jetson", "cuda-server")
"""Targets whose artifacts run in PyTorch."""


class ExportConfig(Section):
    """What the exported program looks like."""

    target: str = "android-cpu"
    """Where it will run; `ondevice export --list` names the targets."""

    lengths_tokens: tuple[int, ...] = Field(default=(64,), min_length=1)
    """Length buckets: one program method each, because a dynamic length would plan memory for the longest."""

    batch_size: int = Field(default=1, ge=1)
    """Rows of data a step; the program runs each 2q times."""

    eval_batch_size: int = Field(default=2, ge=1)
    """Rows an evaluation takes at once."""

    form: Literal["functional", "stateful"] = "functional"
    """`functional`: the adapter goes in and comes out, as a stock Android runtime needs. `stateful`: mutable buffer."""

    generator: Literal["auto", "aten", "op"] = "auto"
    """Lowering of the noise: an op-free graph, or this project's op. `auto`: the op where other ops are needed too."""

    quantize: Literal["none", "q4", "8da4w", "w8", "nf4", "int8"] = "none"
    """`q4`: 4-bit weights, float32 activations (this project's op). `8da4w`: XNNPACK's 8-bit dynamic activations,
    which distort zeroth-order gradients at small perturbation scales. `w8` (NPU only): 8-bit weights, float16
    activations. `nf4` and `int8` (jetson, cuda-server): by bitsandbytes, activations in `model.dtype`. `none` is
    float16 on the NPU, `model.dtype` or else bfloat16 for jetson and cuda-server, and float32 elsewhere."""

    loss: Literal["auto", "tiled", "plain", "op"] = "auto"
    """Cross-entropy: vocabulary tiles, all logits at once, or this project's fused op."""

    next_token: bool = False
    """Add a method that says which token comes next, so that the device can answer a prompt before and after."""

    check_steps: int = Field(default=3, ge=1)
    """Training steps of the program that are held against eager PyTorch before anything is written; in the NPU's
    simulator, where a step takes minutes, one."""

    soc: tuple[str, ...] = Field(default=("SM8650",), min_length=1)
    """Qualcomm chips that an NPU program is compiled for, or `all`; several give one artifact each."""

    rows: Literal["batched", "unrolled"] = "batched"
    """How the NPU runs the copies of the batch: as one batch, or row after row with shared weights."""

    @model_validator(mode="after")
    def _combinations(self) -> ExportConfig:
        if sorted(set(self.lengths_tokens)) != sorted(self.lengths_tokens) or min(self.lengths_tokens) < 8:
            raise ValueError("lengths_tokens: distinct lengths of at least 8 tokens")
        return self

    @property
    def runtime(self) -> Literal["torch", "executorch"]:
        """What runs the artifact, for a plan of it."""
        return "torch" if self.target in TORCH_TARGETS else "executorch"

    def dtype(self, model: ModelConfig) -> str:
        """Precision that the artifact computes in: for PyTorch bfloat16, unless the model section names another."""
        if self.runtime == "executorch":
            return "float32"
        return model.dtype if "dtype" in model.model_fields_set else "bfloat16"

    @property
    def uses_ops(self) -> bool:
        """Whether the program needs this project's kernels in the runtime."""
        return self.quantize == "q4" or self.generator == "op" or self.loss == "op"


@dataclass(frozen=True)
class ExportJob:
    """All that an export needs to know."""

    model: ModelConfig
    method: Any
    export: ExportConfig
    seed: int = 0
    task: str | None = None
    overwrite: bool = False
    memory_limit_bytes: int | None = None


@dataclass(frozen=True)
class ExportReport:
    """What was written, and what the check against eager measured."""

    path: Path
    target: str
    program_bytes: int
    lowering_s: float
    planned_bytes: dict[str, int]
    custom_ops: tuple[str, ...]
    check: dict[str, Any]
    warnings: tuple[str, ...]
    partition: dict[str, tuple[Share, ...]]


class Exporter(Protocol):
    """One target."""

    @property
    def socs(self) -> dict[str, str]:
        """Chips that a program is compiled for, with their names; empty where one program runs on all."""
        ...

    @property
    def perturbation_scale(self) -> float | None:
        """The target's own default, where the method's is too small for its arithmetic; None for the method's."""
        ...

    def check(self, job: ExportJob) -> list[str]:
        """Every reason why `job` cannot be exported, found without loading weights; empty if it can."""
        ...

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Write the artifact to `out`, atomically.

        Raises:
            VerificationError: if the program does not do what eager PyTorch does; nothing is written then.
        """
        ...


def check_free(out: Path, overwrite: bool) -> None:
    """Refuse a place that cannot be written before minutes are spent on a program."""
    if out.exists() and not out.is_dir():
        raise ArtifactError(f"{out} is a file", expected="a folder or a free name", hint="choose another name")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise ArtifactError(f"{out} is not empty", hint="choose another folder, or pass --overwrite")
    if not (out / MANIFEST_NAME).is_file():
        raise ArtifactError(
            f"{out} is not an artifact and is not replaced",
            expected=MANIFEST_NAME,
            received=min(p.name for p in out.iterdir()),
            hint="choose another folder, or empty this one yourself",
        )
