"""Target `jetson`: a board whose CPU and GPU share a small memory."""

from __future__ import annotations

from typing import ClassVar

from ondevice.exporters.cuda.pins import JETPACK_6, JETPACK_7, requirements
from ondevice.exporters.cuda.target import CudaTarget


class Target(CudaTarget):
    """`jetson`: pins for JetPack 6 and 7; the launcher keeps within 6 GiB of an 8 GB board."""

    name = "jetson"
    requirements: ClassVar[dict[str, str]] = {
        "requirements-jetpack6.txt": requirements(JETPACK_6, wheels=False),
        "requirements-jetpack7.txt": requirements(JETPACK_7),
    }
    memory_limit = "6GiB"
    caveats = ("It was checked where it was exported, in PyTorch on the CPU; this project has not run on a Jetson",)
