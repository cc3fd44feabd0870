"""GGUF files of tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ondevice.models import LoadedModel
from ondevice.models.tiny import SPECIAL_TOKENS

if TYPE_CHECKING:
    from gguf import GGUFWriter


LLAMA_CPP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""As llama.cpp writes them, spelled out here: the package reads them by the tables of `gguf`."""


def _interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """Permute as llama.cpp's converter does q and k of the llama architecture."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path, loaded: LoadedModel, kind: str | list[str] = "F32", **changes: object
) -> Path:
    """A GGUF file of a tiny model; `changes` replace or (with None) drop metadata, `tensors` adds tensors.

    Args:
        kind: of every matrix; or of the blocks' matrices in turn.
    """
    from gguf import GGUFWriter

    dims, arch = loaded.dims, loaded.dims.family
    extra = changes.pop("tensors", {})
    meta = {
        "block_count": dims.layers,
        "context_length": dims.max_positions,
        "embedding_length": dims.hidden,
        "feed_forward_length": dims.intermediate,
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.layer_norm_rms_epsilon": dims.norm_eps,
        "rope.dimension_count": dims.head_dim,
        "rope.freq_base": dims.rope_theta,
    } | changes
    writer = GGUFWriter(str(path), str(meta.pop("arch", arch)))
    writer.add_name("tiny")
    for key, value in meta.items():
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    letters = bytes_to_unicode()
    tokens = [*(letters[byte] for byte in range(256)), *SPECIAL_TOKENS, "ab"]
    tokens += [f"<unused{i}>" for i in range(dims.vocab - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    )
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    writer.add_pad_token_id(256)
    names, matrices = LLAMA_CPP_NAMES, 0
    for name in loaded.family.weight_shapes(dims):
        weights = loaded.model.get_parameter(name).detach().numpy()
        module, _, leaf = name.rpartition(".")
        parts = module.split(".")
        short = names[".".join(parts[3:])] if parts[1:2] == ["layers"] else names[module]
        if arch == "llama" and short in ("attn_q", "attn_k"):
            weights = _interleave(weights, dims.heads if short == "attn_q" else dims.kv_heads)
        prefix = f"blk.{parts[2]}." if parts[1:2] == ["layers"] else ""
        own = kind if isinstance(kind, str) else kind[matrices % len(kind)] if prefix else "F32"
        matrices += bool(prefix) and weights.ndim == 2
        _add(writer, f"{prefix}{short}.{leaf}", weights, own if weights.ndim == 2 else "F32")
    for name, weights in extra.items():
        _add(writer, name, weights, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, name: str, weights: np.ndarray, kind: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

    quantisation = GGMLQuantizationType[kind]
    try:
        data = np.ascontiguousarray(weights) if kind == "F32" else quantize(weights, quantisation)
    except (
        NotImplementedError
    ):  # a kind that the package reads and does not write: any bytes are numbers
        count, size = GGML_QUANT_SIZES[quantisation]
        bytes_ = weights.shape[-1] // count * size
        data = np.random.default_rng(0).integers(
            0, 60, (*weights.shape[:-1], bytes_), dtype=np.uint8
        )
    writer.add_tensor(name, data, raw_dtype=quantisation)
