"""The tensors of a LoRA adapter: pairs A and B by linear layer, checked, hashed and written.

An adapter is written as PEFT's adapter_config.json and adapter_model.safetensors, which load in
`peft.PeftModel.from_pretrained` and in everything that reads PEFT's files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.expert_pairs import peft_names
from ondevice.artifact.files import atomic_directory
from ondevice.core.config import BASE_WEIGHTS
from ondevice.core.errors import ArtifactError
from ondevice.core.session import Adapter, layer_of
from ondevice.core.traits import is_expert_parameter
from ondevice.core.untrusted import TensorHeader, parse_header, read_plain

CONFIG_NAME = "adapter_config.json"
"""Name of the configuration's file, in PEFT's layout and in mlx-lm's."""
KEY = re.compile(r"(?P<linear>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
WEIGHTS_NAME = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
DIGEST_KEY = "ondevice.tensors_sha256"
BASE_KEY = "ondevice.base_weights"
"""Key of a safetensors file's metadata: `Adapter.base_weights`. PEFT's configuration takes no other
keys."""
_IN_A_TOWER = re.compile(r"\w+\.\w+\.(layers|blocks|h)\.")
"""A block whose list lies deeper than in a model that only reads text."""
MOST_ADAPTER_BYTES = 8 << 30
"""An adapter is read into memory at once; the largest that we know has 1.4 GB."""
_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def stored_tensors(path: Path) -> tuple[TensorHeader, dict[str, np.ndarray]]:
    """Read a safetensors file: its header, and its tensors as float32.

    ArtifactError if it is not a whole one.
    """
    try:
        data = read_plain(path, MOST_ADAPTER_BYTES)
        header = parse_header(data)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{path} is damaged or no safetensors file", received=str(error), hint="copy it again"
        ) from None
    arrays = {
        name: _to_float32(place.dtype, data[place.start : place.end], path, name).reshape(
            place.shape
        )
        for name, place in header.tensors.items()
    }
    return header, arrays


def _to_float32(dtype: str, data: bytes, path: Path, name: str) -> np.ndarray:
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _NUMPY:
        expected = "F32, F16, BF16 or F64"
        raise ArtifactError(
            f"{path}: tensor '{name}' has a dtype no adapter has", expected=expected, received=dtype
        )
    return np.frombuffer(data, dtype=_NUMPY[dtype]).astype(np.float32)


def check_tensors(tensors: dict[str, np.ndarray], where: str, stated: int | None = None) -> int:
    """Check that the tensors are pairs of A and B with finite values; return the rank that all of
    them share.

    `stated` is the rank that a configuration gives: that of experts' pairs alone cannot be seen.
    """
    ranks = {
        value.shape["_B" in name.rpartition(".lora")[2]]
        for name, value in tensors.items()
        if value.ndim == 2 and not is_expert_parameter(name.rpartition(".lora_")[0])
    }
    rank = stated
    if ranks:
        rank = None
    if not tensors:
        raise ArtifactError(
            f"{where}: no tensors", expected="at least one pair of lora_A and lora_B"
        )
    for name, value in sorted(tensors.items()):
        match = KEY.fullmatch(name)
        if match is None:
            raise ArtifactError(
                f"{where}: tensor '{name}'", expected="<linear>.lora_A.weight or .lora_B.weight"
            )
        other = f"{match['linear']}.lora_{'BA'[match['side'] == 'B']}.weight"
        if other not in tensors:
            raise ArtifactError(f"{where}: tensor '{name}' has no partner", expected=other)
        if value.ndim != 2:
            raise ArtifactError(
                f"{where}: tensor '{name}'", expected="2 dimensions", received=value.shape
            )
        own = value.shape[match["side"] == "B"]
        if own == 0:
            raise ArtifactError(
                f"{where}: tensor '{name}'", expected="rank 1 or more", received="rank 0"
            )
        if is_expert_parameter(match["linear"]):
            each = rank or min(ranks, default=0)
            if not each or own % each:
                expected = f"a multiple of rank {each or '(field r)'}"
                raise ArtifactError(f"{where}: tensor '{name}'", expected=expected, received=own)
            own = each
        if rank is None:
            rank = own
        if own != rank:
            raise ArtifactError(
                f"{where}: tensor '{name}'", expected=f"rank {rank}", received=f"rank {own}"
            )
        if not np.isfinite(value).all():
            raise ArtifactError(
                f"{where}: tensor '{name}'", expected="finite values", received="inf or nan"
            )
    return int(rank or 0)


def base_metadata(adapter: Adapter) -> dict[str, str]:
    """Return what a file's metadata say of the base model's weights."""
    if adapter.base_weights:
        return {BASE_KEY: adapter.base_weights}
    return {}


def base_weights_of(header: TensorHeader, path: Path) -> str:
    """Return how a base model's weights were rounded for an adapter, by its file's metadata.

    Raises:
        ArtifactError: in a way that is not known here.
    """
    stated = header.metadata.get(BASE_KEY, "")
    if stated and stated not in BASE_WEIGHTS:
        raise ArtifactError(
            f"{path}: metadata '{BASE_KEY}'",
            expected=", ".join(BASE_WEIGHTS),
            received=stated,
            hint="it was written by a newer version: pip install --upgrade ondevice-train",
        )
    return stated


def targets_of(tensors: dict[str, np.ndarray]) -> tuple[str, ...]:
    """List the last part of the names of the linear layers, sorted."""
    matches = filter(None, map(KEY.fullmatch, tensors))
    return tuple(sorted({match["linear"].rsplit(".", 1)[-1] for match in matches}))


def digest(tensors: dict[str, np.ndarray]) -> str:
    """Hash names, shapes and float32 values with SHA-256; the order in the file does not matter."""
    result = hashlib.sha256()
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name], dtype="<f4")
        result.update(f"{name} {value.shape}\n".encode())
        result.update(value.tobytes())
    return result.hexdigest()


def save_adapter(
    adapter: Adapter, folder: str | Path, texts: Mapping[str, str] | None = None
) -> None:
    """Write `adapter` as a PEFT adapter, all at once; an adapter that is there is replaced.

    Args:
        texts: other files of the folder, by name: what the adapter was trained to do.

    Raises:
        ArtifactError: the tensors are not complete, finite A and B pairs of `adapter.rank`.
        StorageError: the disk is full, or `folder` holds something else than an adapter.
    """
    from safetensors.numpy import save

    tensors = {
        name: np.ascontiguousarray(value, dtype=np.float32)
        for name, value in adapter.tensors.items()
    }
    rank = check_tensors(tensors, str(folder), adapter.rank)
    if rank != adapter.rank:
        message = f"adapter for {folder}: field 'rank'"
        raise ArtifactError(
            message, expected=f"{rank}, as the tensors have it", received=adapter.rank
        )
    if adapter.expert_parameters:
        theirs = peft_names(adapter.expert_parameters)
        tensors = {renamed(name, theirs): value for name, value in tensors.items()}
    metadata = {"format": "pt", DIGEST_KEY: digest(tensors), **base_metadata(adapter)}
    data = save({PEFT_PREFIX + name: value for name, value in tensors.items()}, metadata=metadata)
    config = json.dumps(peft_config(adapter), indent=2, sort_keys=True) + "\n"
    # With a marker: an adapter is replaced, a folder of other files never.
    with atomic_directory(folder, marker=CONFIG_NAME) as partial:
        (partial / WEIGHTS_NAME).write_bytes(_sorted_metadata(data))
        (partial / CONFIG_NAME).write_text(config, encoding="utf-8")
        for name, text in (texts or {}).items():
            (partial / name).write_text(text, encoding="utf-8")


def _sorted_metadata(data: bytes) -> bytes:
    # safetensors writes metadata in the order of a hash map, another in each call: one adapter
    # shall be one file.
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def peft_config(adapter: Adapter) -> dict[str, Any]:
    """Build the `adapter_config.json` of `adapter`: keys that every PEFT since 0.8 knows."""
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else float(adapter.alpha)
    modules, layers = _modules_and_layers(adapter)
    parameters = {}
    if adapter.expert_parameters:
        parameters = {"target_parameters": list(adapter.expert_parameters)}
    return parameters | {
        "auto_mapping": None,
        "base_model_name_or_path": adapter.base_model or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": layers,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "revision": None,
        "target_modules": modules,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def renamed(tensor: str, names: dict[str, str]) -> str:
    linear, _, side = tensor.rpartition(".lora_")
    return f"{names.get(linear, linear)}.lora_{side}"


def _modules_and_layers(adapter: Adapter) -> tuple[list[str], list[int] | None]:
    """Return PEFT's `target_modules` and `layers_to_transform` that name exactly this adapter's
    linear layers.

    In a model with several towers the last part of a name may be another tower's, too.
    """
    linears = [name for name in adapter.linears if not is_expert_parameter(name)]
    layers = sorted({layer_of(name) for name in linears})
    if (
        -1 in layers
        or adapter.expert_parameters
        or any(_IN_A_TOWER.match(name) for name in linears)
        or len(linears) != len(layers) * len(adapter.target_modules)
    ):
        return sorted(linears), None
    return sorted(adapter.target_modules), None if layers == list(range(len(layers))) else layers
