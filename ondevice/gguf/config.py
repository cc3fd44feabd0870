"""The metadata of a GGUF file as the fields of `config.json`; what one family alone has is read in its own file.

llama.cpp knows some traits by the architecture alone (every fourth layer of `smollm3` is not rotated), and those are
transformers' defaults too. The keys are the constants of the `gguf` package.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader

    from ondevice.models.families.base import Family

SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
TOKEN_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}
LOW, HIGH = 1.0, 4.0
"""`low_freq_factor` and `high_freq_factor` of every published Llama 3.1 and later."""


class Metadata:
    """Keys and tensors of an open GGUF file.

    Attributes:
        path: names it in errors.
        shapes: of each tensor by GGUF's name, in numpy's order.
    """

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self.path = path
        self._reader = reader
        self.shapes = {
            tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors
        }
        self.architecture = str(self.general("general.architecture"))

    def general(self, key: str) -> Any:
        """Return the value of a key; ModelError if it is not there."""
        if (value := self.optional(key)) is None:
            hint = "convert it with a recent llama.cpp"
            raise ModelError(f"{self.path}: metadata lacks '{key}'", expected=key, hint=hint)
        return value

    def optional(self, key: str) -> Any:
        """Return the value of a key, or None; floats are the decimal numbers that they were written as."""
        field = self._reader.get_field(key)
        try:
            return None if field is None else _short(field.contents())
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self.path}: metadata '{key}' is not UTF-8", received=str(error)
            ) from None

    def need(self, key: str) -> Any:
        """Return the value of the architecture's key; ModelError if it is not there."""
        return self.general(f"{self.architecture}.{key}")

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of the architecture's key, or `otherwise`."""
        value = self.optional(f"{self.architecture}.{key}")
        return otherwise if value is None else value

    def vector(self, name: str) -> np.ndarray:
        """Return a float32 tensor."""
        return np.array(
            next(tensor.data for tensor in self._reader.tensors if tensor.name == name), np.float32
        )


def read_config(data: Metadata, family: type[Family]) -> dict[str, Any]:
    """Build the `config.json` of a GGUF file.

    Raises:
        ModelError: a key is missing, or has a value that the family does not do.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # The size of the vocabulary is the embedding's: the tokenizer's list may be shorter.
    if "token_embd.weight" not in data.shapes:
        raise ModelError(f"{data.path} lacks a tensor", expected="token_embd.weight")
    sizes = {name: data.need(key) for key, name in SIZES.items()}
    heads = sizes["num_attention_heads"]
    rotated = data.get("rope.dimension_count")
    config = {
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]],
        "model_type": family.model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        **sizes,
        "num_key_value_heads": data.get("attention.head_count_kv", heads),
        "head_dim": data.get("attention.key_length") or rotated or sizes["hidden_size"] // heads,
        "vocab_size": data.shapes["token_embd.weight"][0],
        "rope_parameters": _rope(data),
        "tie_word_embeddings": "output.weight" not in data.shapes,
    }
    if "blk.0.attn_q.bias" in data.shapes:
        config["attention_bias"] = True
    if "blk.0.ffn_up.bias" in data.shapes:
        config["mlp_bias"] = True
    for key, stored in TOKEN_IDS.items():
        value = data.optional(f"tokenizer.ggml.{stored}")
        if value is not None:
            config[key] = value
    config |= family.gguf_config(data, config)
    if rotated not in (None, config["head_dim"]) and "partial_rotary_factor" not in config:
        message = f"{data.path}: rotates only a part of each head"
        raise ModelError(message, expected=config["head_dim"], received=rotated)
    if data.get("expert_count") and "num_experts" not in config:
        raise ModelError(
            f"{data.path}: is a mixture of experts", expected=f"a dense {family.model_type} model"
        )
    return config


def _rope(data: Metadata) -> dict[str, Any]:
    rope = {"rope_theta": data.get("rope.freq_base", 10000.0), "rope_type": "default"}
    if "rope_freqs.weight" in data.shapes:
        return _llama3(data, rope)
    kind = (
        "longrope"
        if "rope_factors_long.weight" in data.shapes
        else data.get("rope.scaling.type", "none")
    )
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn", "longrope"):
        message = f"{data.path}: scaling of the rotary embedding"
        raise ModelError(message, expected="none, linear, yarn or longrope", received=kind)
    if kind == "longrope":  # its factors are tensors, which a family that has it reads
        return rope | {"rope_type": kind}
    rope |= {"rope_type": kind, "factor": data.need("rope.scaling.factor")}
    original = data.get("rope.scaling.original_context_length")
    return rope | ({"original_max_position_embeddings": original} if original else {})


def _llama3(data: Metadata, rope: dict[str, Any]) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling by the divisors of the frequencies, which is all that the file has.

    The largest divisor is the factor. The length that the model was first trained with is a power of two, and is
    taken where it gives every divisor.
    """
    divisors = data.vector("rope_freqs.weight").astype(np.float64)
    width, factor = 2 * len(divisors), float(divisors.max())
    if factor == divisors.min() == 1.0:
        return rope
    wave = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    for original in (8192, *(2**power for power in range(4, 21))):
        smooth = np.clip((original / wave - LOW) / (HIGH - LOW), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-5):
            found = {"factor": _short(factor), "low_freq_factor": LOW, "high_freq_factor": HIGH}
            return (
                rope | found | {"rope_type": "llama3", "original_max_position_embeddings": original}
            )
    message = (
        f"{data.path}: the rotary embedding's frequencies were changed by hand (tensor rope_freqs)"
    )
    hint = "use the original safetensors model"
    raise ModelError(message, expected="no rope_freqs, or those of Llama 3's scaling", hint=hint)


def _short(value: Any) -> Any:
    """Convert a float32 of the metadata to the decimal number it was written as: 9.9999997e-06 is 1e-05."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
