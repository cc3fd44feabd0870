"""The metadata of a GGUF file as the fields of `config.json`, read and written.

What only one family has is in its own file. llama.cpp knows some traits by the architecture (each
fourth layer of `smollm3` is not rotated); those are transformers' defaults too. The keys are
constants of the `gguf` package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ModelError
from ondevice.gguf.metadata import Metadata, short_float
from ondevice.gguf.names import architecture_of

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from ondevice.core.dims import ModelDims
    from ondevice.gguf.family import GGUFFamily

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
ARCHITECTURES = (
    "gemma3", "gemma4", "granite", "granitemoe", "lfm2", "lfm2moe", "llama", "olmo2", "phi3", "qwen2", "qwen2moe",
    "qwen3", "qwen35", "qwen3moe", "smollm3",
)  # fmt: skip
"""Those whose block the keys here describe in full. An adapter needs only names, and goes with
every one."""
SCALINGS = ("linear", "yarn", "longrope")
"""Scalings of the rotary embedding that have keys. Llama 3's is only in the divisors of the
frequencies, and so is `proportional`'s."""
NOT_TURNED = 1e30
"""What divides the frequency of a pair that is not rotated."""
LOW = 1.0
HIGH = 4.0
"""`low_freq_factor` and `high_freq_factor` of every published Llama 3.1 and later."""


def read_config(data: Metadata, family: type[GGUFFamily]) -> dict[str, Any]:
    """Build the `config.json` of a GGUF file.

    Raises:
        ModelError: a key is missing, or has a value that the family does not support.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # The embedding has the size of the vocabulary: the tokenizer's list may be shorter.
    if "token_embd.weight" not in data.shapes:
        raise ModelError(f"missing tensor in {data.path}", expected="token_embd.weight")
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
    width = config["head_dim"]  # of layers that see all, if a family has others
    config |= family.gguf_config(data, config)
    if rotated not in (None, width) and "partial_rotary_factor" not in config:
        message = f"{data.path}: rotates only part of each head"
        raise ModelError(message, expected=width, received=rotated)
    if data.get("expert_count") and "num_experts" not in config:
        raise ModelError(
            f"{data.path}: is a mixture of experts", expected=f"a dense {family.model_type} model"
        )
    return config


def check_writable(family: type[GGUFFamily], dims: ModelDims, model: str) -> None:
    """Check that the keys describe the blocks of `model`; no weight is read.

    Raises:
        ModelError: names the architecture, or the scaling of the rotary embedding.
    """
    architecture = architecture_of(family, dims)
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{model} cannot become a merged GGUF file",
            expected=", ".join(ARCHITECTURES),
            received=architecture,
            hint="--to gguf-lora, next to a GGUF file of the base model",
        )
    family.gguf_keys(dims, {})
    scalings = ("default", "llama3", "proportional", *SCALINGS)
    if dims.rope_type not in scalings:
        raise ModelError(
            f"{model}: scaling of the rotary embedding",
            expected=", ".join(scalings),
            received=dims.rope_type,
        )


def write_config(
    writer: GGUFWriter, family: type[GGUFFamily], dims: ModelDims, config: dict[str, Any]
) -> None:
    """Add the keys that tell llama.cpp what to compute: sizes, norms, rotary embedding, experts."""
    own = family.gguf_keys(dims, config)
    # If llama.cpp has no window, the file limits the context to where both compute the same.
    windows = dims.traits.windows
    if own.get("attention.sliding_window"):
        windows = ()
    values = {
        "vocab_size": dims.vocab,
        "context_length": min((dims.max_positions, *filter(None, windows))),
        "embedding_length": dims.hidden,
        "block_count": dims.layers,
        "feed_forward_length": int(config.get("intermediate_size", dims.intermediate)),
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
        "attention.layer_norm_rms_epsilon": float(dims.norm_eps),
        "rope.dimension_count": dims.traits.rotary_width or dims.head_dim,
        "rope.freq_base": float(dims.rope_theta),
    }
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if dims.rope_type in ("linear", "yarn"):
        values |= {
            "rope.scaling.type": dims.rope_type,
            "rope.scaling.factor": float(rope["factor"]),
        }
        if original := rope.get("original_max_position_embeddings"):
            values["rope.scaling.original_context_length"] = int(original)
    for key, value in (values | own).items():
        name = f"{writer.arch}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


def rope_divisors(model: Any, dims: ModelDims) -> dict[str, np.ndarray]:
    """Return what llama.cpp divides each rotary frequency by, float32 [rotated / 2], by tensor.

    Llama 3's scaling has one such tensor, `proportional` one for layers that see all, longrope one
    for short and one for long contexts.
    """
    if dims.rope_type == "proportional":
        rope = model.config.rope_parameters["full_attention"]
        width = dims.head_width(dims.layers - 1)
        divisors = np.full(width // 2, NOT_TURNED, np.float32)
        divisors[: int(rope.get("partial_rotary_factor", 1.0) * width // 2)] = 1.0
        return {"rope_freqs.weight": divisors}
    if dims.rope_type == "longrope":
        rope = model.config.rope_parameters
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if dims.rope_type != "llama3":
        return {}
    rotary = model.model.rotary_emb  # has one table for each kind of layer, or one for all
    used: Any = getattr(rotary, "full_attention_inv_freq", None)
    if used is None:
        used = rotary.inv_freq
    plain = dims.rope_theta ** (-np.arange(0, dims.head_dim, 2) / dims.head_dim)
    return {"rope_freqs.weight": (plain / used.double().numpy()).astype(np.float32)}


def _rope(data: Metadata) -> dict[str, Any]:
    rope = {"rope_theta": data.get("rope.freq_base", 10000.0), "rope_type": "default"}
    if "rope_freqs.weight" in data.shapes:
        return _llama3(data, rope)
    kind = data.get("rope.scaling.type", "none")
    if "rope_factors_long.weight" in data.shapes:
        kind = "longrope"
    if kind == "none":
        return rope
    if kind not in SCALINGS:
        raise ModelError(
            f"{data.path}: scaling of the rotary embedding",
            expected=", ".join(("none", *SCALINGS)),
            received=kind,
        )
    if kind == "longrope":  # its factors are tensors, read by a family that supports it
        return rope | {"rope_type": kind}
    rope |= {"rope_type": kind, "factor": data.need("rope.scaling.factor")}
    original = data.get("rope.scaling.original_context_length")
    if original:
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3(data: Metadata, rope: dict[str, Any]) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling from the divisors of the frequencies: the file has
    only those.

    The largest divisor is the factor. The model was first trained with a context length that is a
    power of two: the one that yields every divisor.
    """
    divisors = data.vector("rope_freqs.weight").astype(np.float64)
    width = 2 * len(divisors)
    factor = float(divisors.max())
    if set(divisors) <= {1.0, float(np.float32(NOT_TURNED))} and factor > 1.0:
        part = float((divisors == 1.0).mean())
        return rope | {"rope_type": "proportional", "partial_rotary_factor": part}
    if factor == divisors.min() == 1.0:
        return rope
    wave = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    for original in (8192, *(2**power for power in range(4, 21))):
        smooth = np.clip((original / wave - LOW) / (HIGH - LOW), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-5):
            return rope | {
                "rope_type": "llama3",
                "factor": short_float(factor),
                "low_freq_factor": LOW,
                "high_freq_factor": HIGH,
                "original_max_position_embeddings": original,
            }
    raise ModelError(
        f"{data.path}: unknown scaling of the rotary frequencies (tensor rope_freqs)",
        expected="no rope_freqs, or those of Llama 3's scaling",
        hint="use the original safetensors model",
    )
