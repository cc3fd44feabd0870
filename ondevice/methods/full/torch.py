"""Full fine-tuning in eager PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.methods.first_order import FirstOrderSession

if TYPE_CHECKING:
    from ondevice.models import LoadedModel


def open_session(loaded: LoadedModel, config: Any, seed: int) -> FirstOrderSession:
    """The registry's door to this method; `seed` is not used, as nothing is drawn."""
    return FirstOrderSession(loaded, dict(loaded.model.named_parameters()), config)
