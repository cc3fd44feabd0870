"""Fine-tune language models where the data lives.

The public names below are imported when they are first used, so `import ondevice` loads no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ondevice.core.process import wait_asleep

if TYPE_CHECKING:
    from ondevice.api.benchmark import benchmark
    from ondevice.api.evaluate import evaluate
    from ondevice.api.export import export, export_each
    from ondevice.api.offload import offload
    from ondevice.api.open import open_artifact
    from ondevice.api.plan import plan
    from ondevice.api.predict import predict
    from ondevice.api.replay import replay
    from ondevice.api.runfile import RunConfig
    from ondevice.api.train import run_artifact, train
    from ondevice.api.trainer import offloaded
    from ondevice.api.verify import verify
    from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
    from ondevice.artifact.manifest import read_manifest
    from ondevice.core.errors import OndeviceError
    from ondevice.core.registry import method_config, open_session
    from ondevice.data import read_dataset
    from ondevice.exits import convert
    from ondevice.generation.generator import generate
    from ondevice.models import load_model
    from ondevice.models.sources.memory import wrap_model
    from ondevice.nn.adapters import apply_adapter
    from ondevice.planning.doctor import doctor
    from ondevice.training.fuse import fuse
    from ondevice.training.options import Callback
    from ondevice.training.result import Trained

wait_asleep()
__version__: str
"""The installed version."""

_WHERE = {
    "Adapter": "artifact.adapter",
    "Callback": "training.options",
    "OndeviceError": "core.errors",
    "RunConfig": "api.runfile",
    "Trained": "training.result",
    "apply_adapter": "nn.adapters",
    "benchmark": "api.benchmark",
    "convert": "exits",
    "doctor": "planning.doctor",
    "evaluate": "api.evaluate",
    "export": "api.export",
    "export_each": "api.export",
    "fuse": "training.fuse",
    "generate": "generation.generator",
    "load_adapter": "artifact.adapter",
    "load_model": "models",
    "method_config": "core.registry",
    "offload": "api.offload",
    "offloaded": "api.trainer",
    "open_artifact": "api.open",
    "open_session": "core.registry",
    "plan": "api.plan",
    "predict": "api.predict",
    "read_dataset": "data",
    "read_manifest": "artifact.manifest",
    "replay": "api.replay",
    "run_artifact": "api.train",
    "save_adapter": "artifact.adapter",
    "train": "api.train",
    "verify": "api.verify",
    "wrap_model": "models.sources.memory",
}

__all__ = [
    "Adapter",
    "Callback",
    "OndeviceError",
    "RunConfig",
    "Trained",
    "apply_adapter",
    "benchmark",
    "convert",
    "doctor",
    "evaluate",
    "export",
    "export_each",
    "fuse",
    "generate",
    "load_adapter",
    "load_model",
    "method_config",
    "offload",
    "offloaded",
    "open_artifact",
    "open_session",
    "plan",
    "predict",
    "read_dataset",
    "read_manifest",
    "replay",
    "run_artifact",
    "save_adapter",
    "train",
    "verify",
    "wrap_model",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("ondevice.core.process").own_version()
    if name not in _WHERE:
        raise AttributeError(f"module 'ondevice' has no attribute '{name}'")
    return getattr(importlib.import_module(f"ondevice.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
