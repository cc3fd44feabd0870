"""Answers of a model, without and with an adapter; the model of the last question stays loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_loaded: dict[str, Any] = {}


def answer(
    model: str,
    adapter: str | None,
    prompt: str | list[dict[str, str]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, Any]:
    """The base model's answer, and the adapter's beside it where one is named.

    Args:
        model: a source string.
        adapter: a folder.
        prompt: text, or the messages of a chat.
    """
    from ondevice.api.opening import resolve_device
    from ondevice.artifact.adapter import load_adapter
    from ondevice.models import load_model
    from ondevice.models.generate import generate
    from ondevice.train.fuse import apply_adapter

    if _loaded.get("model") != model:
        _loaded.clear()
        _loaded.update(model=model, loaded=load_model(model, device=resolve_device("auto")))
    loaded = _loaded["loaded"]
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    found: dict[str, Any] = {"base": generate(loaded, prompt, **options), "adapted": None}
    if adapter is not None:
        before = {
            (layer, target): loaded.family.linear(layer, target)
            for layer in range(loaded.dims.layers)
            for target in loaded.family.linear_targets
        }
        try:
            apply_adapter(loaded, load_adapter(Path(adapter)))
            found["adapted"] = generate(loaded, prompt, **options)
        finally:
            for (layer, target), linear in before.items():
                loaded.family.set_linear(layer, target, linear)
    return found
