"""The platforms of the two targets, and the versions that an artifact asks for on each.

PYTHON are the versions this artifact's check ran with, so that the same numbers come out, and those
of the daemon (the extra `serve`), as the package itself is installed without its dependencies. What
a platform installs in its own way (torch and bitsandbytes on JetPack 6) is said in its file
instead.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """Differences between the targets for CUDA.

    Attributes:
        requirements: requirements files by name.
        memory_limit: the launcher's `--memory-limit`, unless another is given.
        caveats: of an artifact, because an export cannot try the platform.
    """

    requirements: dict[str, str]
    memory_limit: str | None = None
    caveats: tuple[str, ...] = ()


PYTHON = {
    "transformers": "5.23.0",
    "tokenizers": "0.23.3",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "safetensors": "0.8.0",
    "numpy": "2.4.6",
    "pydantic": "2.14.3",
    "PyYAML": "6.0.3",
    "typer": "0.29.2",
    "rich": "15.0.0",
    "psutil": "7.2.2",
    "gguf": "0.19.0",
    "fastapi": "0.165.0",
    "uvicorn": "0.54.0",
    "sse-starlette": "3.7.0",
    "prometheus-client": "0.26.0",
}
TORCH = "2.15.0"
BITSANDBYTES = "0.50.2"

JETPACK_6 = f"""# JetPack 6 (L4T R36, CUDA 12.6). Its own Python is 3.10 and this package needs 3.11 or newer: use
# NVIDIA's container for integrated GPUs, pytorch:25.06-py3-igpu from NGC, which has Python 3.12 and PyTorch built for
# JetPack:
#
#     docker run --runtime nvidia -it --network host -v $PWD:/work IMAGE
#
# torch is the container's and must not be replaced: the wheels of PyPI are for server boards. For the same reason
# bitsandbytes is built on the board; its wheel imports, and ends at the first kernel (bitsandbytes #1930).
#
#     pip install -r requirements-jetpack6.txt
#     CMAKE_ARGS="-DCOMPUTE_BACKEND=cuda -DCOMPUTE_CAPABILITY=87" pip install --no-deps --no-binary bitsandbytes \\
#         "bitsandbytes @ git+https://github.com/bitsandbytes-foundation/bitsandbytes@{BITSANDBYTES}"
#     pip install --no-deps ondevice-train       # or the wheel that you built: it asks for a newer torch
#     ondevice doctor --target jetson
"""
JETPACK_7 = """# JetPack 7 (L4T R38 and R39, CUDA 13, Python 3.12). Its CUDA is that of servers, so PyPI has its wheels.
#
# In /opt, because the service of `ondevice serve install` sees no home folder.
#
#     sudo apt-get install python3-venv
#     sudo python3 -m venv /opt/ondevice
#     sudo /opt/ondevice/bin/pip install -r requirements-jetpack7.txt
#     sudo /opt/ondevice/bin/pip install --no-deps ondevice-train       # or the wheel that you built
#     . /opt/ondevice/bin/activate
#     ondevice doctor --target jetson
"""
SERVER = """# Linux with an NVIDIA GPU and a driver for CUDA 13.
#
#     pip install -r requirements.txt
#     pip install --no-deps ondevice-train
#     ondevice doctor --target cuda-server
"""


def requirements(head: str, wheels: bool = True) -> str:
    """Return a requirements file under its instructions; without `wheels` torch and bitsandbytes
    are installed apart."""
    pins = PYTHON
    if wheels:
        pins = {"torch": TORCH, "bitsandbytes": BITSANDBYTES} | PYTHON
    return head + "".join(f"{name}=={version}\n" for name, version in pins.items())
