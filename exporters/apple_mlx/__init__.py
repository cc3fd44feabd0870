"""Target `apple-mlx`: stage functions for MLX, on a Mac, an iPhone, or MLX's CPU backend."""

from ondevice.core.target import TargetSpec

TARGET = TargetSpec(
    name="apple-mlx",
    package=__name__,
    summary="A Mac or an iPhone, MLX functions and their order",
    kind="mlx",
    runtime="mlx",
    exporter=".target:AppleMlx",
    dtype=lambda model: model.dtype,
    needs=("mlx",),
)
