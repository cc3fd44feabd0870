"""`gguf`: base plus adapter as one file for llama.cpp, LM Studio, Jan and others: weights, tokenizer, chat template.

Matrices have the type that was asked for, vectors and a mixture's routers stay in float32. With `q4_0` the embedding
and the output head are `q8_0`: they are read once a token, and 4 bits hurt them most.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import storage_errors
from ondevice.core.dims import ModelDims
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import check_merged, merge
from ondevice.exits.gguf_file import BLOCK, ggml_type, write_gguf
from ondevice.exits.gguf_metadata import check_writable, rope_factors, write_metadata
from ondevice.exits.gguf_names import architecture_of, to_gguf
from ondevice.exits.gguf_tokenizer import write_tokenizer
from ondevice.gguf.names import gguf_parts
from ondevice.models.families.base import Family

if TYPE_CHECKING:
    from ondevice.models import LoadedModel

DTYPES = ("float16", "float32", "q8_0", "q4_0")
ERRORS = {
    "float32": 0.0,
    "float16": 2.0**-11,
    "q8_0": 0.5 / 127 + 2.0**-11,
    "q4_0": 1 / 8 + 2.0**-11,
}
"""Largest error of an element as a part of the largest of its block; `q4_0` has one step less on one side."""
ROUNDED = 2.0**-21
_HEADS = ("token_embd.weight", "output.weight")
_ROUTER = "ffn_gate_inp"


def write(request: Request, path: Path) -> Checked:
    """Merge in float32, write every tensor in its type, read all of them back and compare."""
    from gguf import GGUFWriter

    assert request.model is not None  # noqa: S101 - `convert` refuses
    check_writable(request.model, request.revision)  # before the weights are loaded
    merged = merge(request)
    loaded = merged.loaded
    family, dims, state = type(loaded.family), loaded.dims, loaded.model.state_dict()
    architecture = architecture_of(family, dims)
    names = gguf_parts(family, dims, list(family.weight_shapes(dims)), architecture)
    writer = GGUFWriter(path, architecture)
    write_metadata(writer, loaded, request)
    write_tokenizer(writer, loaded)
    factors = rope_factors(loaded)
    plan = {
        part: (shape, _dtype(part, shape, request.dtype))
        for name, parts in names.items()
        for part, shape in zip(parts, _shapes(tuple(state[name].shape), len(parts)))
    }
    plan |= {name: (value.shape, "float32") for name, value in factors.items()}

    def tensors() -> Iterator[tuple[str, np.ndarray, str]]:
        for name, parts in names.items():
            value = to_gguf(family, name, state[name].numpy(), dims)
            for part, array in zip(
                parts, np.split(value, len(parts), axis=1) if len(parts) > 1 else [value]
            ):
                yield part, array, plan[part][1]
        for name, value in factors.items():
            yield name, value, "float32"

    with storage_errors(request.out):
        write_gguf(writer, tensors(), plan)
    kept = _kept(request, loaded, names, plan)
    # A constant that is added to a norm's weight, and taken off again, rounds it.
    least = {
        name: ROUNDED if dims.traits.norm_offset and state[name].ndim == 1 else 0.0
        for name in names
    }
    limits = {
        name: max(least[name], *(ERRORS[plan[part][1]] for part in parts))
        for name, parts in names.items()
    }
    return check_merged(request, merged, _read(path, family, dims, names), limits, kept)


def _dtype(name: str, shape: tuple[int, ...], asked: str) -> str:
    """Return the type of a tensor: vectors and routers in float32, rows that have no whole blocks in float16."""
    if len(shape) < 2 or _ROUTER in name or asked == "float32":
        return "float32"
    if asked == "float16" or shape[-1] % BLOCK:
        return "float16"
    return "q8_0" if name in _HEADS else asked


def _shapes(shape: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    return [shape] if parts == 1 else [(shape[0], shape[1] // parts, *shape[2:])] * parts


def _read(
    path: Path, family: type[Family], dims: ModelDims, names: dict[str, tuple[str, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Read the tensors of a file back: dequantised, under transformers' names and in its layout."""
    from gguf import GGUFReader, dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name, parts in names.items():
        found = [stored[part] for part in parts if part in stored]
        values = [dequantize(np.array(part.data), part.tensor_type) for part in found]
        if len(values) == len(parts):
            value = values[0] if len(values) == 1 else np.concatenate(values, axis=1)
            yield name, family.gguf_tensor(name, value, dims)


def _kept(
    request: Request, loaded: LoadedModel, names: dict[str, tuple[str, ...]], plan: dict[str, Any]
) -> float:
    """Return which share of the adapter's change D of the weights the rounding left.

    The rounded merged weights less the rounded base weights, projected on D: 1 without rounding. Single elements may
    stay on the step they were on; over a matrix the steps that are crossed add up to the change.
    """
    from gguf import dequantize, quantize

    adapter, family, dims, state = (
        request.adapter,
        type(loaded.family),
        loaded.dims,
        loaded.model.state_dict(),
    )
    found = exact = 0.0
    for linear in adapter.linears:
        weight, (a, b) = f"{linear}.weight", adapter.pair(linear)
        dtype = plan[names[weight][0]][1]
        if dtype == "float32":
            return 1.0
        kind = ggml_type(dtype)
        change = to_gguf(family, weight, adapter.alpha / adapter.rank * (b @ a), dims, whole=False)
        merged = to_gguf(family, weight, state[weight].numpy(), dims)
        rounded, base = (
            dequantize(quantize(value, kind), kind) for value in (merged, merged - change)
        )
        found += float(np.vdot(rounded - base, change))
        exact += float(np.vdot(change, change))
    return found / exact


FORM = Form("gguf", "llama.cpp", write, marker=None, dtypes=DTYPES, merged=True)
