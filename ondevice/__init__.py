"""Fine-tune language models where the data lives.

The public names below are imported when they are first used, so `import ondevice` loads no framework.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.api.artifacts import export, export_each
    from ondevice.api.benchmarks import benchmark
    from ondevice.api.judging import evaluate, replay
    from ondevice.api.opening import open_artifact, read_dataset
    from ondevice.api.runfile import RunConfig
    from ondevice.api.training import run_artifact, train
    from ondevice.api.verifying import verify
    from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
    from ondevice.artifact.manifest import read_manifest
    from ondevice.errors import OndeviceError
    from ondevice.methods.registry import method_config, open_session
    from ondevice.models import load_model
    from ondevice.models.generate import generate
    from ondevice.plan.doctor import doctor
    from ondevice.plan.estimate import plan
    from ondevice.train.fuse import apply_adapter, fuse

_WHERE = {
    "Adapter": "artifact.adapter",
    "OndeviceError": "errors",
    "RunConfig": "api.runfile",
    "apply_adapter": "train.fuse",
    "benchmark": "api.benchmarks",
    "doctor": "plan.doctor",
    "evaluate": "api.judging",
    "export": "api.artifacts",
    "export_each": "api.artifacts",
    "fuse": "train.fuse",
    "generate": "models.generate",
    "load_adapter": "artifact.adapter",
    "load_model": "models",
    "method_config": "methods.registry",
    "open_artifact": "api.opening",
    "open_session": "methods.registry",
    "plan": "plan.estimate",
    "read_dataset": "api.opening",
    "read_manifest": "artifact.manifest",
    "replay": "api.judging",
    "run_artifact": "api.training",
    "save_adapter": "artifact.adapter",
    "train": "api.training",
    "verify": "api.verifying",
}

__all__ = [
    "Adapter",
    "OndeviceError",
    "RunConfig",
    "apply_adapter",
    "benchmark",
    "doctor",
    "evaluate",
    "export",
    "export_each",
    "fuse",
    "generate",
    "load_adapter",
    "load_model",
    "method_config",
    "open_artifact",
    "open_session",
    "plan",
    "read_dataset",
    "read_manifest",
    "replay",
    "run_artifact",
    "save_adapter",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ondevice' has no attribute '{name}'")
    return getattr(importlib.import_module(f"ondevice.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _CallablePackage(ModuleType):
    """A package with the name of a public function (`train`, `plan`): calling it calls the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return __getattr__(self.__name__.rpartition(".")[2])(*args, **options)


class _Package(ModuleType):
    """Once a package is imported, Python binds its name here, over the public function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _WHERE and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
