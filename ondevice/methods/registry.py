"""Methods by name: their configuration, and the module that opens an eager session."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ondevice.config import Section
from ondevice.errors import ConfigError
from ondevice.methods.full.config import FullConfig
from ondevice.methods.lora.config import LoraConfig, LoraFaConfig
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.mezo.config import MezoConfig
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.slideformer.config import SlideformerConfig

if TYPE_CHECKING:
    from ondevice.methods.session import Session
    from ondevice.models import LoadedModel

CONFIGS: dict[str, type[Section]] = {
    "prge": PrgeConfig,
    "mezo": MezoConfig,
    "lora": LoraConfig,
    "lora-fa": LoraFaConfig,
    "full": FullConfig,
    "slideformer": SlideformerConfig,
    "lsp": LspConfig,
}
MODULES = {
    "prge": "prge.session",
    "mezo": "mezo.torch",
    "lora": "lora.torch",
    "lora-fa": "lora.torch",
    "full": "full.torch",
    "slideformer": "slideformer.torch",
    "lsp": "lsp.torch",
}
OFFLOADING = ("slideformer", "lsp")
"""Methods with an engine of their own: they load the model on the host, and compute on a device that they are told."""
RANKED = ("slideformer",)
"""Methods that several processes can train together, under `torchrun`."""

MethodConfig = Annotated[
    PrgeConfig | MezoConfig | LoraConfig | LoraFaConfig | FullConfig | SlideformerConfig | LspConfig,
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


def open_session(loaded: LoadedModel, config: Any, seed: int, device: str | None = None) -> Session:
    """An eager session of the method that `config` names; changes `loaded.model` in place.

    Args:
        device: where an offloading method computes; None is where the model is. Other methods take the model's.
    """
    module = importlib.import_module(f"ondevice.methods.{MODULES[config.name]}")
    if config.name in OFFLOADING:
        return module.open_session(loaded, config, seed, device or str(loaded.family.head_weight.device))
    return module.open_session(loaded, config, seed)
