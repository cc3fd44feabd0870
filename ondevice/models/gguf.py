"""GGUF files: metadata to `config.json`, tensors dequantised one at a time to float32 safetensors.

transformers reads GGUF too, but holds the whole model twice, reads the metadata three times, and drops a
`rope_freqs` tensor in silence; it is used here for the tokenizer only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import sha256_file
from ondevice.core.errors import ModelError
from ondevice.models.base import Family, ModelDims
from ondevice.models.cache import missing, progress
from ondevice.models.registry import family_for_gguf

if TYPE_CHECKING:
    from gguf import GGUFReader

_TOKEN_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "padding_token_id",
}


def read_gguf_dims(path: Path) -> tuple[ModelDims, type[Family]]:
    """Read the dimensions in a GGUF file's metadata and its family; no tensor is read.

    Raises:
        ModelError: the file is damaged, no GGUF, or of a family that is not supported.
    """
    reader = _open(path)
    family = family_for_gguf(_field(reader, "general.architecture", path), path.name)
    return family.dims_from_config(_config(reader, family, path), str(path)), family


def convert_gguf(path: Path, folder: Path) -> dict[str, Any]:
    """Write configuration, `model.safetensors` (float32) and tokenizer of a GGUF file to `folder`.

    Returns:
        The record's origin: file name, bytes, SHA-256 and licence.

    Raises:
        ModelError: as `read_gguf_dims`, or a tensor is missing, of another shape, or of an unknown type.
    """
    reader = _open(path)
    family = family_for_gguf(_field(reader, "general.architecture", path), path.name)
    config = _config(reader, family, path)
    dims = family.dims_from_config(config, str(path))
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in _TOKEN_IDS if key in config}
    _write_json(folder / "generation_config.json", ids)
    _write_weights(reader, family, dims, path, folder / "model.safetensors")
    _write_tokenizer(path, folder)
    licence = _optional(reader, "general.license")
    origin = {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    return origin | ({"license": licence} if licence else {})


def _open(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise missing("gguf") from None
    if not path.is_file():
        raise ModelError(f"{path} does not exist", expected="a .gguf file")
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ModelError(
            f"{path} is damaged or no GGUF file",
            expected="GGUF version 2 or 3",
            received=str(error),
            hint="fetch it again",
        ) from None


_OWN = ("rope.freq_base", "rope.dimension_count", "attention.head_count_kv", "vocab_size")
"""Keys of transformers' table that need more than a new name."""


def _optional(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _field(reader: GGUFReader, key: str, path: Path) -> Any:
    value = _optional(reader, key)
    if value is None:
        raise ModelError(f"{path}: metadata lacks '{key}'", expected=key, hint="convert it with a recent llama.cpp")
    return value


def _config(reader: GGUFReader, family: type[Family], path: Path) -> dict[str, Any]:
    prefix = family.gguf_architecture

    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    def need(key: str) -> Any:
        return _field(reader, f"{prefix}.{key}", path)

    names = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
    if "rope_freqs.weight" in names:
        message = f"{path}: the rotary embedding's frequencies were changed by hand (tensor rope_freqs)"
        raise ModelError(message, expected="a model without rope_freqs", hint="use the original safetensors model")
    if _optional(reader, f"{prefix}.expert_count"):
        raise ModelError(f"{path}: is a mixture of experts", expected="a dense model")
    hidden, heads = need("embedding_length"), need("attention.head_count")
    kv_heads = _optional(reader, f"{prefix}.attention.head_count_kv") or heads
    rotated = _optional(reader, f"{prefix}.rope.dimension_count")
    head_dim = _optional(reader, f"{prefix}.attention.key_length") or rotated or hidden // heads
    if rotated not in (None, head_dim):
        raise ModelError(f"{path}: rotates only a part of each head", expected=head_dim, received=rotated)
    # The size of the vocabulary is the embedding's: the tokenizer's list may be shorter.
    if "token_embd.weight" not in names:
        raise ModelError(f"{path} lacks a tensor", expected="token_embd.weight")
    config = {
        "architectures": [f"{family.model_type.capitalize()}ForCausalLM"],
        "model_type": family.model_type,
        "dtype": "float32",
        "hidden_act": "silu",
        **{
            name: _short(need(key))
            for key, name in GGUF_CONFIG_MAPPING[str(prefix)].items()
            if name and key not in _OWN
        },
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": names["token_embd.weight"][0],
        "rope_parameters": _rope(reader, prefix, path),
        "tie_word_embeddings": "output.weight" not in names,
    }
    if "blk.0.attn_q.bias" in names:
        config["attention_bias"] = True
    if "blk.0.ffn_up.bias" in names:
        config["mlp_bias"] = True
    for key, stored in _TOKEN_IDS.items():
        value = _optional(reader, f"tokenizer.ggml.{stored}")
        if value is not None:
            config[key] = value
    return config


def _rope(reader: GGUFReader, prefix: str | None, path: Path) -> dict[str, Any]:
    theta = _optional(reader, f"{prefix}.rope.freq_base") or 10000.0
    rope = {"rope_theta": _short(theta), "rope_type": "default"}
    kind = _optional(reader, f"{prefix}.rope.scaling.type") or "none"
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        expected = "none, linear or yarn"
        raise ModelError(f"{path}: scaling of the rotary embedding", expected=expected, received=kind)
    rope |= {"rope_type": kind, "factor": _short(_field(reader, f"{prefix}.rope.scaling.factor", path))}
    original = _optional(reader, f"{prefix}.rope.scaling.original_context_length")
    return rope | ({"original_max_position_embeddings": original} if original else {})


def _short(value: Any) -> Any:
    """Convert a float32 of the metadata to the decimal number it was written as: 9.9999997e-06 is 1e-05."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _write_weights(reader: GGUFReader, family: type[Family], dims: ModelDims, path: Path, out: Path) -> None:
    from gguf import dequantize

    shapes = family.weight_shapes(dims)
    names = _names(family, dims, shapes)
    tensors = {names.get(tensor.name, tensor.name): tensor for tensor in reader.tensors}
    for name in shapes.keys() - tensors.keys():
        raise ModelError(f"{path} lacks a tensor", expected=name, hint="fetch it again")
    for name in tensors.keys() - shapes.keys():
        raise ModelError(f"{path} has a tensor that a {family.model_type} model has not", received=name)
    with (
        progress(f"converting {path.name} to float32", 4 * dims.parameters) as advance,
        open(out, "wb") as file,
    ):
        # Sizes are known from the configuration, so the header comes first and one tensor is in memory at a time.
        file.write(_safetensors_header(shapes))
        for name, shape in shapes.items():
            tensor = tensors[name]
            try:
                weights = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
                message = f"{path}: tensor '{tensor.name}' is of an unknown quantisation"
                raise ModelError(message, received=kind, hint="use Q4_0 to Q8_0, a K-quant, F16, BF16 or F32") from None
            if weights.shape != shape:
                raise ModelError(f"{path}: tensor '{tensor.name}'", expected=shape, received=weights.shape)
            weights = np.ascontiguousarray(family.gguf_tensor(name, weights, dims), dtype="<f4")
            file.write(weights.data)
            advance(weights.nbytes)


def _names(family: type[Family], dims: ModelDims, shapes: Iterable[str]) -> dict[str, str]:
    """Map GGUF's name of each of transformers' tensors to the latter, by the tables of the `gguf` package."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == family.gguf_architecture)
    table = get_tensor_name_map(architecture, dims.layers)
    return {table.get_name(name, (".weight", ".bias")) or name: name for name in shapes}


def _safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tokenizer(path: Path, folder: Path) -> None:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing("transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # whatever transformers raises about a tokenizer that it cannot read
        message = f"{path}: its tokenizer cannot be read"
        raise ModelError(
            message, received=f"{type(error).__name__}: {error}", hint="use a safetensors model"
        ) from error


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
