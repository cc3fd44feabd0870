"""`mlx-model`: base plus adapter in MLX's own packed form, 4 or 8 bits for `mlx_lm.generate
--model`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import storage_errors, write_tensors
from ondevice.core.errors import MissingPackageError, ModelError
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import Rounding, check_merged, merge
from ondevice.models.save import FILE_NAME, save_description
from ondevice.models.text_model import text_dims

if TYPE_CHECKING:
    from collections.abc import Iterator

BITS = {"4bit": 4, "8bit": 8}
GROUP = 64
PARTS = ("weight", "scales", "biases")


def check(request: Request) -> None:
    """Refuse a mixture of experts, GPT-2, and a type that mlx-lm lacks, with ModelError."""
    dims, family = text_dims(str(request.model), request.revision)
    if dims.experts:
        raise ModelError(f"a mixture of experts ({dims.family}) has no packed MLX form here")
    if dims.whole:
        raise dims.unknown("mlx-model")
    if family.stores_inputs_first:
        raise ModelError(
            f"{dims.family} models have no packed MLX form here: mlx-lm names their weights otherwise"
        )
    _mlx()
    check_type(dims.family)


def check_type(model_type: str) -> None:
    """Refuse a model of a type that the installed mlx-lm does not read, with ModelError."""
    from mlx_lm.utils import MODEL_REMAPPING

    name = MODEL_REMAPPING.get(model_type, model_type)
    if importlib.util.find_spec(f"mlx_lm.models.{name}") is None:
        raise ModelError(
            f"the installed mlx-lm has no models of type {model_type}",
            expected="a type that it reads",
            received=model_type,
            hint="--to gguf or --to safetensors",
        )


def write(request: Request, folder: Path) -> Checked:
    """Merge in float32, pack with MLX, write, read the file back and compare."""
    mx = _mlx()
    bits = BITS[request.dtype]
    merged = merge(request)
    loaded = merged.loaded
    state = loaded.model.state_dict()
    names = [name for name in type(loaded.family).weight_shapes(loaded.dims) if name in state]
    tensors = {}
    limits = {}
    for name in names:
        value = state[name].numpy()
        if _is_packed(value):
            for part, array in zip(PARTS, _pack(mx, value, bits)):
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
    kept = _kept(mx, request, state, bits)
    return check_merged(request, merged, _read(mx, folder, names, bits), limits, kept)


def _mlx() -> Any:
    try:
        import mlx.core as mx
        import mlx_lm  # noqa: F401 - reads the folder back
    except ImportError:
        raise MissingPackageError(
            "mlx is not installed", hint="pip install 'ondevice-train[mlx]'"
        ) from None
    return mx


def _is_packed(value: np.ndarray) -> bool:
    return value.ndim == 2 and value.shape[1] % GROUP == 0


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('weight')}{part}"


def _pack(mx: Any, value: np.ndarray, bits: int) -> list[np.ndarray]:
    """Codes uint32 [rows, columns * bits / 32], scales and biases float16 [rows, columns / 64]."""
    with mx.stream(mx.cpu):
        packed = mx.quantize(mx.array(value.astype(np.float16)), group_size=GROUP, bits=bits)
        return [np.array(part) for part in packed]


def _unpack(mx: Any, parts: list[Any], bits: int) -> np.ndarray:
    with mx.stream(mx.cpu):
        return np.array(mx.dequantize(*map(mx.array, parts), group_size=GROUP, bits=bits)).astype(
            np.float32
        )


def _read(mx: Any, folder: Path, names: list[str], bits: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every parameter of the model that mlx-lm makes of the folder, unpacked."""
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
            yield name, _unpack(mx, parts, bits)
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


def _kept(mx: Any, request: Request, state: Any, bits: int) -> float:
    """Return which share of the adapter's change the rounding left, as for GGUF files."""
    found = exact = 0.0
    for linear in request.adapter.linears:
        merged, (a, b) = state[f"{linear}.weight"].numpy(), request.adapter.pair(linear)
        if not _is_packed(merged):
            continue
        change = request.adapter.alpha / request.adapter.rank * (b @ a)
        rounded, base = (
            _unpack(mx, _pack(mx, value, bits), bits) for value in (merged, merged - change)
        )
        found += float(np.vdot(rounded - base, change))
        exact += float(np.vdot(change, change))
    if exact:
        return found / exact
    return 1.0


FORM = Form(
    "mlx-model", "mlx-lm", write, marker="config.json", dtypes=tuple(BITS), merged=True, check=check
)
