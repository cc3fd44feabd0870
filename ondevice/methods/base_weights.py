"""Rounded base weights (`method.base`): what refuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.core.capabilities import Asked
    from ondevice.core.config import FrozenBaseConfig


def refuse(asked: Asked[Any]) -> None:
    """See `capabilities.Refuses`: a model without a GGUF form, or not in float32."""
    if asked.config.base:
        from ondevice.models.rounded import check_rounds  # loads what computes

        check_rounds(asked.dims, asked.dtype, asked.model)


def problems(config: FrozenBaseConfig) -> list[str]:
    """Return what an artifact, whose weights are packed in its own way, has against the settings."""
    if config.base:
        return [f"method.base is {config.base}: an artifact has weights of its own, null"]
    return []
