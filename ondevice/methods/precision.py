"""Precisions of weights: those that are not trained, and rounded base weights (`method.base`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from ondevice.core.capabilities import Asked
    from ondevice.core.config import FrozenBaseConfig
    from ondevice.models import LoadedModel


def refuse_float16() -> None:
    """Raise ConfigError: the range of float16 is too small for gradients and moments."""
    raise ConfigError(
        "float16 weights are not trained: gradients below 6e-8 and moments vanish in it",
        expected="model.dtype bfloat16 or float32",
        received="float16",
        hint="--dtype bfloat16 takes the same memory for weights",
    )


def refuse_base(asked: Asked[Any]) -> None:
    """See `capabilities.Refuses`: a model without the form that is rounded to, or not in float32."""
    if asked.config.base:
        _rounding().check_rounds(asked.dims, asked.dtype, asked.model, asked.config.base)


def round_base(loaded: LoadedModel, base: str) -> None:
    """Round a session's model in place, as `method.base` says; errors are those of `check_rounds`."""
    _rounding().round_base(loaded, base)


def _rounding() -> Any:
    """Return the module that rounds; it loads what writes such files, which few runs need."""
    from ondevice.models import rounded

    return rounded


def base_problems(config: FrozenBaseConfig) -> list[str]:
    """Return what an artifact, whose weights are packed in its own way, has against the settings."""
    if config.base:
        return [f"method.base is {config.base}: an artifact has weights of its own, null"]
    return []
