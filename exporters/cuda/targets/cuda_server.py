"""Target `cuda-server`: any Linux machine with an NVIDIA GPU of its own."""

from __future__ import annotations

from typing import ClassVar

from ondevice.exporters.cuda.pins import SERVER, requirements
from ondevice.exporters.cuda.target import CudaTarget


class Target(CudaTarget):
    """`cuda-server`."""

    name = "cuda-server"
    requirements: ClassVar[dict[str, str]] = {"requirements.txt": requirements(SERVER)}
