"""GGUF's names of a model's tensors, by the tables of the `gguf` package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.errors import ModelError
from ondevice.models.sources.cache import missing

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.models.families.base import Family

_WHOLE, _HALVES = "experts.gate_up_proj", ("experts.gate_proj", "experts.up_proj")
"""transformers keeps the experts' gate and up matrices as one tensor, GGUF as two."""


def gguf_parts(
    family: type[Family], dims: ModelDims, names: list[str], architecture: str | None
) -> dict[str, tuple[str, ...]]:
    """Map each of transformers' tensors to its tensor in a file, or to its two halves along the second dimension.

    Raises:
        ModelError: the architecture has no name for one of them.
        MissingPackageError: the package `gguf` is not installed.
    """
    halves = {
        name: tuple(name.replace(_WHOLE, half) for half in _HALVES)
        for name in names
        if name.endswith(_WHOLE)
    }
    found = gguf_names(
        family, dims, [part for name in names for part in halves.get(name, (name,))], architecture
    )
    # transformers gives the experts' tensors no suffix.
    named = {
        part: name if name.endswith((".weight", ".bias")) else f"{name}.weight"
        for part, name in found.items()
    }
    return {name: tuple(named[part] for part in halves.get(name, (name,))) for name in names}


def gguf_names(
    family: type[Family], dims: ModelDims, names: list[str], architecture: str | None
) -> dict[str, str]:
    """Map transformers' names to GGUF's; errors as `gguf_parts`."""
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError:
        raise missing("gguf") from None
    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        raise ModelError(
            f"the installed package gguf does not know {architecture!r}", hint="pip install -U gguf"
        )
    table = get_tensor_name_map(kind, dims.layers)
    found = {name: table.get_name(name, (".weight", ".bias")) for name in names}
    for name, gguf_name in found.items():
        if gguf_name is None:
            raise ModelError(
                f"'{name}' has no name in GGUF files of architecture {architecture}",
                expected="a tensor that llama.cpp reads",
                received=name,
                hint="--to peft or --to safetensors",
            )
    return {name: str(gguf_name) for name, gguf_name in found.items()}
