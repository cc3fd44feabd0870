"""Rounded base weights (`method.base`): what refuses them, and their rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.core.capabilities import Asked
    from ondevice.core.config import FrozenBaseConfig
    from ondevice.models import LoadedModel


def refuse(asked: Asked[Any]) -> None:
    """See `capabilities.Refuses`: a model without a GGUF form, or not in float32."""
    if asked.config.base:
        _rounding().check_rounds(asked.dims, asked.dtype, asked.model)


def round_base(loaded: LoadedModel, config: FrozenBaseConfig) -> None:
    """Round a session's model in place, if its settings say so; errors are those of `check_rounds`."""
    if config.base:
        _rounding().round_base(loaded, config.base)


def _rounding() -> Any:
    """Return the module that rounds; it loads what writes GGUF files, which few runs need."""
    from ondevice.models import rounded

    return rounded


def problems(config: FrozenBaseConfig) -> list[str]:
    """Return what an artifact, whose weights are packed in its own way, has against the settings."""
    if config.base:
        return [f"method.base is {config.base}: an artifact has weights of its own, null"]
    return []
