"""GGUF files: metadata to `config.json`, tensors dequantised one at a time to float32 safetensors.

transformers reads GGUF too, but holds the whole model twice, knows fewer families, drops scalings of the rotary
embedding and factors in silence, and makes another tokenizer in each of its versions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import sha256_file
from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.core.untrusted.gguf_header import check_gguf
from ondevice.gguf.config import TOKEN_IDS, Metadata, read_config
from ondevice.gguf.names import gguf_parts
from ondevice.models.dims import dims_of
from ondevice.models.families.base import Family
from ondevice.models.registry import family_for_gguf
from ondevice.models.sources.cache import missing, progress

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are fields of the configuration in transformers."""
_AGAIN = "fetch it again"


def read_gguf_dims(path: Path) -> tuple[ModelDims, type[Family]]:
    """Read the dimensions in a GGUF file's metadata and its family; no tensor is read.

    Raises:
        ModelError: the file is damaged, no GGUF, or of a family that is not supported.
    """
    data = Metadata(_open(path), path)
    family = family_for_gguf(data.architecture, path.name)
    return dims_of(family, read_config(data, family), str(path)), family


def convert_gguf(path: Path, folder: Path) -> dict[str, Any]:
    """Write configuration, `model.safetensors` (float32) and tokenizer of a GGUF file to `folder`.

    Returns:
        The record's origin: file name, bytes, SHA-256 and licence.

    Raises:
        ModelError: as `read_gguf_dims`, or a tensor is missing, of another shape, or of an unknown type.
    """
    from ondevice.gguf.read_tokenizer import (
        write_tokenizer,
    )  # no run but a conversion has use for it

    reader = _open(path)
    data = Metadata(reader, path)
    family = family_for_gguf(data.architecture, path.name)
    config = read_config(data, family)
    dims = dims_of(family, config, str(path))
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in TOKEN_IDS if key in config}
    _write_json(folder / "generation_config.json", ids)
    _write_weights(reader, family, dims, path, folder / "model.safetensors")
    write_tokenizer(data, config, folder)
    licence = data.optional("general.license")
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
        check_gguf(path)
        return GGUFReader(path)
    except (OSError, ValueError, LookupError, OverflowError, TypeError) as error:
        raise ModelError(
            f"{path} is damaged or no GGUF file",
            expected="GGUF version 2 or 3",
            received=str(error),
            hint="fetch it again",
        ) from None


def _write_weights(
    reader: GGUFReader, family: type[Family], dims: ModelDims, path: Path, out: Path
) -> None:

    shapes = family.weight_shapes(dims)
    parts = gguf_parts(family, dims, list(shapes), family.gguf_architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name not in _ROPE}
    for name, found in parts.items():
        if missing_parts := [part for part in found if part not in tensors]:
            raise ModelError(
                f"{path} lacks a tensor",
                expected=name,
                received=f"no {missing_parts[0]}",
                hint=_AGAIN,
            )
    for name in tensors.keys() - {part for found in parts.values() for part in found}:
        raise ModelError(
            f"{path} has a tensor that a {family.model_type} model has not", received=name
        )

    with (
        progress(f"converting {path.name} to float32", 4 * dims.parameters) as advance,
        open(out, "wb") as file,
    ):
        # Sizes are known from the configuration, so the header comes first and one tensor is in memory at a time.
        file.write(_safetensors_header(shapes))
        for name, shape in shapes.items():
            found = [_dequantised(tensors[part], path) for part in parts[name]]
            weights = found[0] if len(found) == 1 else np.concatenate(found, axis=1)
            if weights.shape != shape:
                stored = ", ".join(parts[name])
                raise ModelError(
                    f"{path}: tensor '{stored}'", expected=shape, received=weights.shape
                )
            weights = np.ascontiguousarray(family.gguf_tensor(name, weights, dims), dtype="<f4")
            file.write(weights.data)
            advance(weights.nbytes)


def _dequantised(tensor: ReaderTensor, path: Path) -> np.ndarray:
    from gguf import dequantize

    try:
        weights = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = getattr(tensor.tensor_type, "name", tensor.tensor_type)
        message = f"{path}: tensor '{tensor.name}' is of an unknown quantisation"
        hint = "use Q4_0 to Q8_0, a K-quant, an IQ-quant, F16, BF16 or F32"
        raise ModelError(message, received=kind, hint=hint) from None
    # llama.cpp keeps a row for one output as a vector.
    return (
        weights[None]
        if tensor.name.endswith("ffn_gate_inp_shexp.weight") and weights.ndim == 1
        else weights
    )


def _safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
