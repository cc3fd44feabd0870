"""Read LoRA adapters: PEFT's adapter_config.json and adapter_model.safetensors, or mlx-lm's files.

PEFT's files load here if they are plain LoRA. Anything else is refused by name, part by part: a
part that is ignored in silence makes another model than the one that was trained.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.expert_pairs import own_names
from ondevice.artifact.mlx_lm_files import WEIGHTS_NAME as MLX_LM_WEIGHTS_NAME
from ondevice.artifact.mlx_lm_files import load_mlx_lm_adapter
from ondevice.artifact.pairs import (
    CONFIG_NAME,
    DIGEST_KEY,
    KEY,
    PEFT_PREFIX,
    WEIGHTS_NAME,
    base_weights_of,
    check_tensors,
    digest,
    renamed,
    save_adapter,
    stored_tensors,
    targets_of,
)
from ondevice.artifact.peft_fields import check_fields, check_layers, fold_patterns
from ondevice.core.errors import ArtifactError
from ondevice.core.process import path_of
from ondevice.core.session import Adapter, layer_of
from ondevice.core.traits import is_expert_parameter
from ondevice.core.untrusted import read_object

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "Adapter", "load_adapter", "save_adapter", "targets_of"]


def is_mlx_lm(folder: Path) -> bool:
    """Return True if a folder holds an adapter in mlx-lm's layout."""
    return (folder / MLX_LM_WEIGHTS_NAME).is_file()


def load_adapter(folder: str | Path) -> Adapter:
    """Read a PEFT LoRA adapter, or mlx-lm's. Tensors become float32; rank-stabilised LoRA's scale
    is folded into alpha.

    Raises:
        ArtifactError: a file is missing, damaged, changed, pickled, or of a kind that is not plain
            LoRA; the error names the file and the field or tensor.
    """
    folder = path_of(folder, "the adapter's folder")
    if is_mlx_lm(folder):
        return load_mlx_lm_adapter(folder)
    config_path = folder / CONFIG_NAME
    weights_path = folder / WEIGHTS_NAME
    config = read_config(config_path)
    check_fields(config, config_path)
    stored, base_weights = read_tensors(weights_path)
    tensors, config = fold_patterns(stored, config, config_path)
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        message = f"{config_path}: field 'target_parameters'"
        raise ArtifactError(message, expected="a list of names", received=parameters)
    modules = {name.rpartition(".lora_")[0] for name in tensors}
    if parameters or any(name.endswith((".experts", ".base_layer")) for name in modules):
        own = own_names(modules, parameters, str(config_path))
        tensors = {renamed(name, own): value for name, value in tensors.items()}
    given = config.get("r")
    rank = check_tensors(
        tensors, str(weights_path), given if isinstance(given, int) and given > 0 else None
    )
    if config.get("r") != rank:
        raise ArtifactError(
            f"{config_path}: field 'r' does not fit {WEIGHTS_NAME}",
            expected=rank,
            received=config.get("r"),
        )
    alpha = config["lora_alpha"]
    if config.get("use_rslora"):  # its scale is alpha / sqrt(rank)
        alpha = alpha * math.sqrt(rank)
    base_model = config.get("base_model_name_or_path") or ""
    targets = targets_of(tensors)
    adapter = Adapter(tensors, rank, float(alpha), targets, base_model, base_weights)
    linears = tuple(name for name in adapter.linears if not is_expert_parameter(name))
    check_targets(linears, config, config_path)
    check_layers(linears, layer_of, config, config_path)
    return adapter


def read_config(path: Path) -> dict[str, Any]:
    """Return `adapter_config.json` as a dictionary that has a `peft_type`."""
    if not path.is_file():
        hint = "give the folder that holds adapter_config.json"
        expected = CONFIG_NAME
        received = "no such file"
        raise ArtifactError(
            f"{path.parent} is not a PEFT adapter", expected=expected, received=received, hint=hint
        )
    config = read_object(path, ArtifactError, hint="copy it again")
    if "peft_type" not in config:
        received = ", ".join(sorted(config)[:6])
        hint = (
            "mlx-lm writes a file of the same name, next to adapters.safetensors: is that missing?"
        )
        raise ArtifactError(
            f"{path}: no field 'peft_type'", expected="LORA", received=received, hint=hint
        )
    return config


def read_tensors(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Read the tensors in float32 under the base model's own names, and check them against the
    recorded digest if any.

    The digest is of the numbers, not of the file: PEFT may write the same adapter as another file.

    Returns: the tensors, and `Adapter.base_weights`.
    """
    if not path.is_file():
        pickled = path.with_suffix(".bin")
        if pickled.is_file():
            raise ArtifactError(
                f"{pickled} is a pickle, which can run any code when it is read",
                expected=WEIGHTS_NAME,
                hint="if you trust it, load it with PEFT and save_pretrained(safe_serialization=True)",
            )
        raise ArtifactError(
            f"{path.parent} lacks a file", expected=WEIGHTS_NAME, received="no such file"
        )
    header, arrays = stored_tensors(path)
    tensors = {}
    for stored, array in arrays.items():
        name = stored.removeprefix(PEFT_PREFIX)
        match = KEY.fullmatch(name)
        if match is None:
            expected = f"{PEFT_PREFIX}<linear>.lora_A.weight or .lora_B.weight"
            raise ArtifactError(
                f"{path}: tensor '{stored}' is not part of a LoRA adapter", expected=expected
            )
        tensors[f"{match['linear']}.lora_{match['side']}.weight"] = array
    recorded = header.metadata.get(DIGEST_KEY)
    if recorded is not None and recorded != digest(tensors):
        raise ArtifactError(
            f"{path} has changed since it was written",
            expected=f"SHA-256 of the tensors {recorded}",
            received=digest(tensors),
            hint="copy it again from where it was trained",
        )
    return tensors, base_weights_of(header, path)


def check_targets(linears: tuple[str, ...], config: dict[str, Any], path: Path) -> None:
    """Check that the configuration and the tensors name the same linear layers."""
    named = config.get("target_modules")
    if not isinstance(named, list):
        return  # PEFT also takes a pattern; the tensors then say which
    for linear in linears:
        if not any(linear == item or linear.endswith(f".{item}") for item in named):
            message = (
                f"{path}: field 'target_modules' does not name '{linear}', which {WEIGHTS_NAME} has"
            )
            raise ArtifactError(message, expected=linears[:4], received=named)
    for item in named:
        if not any(linear == item or linear.endswith(f".{item}") for linear in linears):
            message = f"{path}: field 'target_modules' names '{item}', for which {WEIGHTS_NAME} has no tensor"
            raise ArtifactError(message, expected=linears[:4], received=named)
