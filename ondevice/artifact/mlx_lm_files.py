"""mlx-lm's adapters: adapters.safetensors and adapter_config.json, read and written.

mlx-lm keeps `lora_a` [inputs, rank] and `lora_b` [rank, outputs], and a `scale`, from which PEFT's
alpha = scale x rank follows. The files load in `mlx_lm.tuner.utils.load_adapters` and
with `mlx_lm.load(..., adapter_path=...)`.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.files import atomic_directory
from ondevice.artifact.pairs import (
    CONFIG_NAME,
    base_metadata,
    base_weights_of,
    check_tensors,
    stored_tensors,
    targets_of,
)
from ondevice.core.errors import ArtifactError
from ondevice.core.session import Adapter
from ondevice.core.untrusted import read_object

WEIGHTS_NAME = "adapters.safetensors"

_KEY = re.compile(r"(?P<linear>.+)\.lora_(?P<side>[ab])")
_LAYER = re.compile(r"model\.(?:layers|h)\.\d+\.(?P<module>.+)")
GPT2_BLOCKS = "transformer.h."
"""Begins GPT-2's layers in transformers; mlx-lm has MLX_GPT2_BLOCKS."""
MLX_GPT2_BLOCKS = "model.h."
ALL_LAYERS = -1


def save_mlx_lm_adapter(adapter: Adapter, folder: str | Path) -> None:
    """Write `adapter` as mlx-lm keeps one, all at once; an adapter that is there is replaced.

    Raises:
        ArtifactError: the tensors are not complete, finite pairs, or lie outside a model's blocks.
        StorageError: the disk is full, or `folder` holds something else than an adapter.
    """
    from safetensors.numpy import save

    check_tensors(adapter.tensors, str(folder))
    modules = set()
    tensors = {}
    for linear in adapter.linears:
        name = linear
        if linear.startswith(GPT2_BLOCKS):
            name = MLX_GPT2_BLOCKS + linear.removeprefix(GPT2_BLOCKS)
        match = _LAYER.fullmatch(name)
        if match is None:
            raise ArtifactError(
                f"{linear} is in no block", expected="model.layers.N.<module>", received=linear
            )
        modules.add(match["module"])
        for side, value in zip("ab", adapter.pair(linear)):
            tensors[f"{name}.lora_{side}"] = np.ascontiguousarray(value.T, dtype=np.float32)
    config = {
        "fine_tune_type": "lora",
        "num_layers": ALL_LAYERS,
        "lora_parameters": {
            "rank": adapter.rank,
            "scale": adapter.alpha / adapter.rank,
            "dropout": 0.0,
            "keys": sorted(modules),
        },
        "model": adapter.base_model,
    }
    with atomic_directory(folder, marker=CONFIG_NAME) as partial:
        (partial / WEIGHTS_NAME).write_bytes(
            save(tensors, metadata={"format": "mlx", **base_metadata(adapter)})
        )
        (partial / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_mlx_lm_adapter(folder: str | Path) -> Adapter:
    """Read an adapter of mlx-lm; tensors become float32.

    Raises:
        ArtifactError: a file is missing or damaged, or the adapter is not plain LoRA (DoRA, a full
            fine-tune).
    """
    folder = Path(folder)
    config = _config(folder / CONFIG_NAME)
    tensors, base_weights = _tensors(folder / WEIGHTS_NAME)
    rank = check_tensors(tensors, str(folder / WEIGHTS_NAME))
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        parameters = {}
    if parameters.get("rank") != rank:
        raise ArtifactError(
            f"{folder / CONFIG_NAME}: field 'rank' does not fit {WEIGHTS_NAME}",
            expected=rank,
            received=parameters.get("rank"),
        )
    scale = parameters.get("scale")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ArtifactError(
            f"{folder / CONFIG_NAME}: field 'scale'", expected="a number", received=scale
        )
    return Adapter(
        tensors,
        rank,
        float(scale) * rank,
        targets_of(tensors),
        str(config.get("model") or ""),
        base_weights,
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = read_object(path, ArtifactError, hint="copy it again")
    except FileNotFoundError:
        raise ArtifactError(
            f"{path.parent} lacks a file", expected=CONFIG_NAME, received="no such file"
        ) from None
    kind = config.get("fine_tune_type", "lora")
    if kind != "lora":
        hint = "only plain LoRA can be used; fuse such an adapter with mlx_lm.fuse"
        raise ArtifactError(
            f"{path}: field 'fine_tune_type'", expected="lora", received=kind, hint=hint
        )
    return config


def _tensors(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """Read the tensors under PEFT's names and in its layout, and `Adapter.base_weights`."""
    tensors = {}
    header, arrays = stored_tensors(path)
    for stored, array in arrays.items():
        match = _KEY.fullmatch(stored)
        if match is None or array.ndim != 2:
            expected = "<linear>.lora_a or .lora_b, of 2 dimensions"
            raise ArtifactError(
                f"{path}: tensor '{stored}' is not part of a LoRA adapter", expected=expected
            )
        linear = match["linear"]
        if linear.startswith(MLX_GPT2_BLOCKS):
            linear = GPT2_BLOCKS + linear.removeprefix(MLX_GPT2_BLOCKS)
        name = f"{linear}.lora_{match['side'].upper()}.weight"
        tensors[name] = np.ascontiguousarray(array.T)
    return tensors, base_weights_of(header, path)
