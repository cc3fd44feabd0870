"""Targets `jetson` and `cuda-server`: PyTorch on an NVIDIA GPU, with weights packed beforehand,
pins and a launcher."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ondevice.core.target import TargetSpec
from ondevice.exporters.cuda.pins import JETPACK_6, JETPACK_7, SERVER, Platform, requirements

if TYPE_CHECKING:
    from ondevice.exporters.cuda.target import Cuda


def exporter() -> type[Cuda]:
    """Return the target's code."""
    from ondevice.exporters.cuda.target import Cuda

    return Cuda


SERVER_TARGET = TargetSpec(
    name="cuda-server",
    summary="Linux with an NVIDIA GPU, PyTorch as for jetson",
    kind="torch",
    runtime="torch",
    exporter=exporter,
    dtype=lambda model: model.dtype if "dtype" in model.model_fields_set else "bfloat16",
    needs=("torch-cuda", "transformers", "bitsandbytes"),
    uses=("peft",),
    data=Platform({"requirements.txt": requirements(SERVER)}),
)
JETSON = replace(
    SERVER_TARGET,
    name="jetson",
    summary="NVIDIA Jetson, PyTorch with NF4, INT8 or bfloat16 weights",
    uses=("peft", "unified-memory", "board", "swap", "power-mode", "clocks"),
    data=Platform(
        {
            "requirements-jetpack6.txt": requirements(JETPACK_6, wheels=False),
            "requirements-jetpack7.txt": requirements(JETPACK_7),
        },
        memory_limit="6GiB",  # of an 8 GB board
        caveats=(
            "It was checked on the exporting machine, in PyTorch on the CPU; this project has not run on a Jetson",
        ),
    ),
)
TARGETS = (JETSON, SERVER_TARGET)
