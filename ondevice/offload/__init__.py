"""Train models larger than the accelerator: layers, gradients and states use host and disk too.

The package is also the function `ondevice.offload(model, ...)`; see `ondevice.api.offload`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

FUNCTION = "ondevice.api.offload:offload"
"""The entry point of the function."""


class _Callable(ModuleType):
    """A module that can be called: the name of the room is the name of the function."""

    def __call__(self, model: Any, optimizer: Any = "adamw", **settings: Any) -> Any:
        """See `ondevice.api.offload.offload`."""
        module, _, name = FUNCTION.partition(":")
        return getattr(importlib.import_module(module), name)(model, optimizer, **settings)


sys.modules[__name__].__class__ = _Callable
