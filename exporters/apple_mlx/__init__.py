"""Target `apple-mlx`: stage functions for MLX, on a Mac, an iPhone, or MLX's CPU backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.target import TargetSpec

if TYPE_CHECKING:
    from ondevice.exporters.apple_mlx.target import AppleMlx


def exporter() -> type[AppleMlx]:
    """Return the target's code."""
    from ondevice.exporters.apple_mlx.target import AppleMlx

    return AppleMlx


TARGET = TargetSpec(
    name="apple-mlx",
    summary="A Mac or an iPhone, MLX functions and their order",
    kind="mlx",
    runtime="mlx",
    exporter=exporter,
    dtype=lambda model: model.dtype,
    needs=("mlx",),
)
