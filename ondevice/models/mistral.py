"""`mistral`: Mistral 7B and Mistral Nemo. Their GGUF files name the architecture `llama` and load as that family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ModelError
from ondevice.models.base import Family, ModelDims, decoder_dims, read_size
from ondevice.models.llama import Llama

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

WINDOW = 4096
"""Transformers' own default where `config.json` does not say; null there is no window."""


class Mistral(Family):
    """Llama's block without biases; within the sliding window its attention is the causal one.

    `dims.max_positions` is the window where that is shorter than what the model was trained for.
    """

    model_type = "mistral"
    gguf_written_as = "llama"

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        dims = decoder_dims("mistral", config, where, qkv_bias=False, o_bias=False, mlp_bias=False)
        window = _window(config, where)
        return dims if window is None else replace(dims, max_positions=min(dims.max_positions, window))

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Lay out as the llama architecture does, by whose name the files go."""
        return Llama.gguf_tensor(name, weights, dims)

    def positions(self, length: int, device: torch.device | str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what `Family.positions` does.

        Raises:
            ModelError: `length` exceeds the sliding window, where attention would no longer be causal alone.
        """
        window = self.model.config.sliding_window
        if window is not None and length > window:
            raise ModelError(
                "the sequence is longer than the model's sliding window of attention",
                expected=f"at most {window} tokens",
                received=f"{length} tokens",
                hint=f"set data.max_length_tokens to {window} or less",
            )
        return super().positions(length, device, dtype)


def _window(config: dict[str, Any], where: str) -> int | None:
    value = config.get("sliding_window", WINDOW)
    return None if value is None else read_size(config, "sliding_window", where, WINDOW)


FAMILY = Mistral
