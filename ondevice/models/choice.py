"""The method of a run that names none: the first by preference that takes the model, and its
program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.capabilities import AnyDecoder, Asked, Classifies, KnowsBlocks
from ondevice.core.errors import OndeviceError
from ondevice.core.registry import DEFAULT_METHOD, method, methods, target
from ondevice.models.load import read_dims
from ondevice.models.open import check_has_files

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.method import MethodSpec


def choose_method(
    source: str,
    revision: str | None = None,
    target_name: str | None = None,
    dims: ModelDims | None = None,
) -> tuple[str, str]:
    """Return a method's name, and the sentence that says it was chosen.

    Args:
        source: of the model; of one that cannot be read nothing is known, and its own error comes
            later.
        target_name: of an export, whose program the method must have.
        dims: of a model that is loaded.
    """
    preferred = sorted(
        (spec for spec in methods() if spec.preference), key=lambda spec: spec.preference
    )
    if target_name is not None:
        kind = target(target_name).kind
        preferred = [spec for spec in preferred if kind in spec.programs]
    try:
        dims = dims or read_dims(source, revision)
        able = [spec for spec in preferred if takes(spec, dims)]
    except OndeviceError:
        able = preferred
    chosen = (able or [method(DEFAULT_METHOD)])[0]
    others = ", ".join(spec.name for spec in able if spec is not chosen)
    more = ""
    if others:
        more = f"; others: {others}, or any of `--method`"
    return chosen.name, f"method {chosen.name}: {chosen.summary}{more}"


def trains(spec: MethodSpec, config: Any) -> bool:
    """Return True if the run `config`, with this method's own settings instead, would not be refused."""
    backend = config.train.backend
    if backend == "auto":
        backend = "torch"
    try:
        settings = spec.for_training(spec.config())
        dims = read_dims(config.model.source, config.model.revision)
        asked = Asked(
            settings,
            dims,
            config.model.source,
            config.model.dtype,
            backend,
            "cpu",
            config.train.batch_size,
        )
        if spec.reads_files(settings, backend):
            check_has_files(config.model.source)
        spec.check_run(asked)
        if hasattr(settings, "target_modules"):
            dims.resolve_targets(settings)
        if config.data.packing:
            spec.check_packing(backend, dims.whole)
    except OndeviceError:
        return False
    return config.train.objective == "loss" or spec.order == "zeroth"


def takes(spec: MethodSpec, dims: ModelDims) -> bool:
    """True if the blocks of a model have what the method's default settings ask for."""
    if getattr(dims, "whole", False):  # blocks of which nothing is known
        any_decoder = spec.capability(AnyDecoder)
        return any_decoder is not None and not any_decoder.tries
    blocks = spec.capability(KnowsBlocks)
    if blocks is not None and not blocks.knows(dims):
        return False
    if getattr(dims, "classes", 0):
        return spec.capability(Classifies) is not None
    try:
        dims.resolve_targets(spec.config())  # fused layers take the place of a default's names
    except OndeviceError:
        return False
    return True
