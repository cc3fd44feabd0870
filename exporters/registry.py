"""Targets by name; a target's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from ondevice.errors import ConfigError
from ondevice.exporters.base import Exporter

TARGETS = {
    "android-cpu": ("ondevice.exporters.executorch.targets.android_cpu", "Android or any CPU, ExecuTorch with XNNPACK"),
    "android-npu": ("ondevice.exporters.executorch.targets.android_npu", "Android with a Qualcomm NPU, through QNN"),
    "jetson": ("ondevice.exporters.cuda.targets.jetson", "NVIDIA Jetson, PyTorch with NF4, INT8 or bfloat16 weights"),
    "cuda-server": ("ondevice.exporters.cuda.targets.cuda_server", "Linux with an NVIDIA GPU, PyTorch as for jetson"),
    "apple-mlx": ("ondevice.exporters.mlx.targets.apple_mlx", "A Mac or an iPhone, MLX functions and their order"),
}


def exporter(target: str) -> Exporter:
    """The exporter of `target`.

    Raises:
        ConfigError: for a name that is no target.
    """
    if target not in TARGETS:
        raise ConfigError(f"unknown target '{target}'", expected=", ".join(TARGETS), received=target)
    return importlib.import_module(TARGETS[target][0]).Target()
