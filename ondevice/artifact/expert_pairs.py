"""Adapters of the matrices of experts, one parameter [experts, outputs, inputs] a layer: names and
layout.

Here a pair is named for its parameter: `model.layers.0.mlp.experts.down_proj.lora_A.weight`
[experts * rank, inputs], and `lora_B` [outputs, rank * experts]. PEFT (0.17 and later,
`target_parameters`) writes the same numbers under the name of the module, with `.base_layer` for
each parameter of it that comes later.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from ondevice.core.errors import ArtifactError
from ondevice.core.traits import EXPERT_PARAMETERS, is_expert_parameter

_MODULE = re.compile(r"\.experts(\.base_layer)*$")
_INNER = ".base_layer"


def change_of(a: np.ndarray, b: np.ndarray, experts: int) -> np.ndarray:
    """Compute B A of every expert.

    Args:
        a: float32 [experts * rank, inputs].
        b: float32 [outputs, rank * experts].

    Returns:
        float32 [experts, outputs, inputs].
    """
    a_ERI = a.reshape(experts, -1, a.shape[1])
    b_ORE = b.reshape(b.shape[0], -1, experts)
    return np.matmul(b_ORE.transpose(2, 0, 1), a_ERI)


def peft_names(names: Iterable[str]) -> dict[str, str]:
    """Map the full names of parameters to the modules' names under which PEFT keeps their pairs."""
    result: dict[str, str] = {}
    modules: dict[str, list[str]] = {}
    for name in names:
        module, _, parameter = name.rpartition(".")
        modules.setdefault(module, []).append(parameter)
    for module, held in modules.items():
        ordered = sorted(held, key=EXPERT_PARAMETERS.index)
        for place, parameter in enumerate(ordered):
            result[f"{module}.{parameter}"] = module + _INNER * (len(ordered) - 1 - place)
    return result


def own_names(
    stored: Iterable[str], target_parameters: Iterable[str], where: str
) -> dict[str, str]:
    """Map PEFT's names of the modules that have pairs to names of parameters, those of plain layers
    to themselves.

    Args:
        stored: full names of modules, as tensors have them.
        target_parameters: of PEFT's configuration.

    Raises:
        ArtifactError: a parameter that is not one of experts; or the tensors are not of these
            parameters.
    """
    targets = list(target_parameters)
    for target in targets:
        if not is_expert_parameter(target):
            raise ArtifactError(
                f"{where}: field 'target_parameters' names '{target}'",
                expected=" or ".join(f"experts.{name}" for name in EXPERT_PARAMETERS),
                received=target,
                hint="adapters of other parameters cannot be used; merge such an adapter with PEFT",
            )
    stored = list(stored)
    modules = dict.fromkeys(name.replace(_INNER, "") for name in stored if _MODULE.search(name))
    every = [f"{module}.{parameter}" for module in modules for parameter in EXPERT_PARAMETERS]
    full = [name for name in every if any(f".{name}".endswith(f".{target}") for target in targets)]
    back = {theirs: own for own, theirs in peft_names(full).items()}
    missing = sorted(set(back) - set(stored))
    beyond = [
        name for name in stored if name not in back and (name.endswith(_INNER) or name in modules)
    ]
    if missing or beyond or (targets and not full):
        raise ArtifactError(
            f"{where}: field 'target_parameters' does not match the tensors",
            expected=", ".join((missing or beyond or targets)[:4]),
            received=", ".join(targets) or "nothing",
            hint="copy adapter_config.json and adapter_model.safetensors together",
        )
    return {name: back.get(name, name) for name in stored}
