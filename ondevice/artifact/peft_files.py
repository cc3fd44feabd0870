"""The two files of a PEFT adapter, read and checked part by part; what is not plain LoRA is refused."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.errors import ArtifactError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<linear>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
DIGEST_KEY = "ondevice.tensors_sha256"
_NUMPY = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
_MUST_BE_EMPTY = (
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "layer_replication",
)
_MUST_BE_FALSE = ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "trainable_token_indices")


def read_config(path: Path) -> dict[str, Any]:
    """`adapter_config.json` as a dictionary that has a `peft_type`."""
    if not path.is_file():
        hint = "give the folder that holds adapter_config.json"
        expected, received = CONFIG_NAME, "no such file"
        raise ArtifactError(f"{path.parent} is not a PEFT adapter", expected=expected, received=received, hint=hint)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} is not readable JSON", received=str(error), hint="copy it again") from None
    if not isinstance(config, dict) or "peft_type" not in config:
        found = ", ".join(sorted(config)[:6]) if isinstance(config, dict) else type(config).__name__
        hint = "mlx-lm writes a file of the same name, beside adapters.safetensors: is that missing?"
        raise ArtifactError(f"{path}: no field 'peft_type'", expected="LORA", received=found, hint=hint)
    return config


def check_kind(config: dict[str, Any], path: Path) -> None:
    """Refuse every variant of LoRA that W + scale B A does not describe."""

    def refuse(field: str, expected: str) -> None:
        hint = "only plain LoRA can be used; merge such an adapter with PEFT's merge_and_unload"
        raise ArtifactError(f"{path}: field '{field}'", expected=expected, received=config.get(field), hint=hint)

    if config["peft_type"] != "LORA":
        refuse("peft_type", "LORA")
    if config.get("bias", "none") != "none":
        refuse("bias", "none")
    for field in _MUST_BE_FALSE:
        if config.get(field):
            refuse(field, "false")
    for field in _MUST_BE_EMPTY:
        if config.get(field):
            refuse(field, "nothing")


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors in float32 under the base model's own names, checked against the recorded digest if any."""
    if not path.is_file():
        pickled = path.with_suffix(".bin")
        if pickled.is_file():
            raise ArtifactError(
                f"{pickled} is a pickle, which can run any code when it is read",
                expected=WEIGHTS_NAME,
                hint="load it with PEFT where you trust it and save_pretrained(safe_serialization=True)",
            )
        raise ArtifactError(f"{path.parent} lacks a file", expected=WEIGHTS_NAME, received="no such file")
    data = path.read_bytes()
    tensors = {}
    for stored, entry in stored_tensors(data, path):
        name = stored.removeprefix(PEFT_PREFIX)
        match = _KEY.fullmatch(name)
        if match is None:
            expected = f"{PEFT_PREFIX}<linear>.lora_A.weight or .lora_B.weight"
            raise ArtifactError(f"{path}: tensor '{stored}' is not part of a LoRA adapter", expected=expected)
        array = to_float32(entry["dtype"], entry["data"], path, stored).reshape(entry["shape"])
        tensors[f"{match['linear']}.lora_{match['side']}.weight"] = array
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    recorded = header.get("__metadata__", {}).get(DIGEST_KEY)
    if recorded is not None and recorded != digest(tensors):
        raise ArtifactError(
            f"{path} has changed since it was written",
            expected=f"SHA-256 of the tensors {recorded}",
            received=digest(tensors),
            hint="copy it again from where it was trained",
        )
    return tensors


def stored_tensors(data: bytes, path: Path) -> list[tuple[str, dict[str, Any]]]:
    """What a safetensors file holds by name: `dtype`, `shape`, `data`."""
    import safetensors

    try:
        return safetensors.deserialize(data)
    except (safetensors.SafetensorError, ValueError) as error:
        raise ArtifactError(
            f"{path} is torn or no safetensors file", received=str(error), hint="copy it again"
        ) from None


def to_float32(dtype: str, data: bytes, path: Path, name: str) -> np.ndarray:
    """A stored tensor's numbers as a flat array."""
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _NUMPY:
        expected = "F32, F16, BF16 or F64"
        raise ArtifactError(f"{path}: tensor '{name}' has a dtype no adapter has", expected=expected, received=dtype)
    return np.frombuffer(data, dtype=_NUMPY[dtype]).astype(np.float32)


def check_tensors(tensors: dict[str, np.ndarray], where: str) -> int:
    """The rank that all pairs share."""
    rank = None
    if not tensors:
        raise ArtifactError(f"{where}: no tensors", expected="at least one pair of lora_A and lora_B")
    for name, value in sorted(tensors.items()):
        match = _KEY.fullmatch(name)
        if match is None:
            raise ArtifactError(f"{where}: tensor '{name}'", expected="<linear>.lora_A.weight or .lora_B.weight")
        other = f"{match['linear']}.lora_{'B' if match['side'] == 'A' else 'A'}.weight"
        if other not in tensors:
            raise ArtifactError(f"{where}: tensor '{name}' has no partner", expected=other)
        if value.ndim != 2:
            raise ArtifactError(f"{where}: tensor '{name}'", expected="2 dimensions", received=value.shape)
        found = value.shape[0] if match["side"] == "A" else value.shape[1]
        if found == 0:
            raise ArtifactError(f"{where}: tensor '{name}'", expected="rank 1 or more", received="rank 0")
        rank = found if rank is None else rank
        if found != rank:
            raise ArtifactError(f"{where}: tensor '{name}'", expected=f"rank {rank}", received=f"rank {found}")
        if not np.isfinite(value).all():
            raise ArtifactError(f"{where}: tensor '{name}'", expected="finite values", received="inf or nan")
    return int(rank or 0)


def check_targets(linears: tuple[str, ...], config: dict[str, Any], path: Path) -> None:
    """The configuration and the tensors must speak of the same linear layers."""
    named = config.get("target_modules")
    if not isinstance(named, list):
        return  # PEFT also takes a pattern; the tensors then say which
    for linear in linears:
        if not any(linear == item or linear.endswith(f".{item}") for item in named):
            message = f"{path}: field 'target_modules' does not name '{linear}', which {WEIGHTS_NAME} has"
            raise ArtifactError(message, expected=linears[:4], received=named)
    for item in named:
        if not any(linear == item or linear.endswith(f".{item}") for linear in linears):
            message = f"{path}: field 'target_modules' names '{item}', for which {WEIGHTS_NAME} has no tensor"
            raise ArtifactError(message, expected=linears[:4], received=named)


def targets_of(tensors: dict[str, np.ndarray]) -> tuple[str, ...]:
    """Last part of the names of the linear layers, sorted."""
    matches = filter(None, map(_KEY.fullmatch, tensors))
    return tuple(sorted({match["linear"].rsplit(".", 1)[-1] for match in matches}))


def digest(tensors: dict[str, np.ndarray]) -> str:
    """SHA-256 over names, shapes and float32 values; it does not depend on the order in the file."""
    result = hashlib.sha256()
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name], dtype="<f4")
        result.update(f"{name} {value.shape}\n".encode())
        result.update(value.tobytes())
    return result.hexdigest()
