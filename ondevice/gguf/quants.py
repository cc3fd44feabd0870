"""Quantised types of GGUF files: which of them are read, who writes them, what a mixture gives each
tensor, and how far each rounds.

The `gguf` package reads nearly all types and writes the simple ones. K-quants are written by
llama.cpp's own function, as the package `xllamacpp` holds it, so that the bits are
`llama-quantize`'s.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import MissingPackageError, ModelError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

FLOATS = {"float32": "F32", "float16": "F16"}
BLOCK = 32
"""Numbers that share a scale in the simple types."""
MIXTURES = {"q4_k_m": "q4_k", "q5_k_m": "q5_k", "q6_k": "q6_k"}
"""The K-quants that can be asked for, and the type of most of their matrices."""
K_QUANTS = ("q4_k", "q5_k", "q6_k")
K_BLOCK = 256
_FALLBACK = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
"""llama-quantize's choice for rows that are not a multiple of `K_BLOCK`."""
_HEADS = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
_FLOAT32 = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d")
"""Parts of the names of matrices that stay in float32: a router's, a convolution's."""
_FINER = ((".attn_v.weight", ".attn_qkv.weight"), (".ffn_down",))
"""Parts of the names of matrices that a mixture keeps in 6 bits in half of the layers; the places of
each group are counted together."""
_EIGHT = 8
"""Experts of a model whose small matrices of the attention llama-quantize keeps finer."""
_CHUNK_NUMBERS = 1 << 20


def ggml_type(dtype: str) -> GGMLQuantizationType:
    """Return GGUF's type for a name such as `q8_0`, `q4_k` or `float16`."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[FLOATS.get(dtype, dtype.upper())]


def file_type(dtype: str) -> int:
    """Return `general.file_type` of a file whose matrices were asked for in `dtype`."""
    from gguf import LlamaFileType

    prefix = "MOSTLY"
    if dtype == "float32":
        prefix = "ALL"
    return int(LlamaFileType[f"{prefix}_{FLOATS.get(dtype, dtype.upper())}"])


def types_of(shapes: Mapping[str, tuple[int, ...]], requested: str) -> dict[str, str]:
    """Return the type of every tensor of a file by GGUF's name.

    Vectors, routers and convolutions stay in float32. Rows of incomplete blocks have a simpler
    type, or float16. The rest has the requested type, but for embedding and head, which are `q8_0`
    with `q4_0`; a mixture has llama-quantize's types.

    Args:
        shapes: by name, the last dimension being a row.
    """
    mixed: dict[str, str] = {}
    if requested in MIXTURES:
        mixed = _mixture(shapes, requested)
    return {name: _type_of(name, shape, requested, mixed) for name, shape in shapes.items()}


def _type_of(name: str, shape: tuple[int, ...], requested: str, mixed: Mapping[str, str]) -> str:
    if len(shape) < 2 or requested == "float32" or any(part in name for part in _FLOAT32):
        return "float32"
    if requested == "float16":
        return "float16"
    kind = mixed.get(name, requested)
    if name in _HEADS and requested not in MIXTURES:
        kind = "q8_0"
    if kind in K_QUANTS and shape[-1] % K_BLOCK:
        kind = _FALLBACK[kind]
    if shape[-1] % BLOCK:
        return "float16"
    return kind


def _mixture(shapes: Mapping[str, tuple[int, ...]], requested: str) -> dict[str, str]:
    """Return the types that llama-quantize gives each matrix, if its rows are whole blocks.

    Only its exception for models of 70 billion parameters is left out.
    """
    kinds = dict.fromkeys(shapes, MIXTURES[requested])
    heads = ["output.weight"]
    if heads[0] not in shapes:  # the embedding is the head, too
        heads = [name for name in _HEADS if name in shapes]
    kinds |= dict.fromkeys(heads, "q6_k")
    for parts in _FINER:
        own = [name for name in shapes if any(part in name for part in parts)]
        layers = sorted({_layer(name) for name in own})
        for name in own:
            if _has_more_bits(layers.index(_layer(name)), len(layers)):
                kinds[name] = "q6_k"
    experts = {shape[0] for name, shape in shapes.items() if "ffn_down_exps" in name}
    if experts == {_EIGHT}:
        for name in shapes:
            if ".attn_v.weight" in name or ".attn_k.weight" in name:
                kinds[name] = "q8_0"
            elif ".attn_output.weight" in name and requested == "q4_k_m":
                kinds[name] = "q5_k"
    return kinds


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def _has_more_bits(layer: int, layers: int) -> bool:
    """Return True for the layers that llama-quantize keeps finer: the ends, and every third."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def quantised(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 [..., n] as a file has it in `dtype`: its numbers, or bytes [..., stored].

    Raises:
        MissingPackageError: llama.cpp's function for K-quants is not here.
    """
    from gguf import quantize

    value = np.ascontiguousarray(value, np.float32)
    if dtype in K_QUANTS:
        return _by_llama_cpp(value, dtype)
    return quantize(value, ggml_type(dtype))


def rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 of the same shape: what a reader of a file in `dtype` gets."""
    from gguf import dequantize

    return dequantize(quantised(value, dtype), ggml_type(dtype))


def check_writer(dtype: str) -> None:
    """Refuse a mixture that nothing installed can write, with MissingPackageError."""
    if dtype in MIXTURES and _ggml_quantize() is None:
        raise MissingPackageError(
            f"only llama.cpp writes {dtype}",
            expected="the package xllamacpp, with the function ggml_quantize_chunk",
            received="it is not here",
            hint="pip install xllamacpp; or --dtype q8_0 or q4_0, and `llama-quantize` itself",
        )


def _by_llama_cpp(value: np.ndarray, dtype: str) -> np.ndarray:
    from gguf.quants import quant_shape_to_byte_shape

    check_writer(next(name for name in MIXTURES if MIXTURES[name] == dtype))
    function: Any = _ggml_quantize()
    kind = ggml_type(dtype)
    stored = quant_shape_to_byte_shape(value.shape, kind)
    columns = value.shape[-1]
    out = np.empty((value.size // columns, stored[-1]), np.uint8)
    rows = value.reshape(-1, columns)
    step = max(1, _CHUNK_NUMBERS // columns)

    def convert(start: int) -> int:
        part = rows[start : start + step]
        target = out[start : start + step]
        return function(
            int(kind), part.ctypes.data, target.ctypes.data, 0, len(part), columns, None
        )

    # The function is slow (some 10 million numbers a second), and leaves Python's lock.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        written = sum(threads.map(convert, range(0, len(rows), step)))
    if written != out.nbytes:
        raise ModelError(
            f"llama.cpp's {dtype} has another size", expected=out.nbytes, received=written
        )
    return out.reshape(stored)


@functools.cache
def _ggml_quantize() -> Any:
    """Return ggml's `ggml_quantize_chunk` from the package `xllamacpp`, or None.

    The package has no Python name for it; its library exports ggml's public functions (but not on
    Windows).
    """
    found = importlib.util.find_spec("xllamacpp")
    folders = (found and found.submodule_search_locations) or ()
    for folder in folders:
        for library in sorted(Path(folder).glob("xllamacpp*.so")):
            try:
                function = ctypes.CDLL(str(library)).ggml_quantize_chunk
            except (OSError, AttributeError):
                continue
            pointer, count = ctypes.c_void_p, ctypes.c_int64
            function.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
            function.restype = ctypes.c_size_t
            return function
    return None


def check_types(types: Iterable[tuple[str, Any]], path: Path) -> None:
    """Refuse tensors of a type that cannot be read, before any is.

    Args:
        types: names of tensors, each with its type.
        path: of the file, for errors.

    Raises:
        ModelError: names the tensor and its type.
    """
    for name, kind in types:
        if not _is_readable(kind):
            raise ModelError(
                f"{path}: unknown quantisation of tensor '{name}'",
                received=getattr(kind, "name", kind),
                hint="use Q4_0 to Q8_0, a K-quant, an IQ-quant, F16, BF16 or F32",
            )


@functools.cache
def _is_readable(kind: GGMLQuantizationType) -> bool:
    from gguf import GGML_QUANT_SIZES, dequantize

    block_bytes = GGML_QUANT_SIZES[kind][1]
    try:
        dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
