"""`mlx-model`: base plus adapter in MLX's own packed form, 4 or 8 bits for `mlx_lm.generate
--model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import storage_errors, write_tensors
from ondevice.core.errors import ModelError
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import Rounding, check_merged, merge
from ondevice.models.mlx_packing import (
    GROUP,
    PARTS,
    check_packs,
    is_packed,
    mlx_core,
    pack,
    rounded,
    unpack,
)
from ondevice.models.save import FILE_NAME, save_description
from ondevice.models.text_model import text_dims

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ondevice.models import LoadedModel

BITS = {"4bit": 4, "8bit": 8}


def check(request: Request) -> None:
    """Refuse a model whose blocks are not known, and what `check_packs` refuses."""
    dims, family = text_dims(str(request.model), request.revision)
    if dims.whole:
        raise dims.unknown("MLX's packed form")
    check_packs(family, dims)


def write(request: Request, folder: Path) -> Checked:
    """Merge in float32, pack with MLX, write, read the file back and compare."""
    merged = merge(request)
    limits = write_model(request, merged.loaded, folder)
    kept = _kept(request, merged.loaded.model.state_dict())
    written = read_tensors(folder, limits, BITS[request.dtype])
    return check_merged(request, merged, written, limits, kept)


def write_model(request: Request, loaded: LoadedModel, folder: Path) -> dict[str, Rounding]:
    """Pack a model with MLX and write it with its tokenizer.

    Returns: what each parameter may have been rounded, by transformers' names.
    """
    bits = BITS[request.dtype]
    state = loaded.model.state_dict()
    tensors = {}
    limits = {}
    for name in type(loaded.family).weight_shapes(loaded.dims):
        value = state[name].numpy()
        if is_packed(value.shape):
            for part, array in zip(PARTS, pack(value, bits)):
                tensors[_part(name, part)] = array
            limits[name] = Rounding(3.0 / (2**bits - 1), GROUP, 2.0 ** (bits - 25))
        else:
            tensors[name] = value.astype(np.float16)
            limits[name] = Rounding(2.0**-10, floor=2.0**-25)
    with storage_errors(request.out):
        import torch

        save_description(folder, torch.float16, loaded)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        # mlx-lm reads this key here; newer versions of transformers nest it.
        config |= {
            key: value
            for key, value in (config.get("rope_parameters") or {}).items()
            if key == "rope_theta"
        }
        config |= loaded.family.mlx_lm_fields(loaded.dims)
        config |= {"quantization": {"group_size": GROUP, "bits": bits}}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(folder / FILE_NAME, tensors)
    return limits


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


def read_tensors(folder: Path, names: Iterable[str], bits: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every parameter of the model that mlx-lm makes of the folder, unpacked.

    Args:
        names: of the parameters in transformers.

    Raises:
        ModelError: mlx-lm does not read it.
    """
    mx = mlx_core()
    from mlx.utils import tree_flatten
    from mlx_lm.utils import load_model

    try:
        model, _ = load_model(folder, lazy=True)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            "mlx-lm does not read the model; nothing was written",
            received=f"{type(error).__name__}: {error}",
            hint="use --to safetensors or --to gguf",
        ) from None
    stored: dict[str, Any] = dict(tree_flatten(model.parameters()))
    for name in names:
        parts = [stored.pop(_part(name, part), None) for part in PARTS]
        if all(part is not None for part in parts):
            yield name, unpack(parts, bits)
        elif parts[0] is not None:
            value = _as_float32(mx, parts[0])
            if value.ndim == 3:  # a convolution: MLX has the taps before the channels
                value = value.transpose(0, 2, 1)
            yield name, value
    for name, value in stored.items():  # which the comparison refuses
        yield name, _as_float32(mx, value)


def _as_float32(mx: Any, value: Any) -> np.ndarray:
    with mx.stream(mx.cpu):
        return np.array(value.astype(mx.float32))


def _kept(request: Request, state: Any) -> float:
    """Return which share of the adapter's change the rounding left, as for GGUF files."""
    bits = BITS[request.dtype]
    found = exact = 0.0
    for linear in request.adapter.linears:
        merged, (a, b) = state[f"{linear}.weight"].numpy(), request.adapter.pair(linear)
        if not is_packed(merged.shape):
            continue
        change = request.adapter.alpha / request.adapter.rank * (b @ a)
        moved = rounded(merged, bits) - rounded(merged - change, bits)
        found += float(np.vdot(moved, change))
        exact += float(np.vdot(change, change))
    if exact:
        return found / exact
    return 1.0


FORM = Form(
    "mlx-model", "mlx-lm", write, marker="config.json", dtypes=tuple(BITS), merged=True, check=check
)
