"""Which packages of kernels can be used here."""

from __future__ import annotations

import importlib.util


def has_liger(device: str) -> bool:
    """Return True if liger-kernel is installed and `device` is a GPU."""
    return device.startswith("cuda") and importlib.util.find_spec("liger_kernel") is not None
