"""Methods by name: their configuration, and the module that opens an eager session."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from ondevice.config import Section
from ondevice.errors import ConfigError, MissingPackageError
from ondevice.methods.full.config import FullConfig
from ondevice.methods.lora.config import LoraConfig, LoraFaConfig
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.mezo.config import MezoConfig
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.revffn.config import RevffnConfig
from ondevice.methods.slideformer.config import SlideformerConfig

if TYPE_CHECKING:
    from ondevice.methods.session import Session
    from ondevice.models import LoadedModel, ModelFiles

CONFIGS: dict[str, type[Section]] = {
    "prge": PrgeConfig,
    "mezo": MezoConfig,
    "lora": LoraConfig,
    "lora-fa": LoraFaConfig,
    "full": FullConfig,
    "slideformer": SlideformerConfig,
    "lsp": LspConfig,
    "mesp": MespConfig,
    "revffn": RevffnConfig,
}
MODULES = {
    "prge": "prge.session",
    "mezo": "mezo.torch",
    "lora": "lora.torch",
    "lora-fa": "lora.torch",
    "full": "full.torch",
    "slideformer": "slideformer.torch",
    "lsp": "lsp.torch",
    "mesp": "mesp.torch",
    "revffn": "revffn.torch",
}
MLX_MODULES = {"mesp": "mesp.mlx"}
"""Methods that also run in MLX, and the module that opens their session."""
OFFLOADING = ("slideformer", "lsp")
"""Methods with an engine of their own: they load the model on the host, and compute on a device that they are told."""
PLACED = ("mesp",)
"""Methods whose sessions are told a device, and bring there what is not yet there."""
RANKED = ("slideformer",)
"""Methods that several processes can train together, under `torchrun`."""

Backend = Literal["torch", "mlx"]
MethodConfig = Annotated[
    PrgeConfig
    | MezoConfig
    | LoraConfig
    | LoraFaConfig
    | FullConfig
    | SlideformerConfig
    | LspConfig
    | MespConfig
    | RevffnConfig,
    Field(discriminator="name"),
]
"""Any method's settings; `name` says which."""


def method_config(name: str, values: dict[str, Any] | None = None) -> Any:
    """The settings of method `name` with `values` over the defaults.

    Raises:
        ConfigError: for an unknown method or key.
    """
    if name not in CONFIGS:
        raise ConfigError(f"unknown method '{name}'", expected=", ".join(CONFIGS), received=name)
    return CONFIGS[name].parse({**(values or {}), "name": name}, "method")


def backend_for(config: Any, backend: str) -> Backend:
    """`torch` or `mlx` for a method's settings and `train.backend`; `auto` takes MLX on a Mac with Metal.

    Raises:
        ConfigError: MLX is asked for and the method has no part in it.
    """
    if backend == "mlx" and config.name not in MLX_MODULES:
        raise ConfigError(
            f"method {config.name} does not run in MLX",
            expected=f"--backend torch, or one of these methods: {', '.join(MLX_MODULES)}",
            received="--backend mlx",
        )
    if backend != "auto":
        return "mlx" if backend == "mlx" else "torch"
    return "mlx" if config.name in MLX_MODULES and metal() else "torch"


@cache
def metal() -> bool:
    """Whether this is a Mac with MLX and Metal."""
    if sys.platform != "darwin" or importlib.util.find_spec("mlx") is None:
        return False
    return bool(importlib.import_module("mlx.core").metal.is_available())


def reads_files(config: Any) -> bool:
    """Whether a torch session of these settings reads the weights itself: it takes `ModelFiles`."""
    return getattr(config, "weights", None) == "streamed"


def home_of(config: Any, device: str) -> str:
    """Where torch loads the model: on the host for methods that move or quantise it themselves."""
    return "cpu" if config.name in OFFLOADING or getattr(config, "bits", None) else device


def open_session(
    loaded: LoadedModel | ModelFiles, config: Any, seed: int, device: str | None = None, backend: str = "torch"
) -> Session:
    """An eager session of the method that `config` names; changes `loaded.model` in place.

    Args:
        loaded: a model with its weights; `ModelFiles` for MLX, and for torch where `reads_files` says so.
        device: where torch computes, for methods that offload, stream or quantise; None is where the model is.
            Other methods take the model's.
        backend: `torch` or `mlx`, from `backend_for`.

    Raises:
        MissingPackageError: the framework is not installed.
    """
    if backend == "mlx":
        if importlib.util.find_spec("mlx") is None:
            raise MissingPackageError("mlx is not installed", hint="pip install 'ondevice-train[mlx]'")
        return importlib.import_module(f"ondevice.methods.{MLX_MODULES[config.name]}").open_session(
            loaded, config, seed
        )
    module = importlib.import_module(f"ondevice.methods.{MODULES[config.name]}")
    if config.name in OFFLOADING:
        return module.open_session(loaded, config, seed, device or str(cast(Any, loaded).family.head_weight.device))
    if config.name in PLACED:
        return module.open_session(loaded, config, seed, device)
    return module.open_session(loaded, config, seed)
