"""The keys of a GGUF file that say what llama.cpp computes: sizes, norms, rotary embedding, experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ModelError
from ondevice.core.untrusted import read_object
from ondevice.exits.gguf_names import architecture_of
from ondevice.models import read_dims
from ondevice.models.registry import family_for

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from ondevice.exits.base import Request
    from ondevice.models import LoadedModel

ARCHITECTURES = (
    "gemma3", "granite", "llama", "olmo2", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3",
)  # fmt: skip
"""Those whose block these keys describe in full; an adapter alone needs only names, and goes with every one."""
_ROPE_TYPES = ("default", "linear", "llama3", "longrope", "yarn")
_FILE_TYPES = {
    "float32": "ALL_F32",
    "float16": "MOSTLY_F16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}


def check_writable(model: str, revision: str | None) -> None:
    """Refuse a model whose block the keys here do not describe; no weight is read.

    Raises:
        ModelError: names the family, or the rotary embedding's scaling.
    """
    dims = read_dims(model, revision)
    family = family_for(dims.family, model)
    architecture = architecture_of(family, dims)
    if architecture not in ARCHITECTURES:
        hint = "--to gguf-lora, beside a GGUF file of the base model"
        expected = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"a merged GGUF file of {model}", expected=expected, received=architecture, hint=hint
        )
    family.gguf_keys(dims, {})
    if dims.rope_type not in _ROPE_TYPES:
        raise ModelError(
            f"{model}: the rotary embedding",
            expected=", ".join(_ROPE_TYPES),
            received=dims.rope_type,
        )


def write_metadata(writer: GGUFWriter, loaded: LoadedModel, request: Request) -> None:
    """Add the keys of a merged model to `writer`."""
    from gguf import GGML_QUANT_VERSION, GGUFType, LlamaFileType

    dims, config = loaded.dims, loaded.model.config
    writer.add_type(GGUFType.MODEL)
    writer.add_name(request.out.stem)
    writer.add_base_model_count(1)
    writer.add_base_model_name(0, loaded.source.source)
    if licence := _licence(loaded):
        writer.add_license(licence)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_file_type(int(LlamaFileType[_FILE_TYPES[request.dtype]]))
    writer.add_vocab_size(dims.vocab)
    keys = type(loaded.family).gguf_keys(dims, config.to_dict())
    # Where llama.cpp has no window, the file says how far both compute the same.
    windows = () if keys.get("attention.sliding_window") else dims.traits.windows
    writer.add_context_length(min((dims.max_positions, *filter(None, windows))))
    writer.add_embedding_length(dims.hidden)
    writer.add_block_count(dims.layers)
    writer.add_feed_forward_length(int(getattr(config, "intermediate_size", dims.intermediate)))
    writer.add_head_count(dims.heads)
    writer.add_head_count_kv(dims.kv_heads)
    writer.add_key_length(dims.head_dim)
    writer.add_value_length(dims.head_dim)
    writer.add_layer_norm_rms_eps(dims.norm_eps)
    writer.add_rope_dimension_count(dims.traits.rotary_width or dims.head_dim)
    writer.add_rope_freq_base(dims.rope_theta)
    _add_scaling(writer, config, dims.rope_type)
    for key, value in keys.items():
        name = f"{writer.arch}.{key}"
        if isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)


def rope_factors(loaded: LoadedModel) -> dict[str, np.ndarray]:
    """Return what llama.cpp divides each rotary frequency by, float32 [rotated / 2], by tensor: for Llama 3's scaling
    one, for longrope one of short and one of long contexts."""
    model: Any = loaded.model
    if loaded.dims.rope_type == "longrope":
        rope = model.config.rope_parameters
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if loaded.dims.rope_type != "llama3":
        return {}
    rotary = model.model.rotary_emb  # which has one table for each kind of layer, or one for all
    dims = loaded.dims
    used: Any = getattr(rotary, "full_attention_inv_freq", None)
    used = rotary.inv_freq if used is None else used
    plain = dims.rope_theta ** (-np.arange(0, dims.head_dim, 2) / dims.head_dim)
    return {"rope_freqs.weight": (plain / used.double().numpy()).astype(np.float32)}


def _add_scaling(writer: GGUFWriter, config: Any, rope_type: str) -> None:
    from gguf import RopeScalingType

    if rope_type not in ("linear", "yarn"):
        return
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_scaling_type(RopeScalingType(rope_type))
    writer.add_rope_scaling_factor(float(rope["factor"]))
    if original := rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(int(original))


def _licence(loaded: LoadedModel) -> str | None:
    """Return the licence that a converted model's record names."""
    record = None if loaded.source.path is None else loaded.source.path / "ondevice-model.json"
    if record is None or not record.is_file():
        return None
    origin = read_object(record, ModelError).get("origin", {})
    return origin.get("licence") or origin.get("license")
