"""Adapters next to a loaded model's layers: put there, for a while or for good, and summed into the
weights."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ondevice.artifact.expert_pairs import change_of
from ondevice.core.errors import ArtifactError
from ondevice.models.rounded import round_weights, rounded_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from ondevice.artifact.adapter import Adapter
    from ondevice.models import LoadedModel

_log = logging.getLogger(__name__)


def has_adapter(model: Any) -> bool:
    """Return whether an adapter is next to some layers of a model."""
    return any(isinstance(module, _lora_linear()) for module in model.modules())


def take_out(model: Any) -> dict[str, Any]:
    """Take the adapter out of a model; return its layers by full name, for `put_back`."""
    kind = _lora_linear()
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, kind):
            layers[name] = module
    put_back(model, {name: layer.base for name, layer in layers.items()})
    return layers


def put_back(model: Any, layers: Mapping[str, Any]) -> None:
    """Replace the layers of these full names."""
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Take the adapter of a model out for the duration of a block."""
    layers = take_out(model)
    try:
        yield
    finally:
        put_back(model, layers)


def _lora_linear() -> Any:
    from ondevice.nn.lora import LoRALinear

    return LoRALinear


def apply_adapter(loaded: LoadedModel, adapter: Adapter) -> None:
    """Put `adapter` next to the linear layers it names, in place; an error changes nothing.

    Its changes of experts are added to their matrices at once. If it was trained on rounded
    weights, the model's are rounded so before.

    Raises:
        ArtifactError: a tensor of the adapter matches no linear layer of the model or has another
            shape, or the model has an adapter already.
    """
    lora_linear = _lora_linear()
    family = loaded.family
    dims = loaded.dims
    # Check every tensor first: a model with a part of an adapter is another model.
    listed = (*dims.linear_list, *dims.expert_list)
    places = {family.linear_name(linear.layer, linear.target): linear for linear in listed}
    for name in adapter.linears:
        if name not in places:
            raise ArtifactError(
                f"not a linear layer of {loaded.source.source}: the adapter's '{name}'",
                expected=f"{dims.layers} layers with {', '.join(dims.linear_shapes)}",
                received=name,
                hint=f"the adapter was trained on {adapter.base_model or 'an unnamed model'}",
            )
        linear = places[name]
        (a, b) = adapter.pair(name)
        ranks = adapter.rank * linear.experts
        expected = ((ranks, linear.inputs), (linear.outputs, ranks))
        if (a.shape, b.shape) != expected:
            raise ArtifactError(
                f"the adapter does not fit '{name}' of {loaded.source.source}",
                expected=f"A {expected[0]}, B {expected[1]}",
                received=f"A {a.shape}, B {b.shape}",
                hint=f"the adapter was trained on {adapter.base_model or 'an unnamed model'}",
            )
        if linear.experts == 1 and isinstance(family.module(name), lora_linear):
            raise ArtifactError(f"'{name}' has an adapter already", hint="load the model again")
    if adapter.base_model and adapter.base_model not in (
        loaded.source.source,
        str(loaded.source.path),
    ):
        _log.warning(
            "the adapter was trained on %s, not on %s", adapter.base_model, loaded.source.source
        )
    if adapter.base_weights:
        round_weights(loaded, adapter.base_weights)
    experts = adapter.expert_parameters
    family.check_adapted([name for name in adapter.linears if name not in experts])
    for name in experts:
        _add_to_experts(loaded, name, adapter)
    for name in adapter.linears:
        if name in experts:
            continue
        base = family.module(name)
        family.replace(
            name, lora_linear.from_base(base, adapter.rank, adapter.alpha, *adapter.pair(name))
        )


def _add_to_experts(loaded: LoadedModel, name: str, adapter: Adapter) -> None:
    """Replace a parameter with a matrix for each expert by W + (alpha / rank) B A, rounded once."""
    import torch

    module, _, parameter = name.rpartition(".")
    holder = loaded.family.module(module)
    weight = getattr(holder, parameter)
    change = torch.from_numpy(
        change_of(*adapter.pair(name), len(weight)) * (adapter.alpha / adapter.rank)
    )
    total = (weight.float() + change.to(weight.device)).to(weight.dtype)
    setattr(holder, parameter, torch.nn.Parameter(total, requires_grad=False))


@contextmanager
def adapted(loaded: LoadedModel, adapter: Adapter) -> Iterator[None]:
    """Apply an adapter for the duration of a block, which takes less time than loading the
    model."""
    family = loaded.family
    names = [family.linear_name(linear.layer, linear.target) for linear in loaded.dims.linear_list]
    before = {name: family.module(name) for name in names}
    experts = [name.rpartition(".")[::2] for name in adapter.expert_parameters]
    held = [(module, name, _held(loaded, module, name)) for module, name in experts]
    with rounded_weights(loaded, adapter.base_weights):
        try:
            apply_adapter(loaded, adapter)
            yield
        finally:
            for name, linear in before.items():
                family.replace(name, linear)
            for module, name, parameter in held:
                if parameter is not None:
                    setattr(family.module(module), name, parameter)


def _held(loaded: LoadedModel, module: str, parameter: str) -> Tensor | None:
    """Return a parameter; None if the model has no such one, which `apply_adapter` refuses."""
    try:
        return getattr(loaded.family.module(module), parameter, None)
    except AttributeError:
        return None


def fuse_in_place(loaded: LoadedModel) -> int:
    """Replace every layer that has an adapter by one linear layer; return how many there were."""
    lora_linear = _lora_linear()
    family = loaded.family
    count = 0
    for linear in loaded.dims.linear_list:
        name = family.linear_name(linear.layer, linear.target)
        module: Any = family.module(name)
        if isinstance(module, lora_linear):
            family.replace(name, module.fuse())
            count += 1
    return count
