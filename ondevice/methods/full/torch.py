"""Full fine-tuning in eager PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.methods.adamw_session import AdamWSession

if TYPE_CHECKING:
    from ondevice.models import LoadedModel


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> AdamWSession:
    """Open a session; the model is computed on its own device."""
    return AdamWSession(loaded, dict(loaded.model.named_parameters()), config)
