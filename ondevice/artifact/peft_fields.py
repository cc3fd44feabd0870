"""The fields of PEFT's `adapter_config.json`: a list of those that plain LoRA may have. Any other
must be off.

PEFT adds fields with every release, and most of them make another computation of the same two
matrices. A field that is not listed here is therefore refused by its name unless its value is null,
false or empty.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.core.errors import ArtifactError

WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision",  # its origin
    "lora_dropout",  # of its training; what was trained has none
    "fan_in_fan_out",  # how the base model stores the weight
    "exclude_modules", "layers_pattern",  # which modules got a pair, as the tensors have it
    "megatron_core", "qalora_group_size",  # read only with `megatron_config` and `use_qalora`, which must be off
})  # fmt: skip
"""Fields that say nothing about what the saved matrices compute."""
READ = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "target_modules", "target_parameters", "layers_to_transform",
})  # fmt: skip
"""Fields that the reader follows, or holds against the tensors."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    # The other initialisations (pissa, olora, corda, loftq, ...) also change the base model's
    # weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Fields that may have these values only."""
MOST_RANK = 1024
"""Highest rank of a pair if ranks differ: all pairs are padded to it."""
_PLAIN = re.compile(r"\^?[\w.\-]+\$?")
HINT = "only plain LoRA can be used; merge such an adapter with PEFT's merge_and_unload"


def check_fields(config: dict[str, Any], path: Path) -> None:
    """Refuse every variant of LoRA that W + scale B A does not describe.

    Raises:
        ArtifactError: naming the first field whose value is not one of plain LoRA's.
    """
    for field in ("peft_type", *sorted(config.keys() - {"peft_type"})):
        value = config[field]
        if field in WITHOUT_EFFECT or field in READ:
            continue
        if field == "eva_config" and config.get("init_lora_weights") == "eva":
            continue  # how A was found; the base model's weights stay as they are
        if field in ALLOWED:
            if not any(
                value is one or (isinstance(one, str) and value == one) for one in ALLOWED[field]
            ):
                words = {None: "null", True: "true", False: "false"}
                expected = " or ".join(words.get(one, str(one)) for one in ALLOWED[field])
                raise _wrong(path, field, expected, value)
        elif not is_off(value):
            raise _wrong(path, field, "null, false or nothing", value)
    if not isinstance(config.get("use_rslora") or False, bool):
        raise _wrong(path, "use_rslora", "true or false", config["use_rslora"])
    if not is_number(config.get("lora_alpha")):
        raise _wrong(path, "lora_alpha", "a number", config.get("lora_alpha"))


def is_off(value: Any) -> bool:
    """Return True for a value that switches a field off: null, false or something empty."""
    return value is None or value is False or value in ({}, [])


def is_number(value: Any) -> bool:
    """Return True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_layers(
    linears: tuple[str, ...], layer_of: Any, config: dict[str, Any], path: Path
) -> None:
    """Refuse tensors of layers that `layers_to_transform` leaves out: PEFT would not apply them.

    Raises:
        ArtifactError: naming the field.
    """
    layers = config.get("layers_to_transform")
    if layers is None or layers == []:
        return
    if isinstance(layers, int):
        layers = [layers]
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise _wrong(path, "layers_to_transform", "a list of layer numbers", layers)
    for linear in linears:
        if layer_of(linear) not in layers:
            raise _wrong(
                path, "layers_to_transform", f"the layer of {linear}, which has tensors", layers
            )


def fold_patterns(
    tensors: dict[str, np.ndarray], config: dict[str, Any], path: Path
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return an equal adapter with one rank and one alpha, and its configuration.

    `rank_pattern` and `alpha_pattern` give single layers another rank or alpha. A pair of lower
    rank gets zeros, and if the scale differs, B is multiplied by the ratio; a pair with the default
    scale keeps its bits.

    Args:
        tensors: `<linear>.lora_A.weight` [rank, inputs] and `<linear>.lora_B.weight` [outputs,
            rank].

    Raises:
        ArtifactError: a pattern that is more than a name, or that the tensors contradict.
    """
    ranks, alphas = (_patterns(config, field, path) for field in ("rank_pattern", "alpha_pattern"))
    if not ranks and not alphas:
        return tensors, config
    if config.get("target_parameters"):
        raise _wrong(
            path,
            "rank_pattern" if ranks else "alpha_pattern",
            "nothing, with target_parameters",
            ranks,
        )
    own = {
        name: value.shape["lora_B" in name] for name, value in tensors.items() if value.ndim == 2
    }
    most = max(own.values(), default=0)
    default = scale(config.get("lora_alpha"), config.get("r"), config)
    if not default:
        raise _wrong(
            path,
            "lora_alpha",
            "other than 0, with a rank of 1 or more in 'r'",
            config["lora_alpha"],
        )
    if most > MOST_RANK:
        raise _wrong(path, "rank_pattern", f"ranks of at most {MOST_RANK}", most)
    folded = {}
    for name, value in tensors.items():
        linear = name.rpartition(".lora_")[0]
        rank = _of(ranks, linear, config.get("r"))
        alpha = _of(alphas, linear, config["lora_alpha"])
        if own.get(name) != rank:
            raise _wrong(
                path, "rank_pattern", f"rank {own.get(name)} for {linear}, as {name} has it", rank
            )
        if "lora_B" in name:
            factor = scale(alpha, rank, config) / default
            if factor != 1:
                value = (value * factor).astype(np.float32)
            folded[name] = np.pad(value, ((0, 0), (0, most - rank)))
        else:
            folded[name] = np.pad(value, ((0, most - rank), (0, 0)))
    one = {
        "r": most,
        "lora_alpha": default * most,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    return folded, config | one


def scale(alpha: Any, rank: Any, config: dict[str, Any]) -> float:
    """Return alpha / rank, or alpha / sqrt(rank) of rank-stabilised LoRA; 0 without a rank."""
    if type(rank) is not int or rank < 1:
        return 0.0
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _patterns(config: dict[str, Any], field: str, path: Path) -> dict[re.Pattern[str], Any]:
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or not all(is_number(value) for value in patterns.values()):
        raise _wrong(path, field, "numbers by the names of layers", patterns)
    for name in patterns:
        if not _PLAIN.fullmatch(name):  # a regular expression from a file can run without end
            raise _wrong(path, field, "names of layers, and no other regular expressions", name)
    # As `peft.utils.other.get_pattern_key` has it; the first one that fits counts.
    return {re.compile(rf"(.*\.)?({name})$"): value for name, value in patterns.items()}


def _of(patterns: dict[re.Pattern[str], Any], linear: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if pattern.match(linear)), default)


def _wrong(path: Path, field: str, expected: str, received: Any) -> ArtifactError:
    return ArtifactError(
        f"{path}: field '{field}'", expected=expected, received=received, hint=HINT
    )
