"""A loaded model that predicts the next token, and keeps keys and values between calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ArtifactError
from ondevice.models import LoadedModel

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.artifact.adapter import Adapter


class TorchModel:
    """A `TokenModel` in PyTorch.

    Attributes:
        context_tokens: most positions of the model; 0 for no limit.
        piece_tokens: the same, because all that `feed` is given is one pass.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.context_tokens = loaded.dims.max_positions
        self.piece_tokens = self.context_tokens
        self._cache: Any = None
        self._ids: list[int] = []
        self._applied = ExitStack()
        self._adapter: Adapter | None = None

    def use(self, adapter: Adapter | None) -> None:
        """Generate with another adapter from now on, or without one.

        Raises:
            ArtifactError: it belongs to another model; the previous one stays.
        """
        previous = self._adapter
        try:
            self._apply(adapter)
        except ArtifactError:
            self._apply(previous)
            raise

    def _apply(self, adapter: Adapter | None) -> None:
        from ondevice.nn.adapters import adapted

        self._applied.close()
        if adapter is not None:
            self._applied.enter_context(adapted(self.loaded, adapter))
        self._adapter = adapter

    def rewind(self, tokens: int) -> int:
        """Forget every token: a prefix that is read in other pieces would have other last bits."""
        self._cache = None
        self._ids = []
        return 0

    def feed(self, ids: Sequence[int]) -> Tensor:
        """Read the next tokens; return the logits of the one after them, float32 [vocab]."""
        import torch

        model: Any = self.loaded.model
        self._ids += ids
        # A model without keys and values, such as Mamba, reads all tokens again.
        unread = self._ids if self._cache is None else list(ids)
        row = torch.tensor([unread], device=self.loaded.family.head_weight.device)
        with torch.no_grad():
            output = model(row, past_key_values=self._cache, use_cache=True)
        self._cache = getattr(output, "past_key_values", None)
        return output.logits[0, -1].float().cpu()
