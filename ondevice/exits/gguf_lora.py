"""`gguf-lora`: an adapter for llama.cpp's `--lora` and its descendants, next to a GGUF file of the
base model.

The file has four keys, and two tensors a layer. llama.cpp scales by alpha / rank, with the rank of
the tensors. The alpha of an adapter here is plain LoRA's (rank-stabilised LoRA is folded into it
when it is read).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.artifact.files import storage_errors
from ondevice.core.dims import ModelDims
from ondevice.core.errors import VerificationError
from ondevice.data.tasks.trained import to_text
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import check_adapter
from ondevice.gguf.names import architecture_of, gguf_names, to_gguf
from ondevice.gguf.read import read_fields
from ondevice.gguf.task import GGUF_KEY
from ondevice.gguf.write import write_gguf
from ondevice.models.families.base import Family
from ondevice.models.text_model import text_dims


def check(request: Request) -> None:
    """Refuse a model without an architecture in GGUF files with ModelError."""
    dims, family = text_dims(str(request.model), request.revision)
    gguf_names(
        dims,
        [f"{linear}.weight" for linear in request.adapter.linears],
        architecture_of(family, dims),
    )


def write(request: Request, path: Path) -> Checked:
    """Write the adapter in float32, with the names and the layout of B of its base model's
    architecture."""
    from gguf import GGUFType, GGUFWriter, Keys

    assert request.model is not None  # noqa: S101 - `convert` refuses
    dims, family = text_dims(request.model, request.revision)
    architecture = architecture_of(family, dims)
    weights = [f"{linear}.weight" for linear in request.adapter.linears]
    names = gguf_names(dims, weights, architecture)
    writer = GGUFWriter(path, architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, request.adapter.alpha)
    if request.adapter.base_model:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, request.adapter.base_model)
    if request.task is not None:
        writer.add_string(GGUF_KEY, to_text(request.task))
    tensors = {}
    for linear in request.adapter.linears:
        a, b = request.adapter.pair(linear)
        weight = f"{linear}.weight"
        columns = family.gguf_columns(weight, dims)
        tensors[f"{names[weight]}.lora_a"] = a if columns is None else a[:, columns]
        tensors[f"{names[weight]}.lora_b"] = to_gguf(family, weight, b, dims, is_weight=False)
    plan = {name: (value.shape, "float32") for name, value in tensors.items()}
    with storage_errors(request.out):
        write_gguf(writer, ((name, value, "float32") for name, value in tensors.items()), plan)
    return check_adapter(request, read(path, request, family, dims, names))


def read(
    path: Path, request: Request, family: type[Family], dims: ModelDims, names: dict[str, str]
) -> Adapter:
    """Read an adapter back under PEFT's names and in PEFT's layout."""
    from gguf import Keys

    reader = read_fields(path)
    stored = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    alpha = reader.get_field(Keys.Adapter.LORA_ALPHA)
    tensors = {}
    for weight, name in names.items():
        linear = weight.removesuffix(".weight")
        a = stored.pop(f"{name}.lora_a", None)
        b = stored.pop(f"{name}.lora_b", None)
        if a is None or b is None:
            raise VerificationError(
                f"{request.out}: read back, the file has no {name}; nothing was written"
            )
        columns = family.gguf_columns(weight, dims)
        tensors[f"{linear}.lora_A.weight"] = a if columns is None else a[:, np.argsort(columns)]
        tensors[f"{linear}.lora_B.weight"] = family.gguf_tensor(weight, b, dims)
    rank = tensors[next(iter(tensors))].shape[0]
    value = float("nan") if alpha is None else float(alpha.contents())
    return Adapter(
        tensors,
        rank,
        value,
        targets_of(tensors),
        request.adapter.base_model,
        request.adapter.base_weights,
    )


FORM = Form("gguf-lora", "llama.cpp", write, marker=None, check=check)
