"""LoRA adapters on disk, in PEFT's own layout: adapter_config.json and adapter_model.safetensors; mlx-lm's is read too.

What is written here loads in `peft.PeftModel.from_pretrained` and in everything that reads PEFT's files;
what PEFT wrote loads here when it is plain LoRA. Anything else is refused by name: a part that is ignored
in silence makes another model than the one that was trained.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.files import atomic_directory
from ondevice.artifact.mlx_lm_files import is_mlx_lm, load_mlx_lm_adapter
from ondevice.artifact.peft_files import (
    CONFIG_NAME,
    DIGEST_KEY,
    PEFT_PREFIX,
    WEIGHTS_NAME,
    check_kind,
    check_targets,
    check_tensors,
    digest,
    read_config,
    read_tensors,
    targets_of,
)
from ondevice.errors import ArtifactError

_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: each named linear layer W becomes W + (alpha / rank) B A.

    Attributes:
        tensors: float32 `<linear>.lora_A.weight` [rank, inputs] and `<linear>.lora_B.weight` [outputs, rank],
            `<linear>` being the module's full name: `model.layers.0.self_attn.q_proj`.
        rank: of every pair.
        alpha: numerator of the scale.
        targets: last part of the names, sorted: `("q_proj", "v_proj")`.
        base_model: the source string of the model it was trained on; may be empty.
    """

    tensors: dict[str, np.ndarray]
    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_model: str

    @property
    def linears(self) -> tuple[str, ...]:
        """Full names of the linear layers that it changes, in order of the layers."""
        suffix = ".lora_A.weight"
        names = {name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix)}
        return tuple(sorted(names, key=lambda name: (_layer_of(name), name)))

    @property
    def changes_nothing(self) -> bool:
        """True when every product B A is zero because A or B is."""
        pairs = (self.pair(name) for name in self.linears)
        return not any(a.any() and b.any() for a, b in pairs)

    def pair(self, linear: str) -> tuple[np.ndarray, np.ndarray]:
        """A float32 [rank, inputs] and B float32 [outputs, rank] of one linear layer."""
        return self.tensors[f"{linear}.lora_A.weight"], self.tensors[f"{linear}.lora_B.weight"]


def save_adapter(adapter: Adapter, folder: str | Path) -> None:
    """Write `adapter` as a PEFT adapter, all at once; an adapter that is there is replaced.

    Raises:
        ArtifactError: the tensors are no whole set of finite A and B pairs of `adapter.rank`.
        StorageError: the disk is full, or `folder` holds something else than an adapter.
    """
    from safetensors.numpy import save

    tensors = {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in adapter.tensors.items()}
    rank = check_tensors(tensors, str(folder))
    if rank != adapter.rank:
        message = f"adapter for {folder}: field 'rank'"
        raise ArtifactError(message, expected=f"{rank}, as the tensors have it", received=adapter.rank)
    metadata = {"format": "pt", DIGEST_KEY: digest(tensors)}
    data = save({PEFT_PREFIX + name: value for name, value in tensors.items()}, metadata=metadata)
    config = json.dumps(peft_config(adapter), indent=2, sort_keys=True) + "\n"
    with atomic_directory(folder, marker=CONFIG_NAME) as partial:
        (partial / WEIGHTS_NAME).write_bytes(data)
        (partial / CONFIG_NAME).write_text(config, encoding="utf-8")


def peft_config(adapter: Adapter) -> dict[str, Any]:
    """The `adapter_config.json` of `adapter`: keys that every PEFT since 0.8 knows."""
    alpha = int(adapter.alpha) if float(adapter.alpha).is_integer() else float(adapter.alpha)
    modules, layers = _modules_and_layers(adapter)
    return {
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


def load_adapter(folder: str | Path) -> Adapter:
    """Read a PEFT LoRA adapter, or mlx-lm's. Tensors become float32; rank-stabilised LoRA's scale is folded into alpha.

    Raises:
        ArtifactError: a file is missing, torn, changed, pickled, or of a kind that is not plain LoRA; the
            error names the file and the field or tensor.
    """
    folder = Path(folder)
    if is_mlx_lm(folder):
        return load_mlx_lm_adapter(folder)
    config_path, weights_path = folder / CONFIG_NAME, folder / WEIGHTS_NAME
    config = read_config(config_path)
    check_kind(config, config_path)
    tensors = read_tensors(weights_path)
    rank = check_tensors(tensors, str(weights_path))
    if config.get("r") != rank:
        raise ArtifactError(
            f"{config_path}: field 'r' does not fit {WEIGHTS_NAME}", expected=rank, received=config.get("r")
        )
    alpha = config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ArtifactError(f"{config_path}: field 'lora_alpha'", expected="a number", received=alpha)
    if config.get("use_rslora"):
        alpha = alpha * math.sqrt(rank)
    base_model = config.get("base_model_name_or_path") or ""
    adapter = Adapter(tensors, rank, float(alpha), targets_of(tensors), base_model)
    check_targets(adapter.linears, config, config_path)
    return adapter


def _modules_and_layers(adapter: Adapter) -> tuple[list[str], list[int] | None]:
    """PEFT's `target_modules` and `layers_to_transform` that name exactly this adapter's linear layers."""
    linears = adapter.linears
    layers = sorted({_layer_of(name) for name in linears})
    if -1 in layers or len(linears) != len(layers) * len(adapter.targets):
        return sorted(linears), None
    return sorted(adapter.targets), None if layers == list(range(len(layers))) else layers


def _layer_of(linear: str) -> int:
    match = _LAYER.search(linear)
    return int(match[1]) if match else -1
