"""`mistral`: Mistral 7B and Mistral Nemo; their GGUF files load as `llama`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.traits import BlockTraits
from ondevice.models.families.configuration import decoder_dims, read_size
from ondevice.models.families.llama import Llama
from ondevice.models.families.traited import TraitFamily

if TYPE_CHECKING:
    import numpy as np

WINDOW = 4096
"""The default of transformers if `config.json` has no field; null means no window."""


class Mistral(TraitFamily):
    """Llama's block without biases, and with a sliding window."""

    model_type = "mistral"
    gguf_written_as = "llama"

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Undo the reordering of q and k, as for Llama, whose name these files have."""
        return Llama.gguf_tensor(name, weights, dims)

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        layers = read_size(config, "num_hidden_layers", where)
        window = _window(config, where)
        positions = read_size(config, "max_position_embeddings", where, 2048)
        # A window that no sequence reaches hides nothing.
        windows = () if window is None or window >= positions else (window,) * layers
        traits = BlockTraits(windows=windows)
        return decoder_dims(
            "mistral", config, where, qkv_bias=False, o_bias=False, mlp_bias=False, traits=traits
        )


def _window(config: dict[str, Any], where: str) -> int | None:
    value = config.get("sliding_window", WINDOW)
    if value is None:
        return None
    return read_size(config, "sliding_window", where, WINDOW)


FAMILY = Mistral
