"""Precisions that weights cannot be trained in."""

from __future__ import annotations

from ondevice.core.errors import ConfigError


def refuse_float16() -> None:
    """Raise ConfigError: the range of float16 is too small for gradients and moments."""
    raise ConfigError(
        "float16 weights are not trained: gradients below 6e-8 and moments vanish in it",
        expected="model.dtype bfloat16 or float32",
        received="float16",
        hint="--dtype bfloat16 takes the same memory for weights",
    )
