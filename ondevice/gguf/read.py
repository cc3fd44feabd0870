"""Read GGUF files: check them, dequantise their tensors, write those as float32 safetensors.

transformers reads GGUF too, but holds the whole model twice, knows fewer families, silently drops
factors and scalings of the rotary embedding, and builds a different tokenizer in each of its
versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ModelError
from ondevice.core.untrusted.gguf_header import check_gguf
from ondevice.gguf.names import from_gguf, gguf_package, gguf_parts, gguf_shape, joined
from ondevice.gguf.quants import check_types

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

    from ondevice.core.dims import ModelDims
    from ondevice.gguf.family import GGUFFamily

_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that transformers keeps as fields of the configuration."""


def open_gguf(path: Path) -> GGUFReader:
    """Check a GGUF file's header and open it; no tensor is read.

    Raises:
        ModelError: the file is missing or damaged, or is not a GGUF file, or has a type of tensors
            that is newer than the package `gguf`.
    """
    gguf = gguf_package()
    if not path.is_file():
        raise ModelError(f"{path} does not exist", expected="a .gguf file")
    try:
        types = check_gguf(path)
        known = {int(kind) for kind in gguf.GGMLQuantizationType}
        if not types - known:
            return read_fields(path)
    except (OSError, ValueError, LookupError, OverflowError, TypeError) as error:
        raise ModelError(
            f"{path} is damaged or not a GGUF file",
            expected="GGUF version 2 or 3",
            received=str(error),
            hint="download it again",
        ) from None
    raise ModelError(
        f"{path}: the installed package gguf does not know a tensor's type",
        expected="one of its GGMLQuantizationType",
        received=f"type {min(types - known)}",
        hint="pip install -U gguf, or use a file of another quantisation",
    )


def read_fields(path: Path) -> GGUFReader:
    """Open a GGUF file that was just written or checked."""
    from ondevice.gguf.reader import QuickReader

    return QuickReader(path)


def write_safetensors(
    reader: GGUFReader,
    family: type[GGUFFamily],
    dims: ModelDims,
    path: Path,
    out: Path,
    advance: Callable[[int], None],
) -> None:
    """Write every tensor of a GGUF file, in float32, to the safetensors file `out`.

    Args:
        path: of the GGUF file, for errors.
        advance: takes the number of bytes just written.

    Raises:
        ModelError: a tensor is missing or unexpected, or has a wrong shape or an unknown type.
    """
    shapes = family.weight_shapes(dims)
    parts = gguf_parts(family, dims, family.gguf_architecture)
    tensors = {tensor.name: tensor for tensor in reader.tensors if tensor.name not in _ROPE}
    for name, stored in parts.items():
        if absent := [part for part in stored if part not in tensors]:
            raise ModelError(
                f"missing tensor in {path}",
                expected=name,
                received=f"no {absent[0]}",
                hint="download it again",
            )
    for name in tensors.keys() - {part for stored in parts.values() for part in stored}:
        raise ModelError(
            f"{path}: a {family.model_type} model does not have this tensor", received=name
        )
    check_types(((name, tensor.tensor_type) for name, tensor in tensors.items()), path)

    with open(out, "wb") as file:
        # The configuration tells the sizes, so the header comes first and one tensor is in memory
        # at a time.
        file.write(_safetensors_header(shapes))
        for name, shape in shapes.items():
            weights = stored_weight(tensors, parts[name])
            if weights.shape != gguf_shape(shape):
                raise ModelError(
                    f"{path}: tensor '{', '.join(parts[name])}'",
                    expected=shape,
                    received=weights.shape,
                )
            weights = np.ascontiguousarray(from_gguf(family, name, weights, dims), dtype="<f4")
            file.write(weights.data)
            advance(weights.nbytes)


def stored_weight(tensors: dict[str, ReaderTensor], parts: tuple[str, ...]) -> np.ndarray:
    """Dequantise a tensor of a readable type and join its parts; its layout is still the file's."""
    return joined([_dequantised(tensors[part]) for part in parts])


def _dequantised(tensor: ReaderTensor) -> np.ndarray:
    from gguf import dequantize

    weights = dequantize(np.array(tensor.data), tensor.tensor_type)
    # llama.cpp stores a matrix with a single output as a vector.
    if tensor.name.endswith("ffn_gate_inp_shexp.weight") and weights.ndim == 1:
        return weights[None]
    return weights


def _safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
