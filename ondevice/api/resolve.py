"""The road of a run: decide its open settings, plan it, and train."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ondevice.core.capabilities import DecidesFromMemory, Offloads
from ondevice.core.errors import ConfigError, Need
from ondevice.core.registry import naming_methods
from ondevice.models import read_dims
from ondevice.models.choice import trains
from ondevice.nn.adapters import has_adapter
from ondevice.planning.advice import measure
from ondevice.planning.estimate import plan_run
from ondevice.planning.fits import does_not_fit, memory_limit
from ondevice.training import choices
from ondevice.training.check import check_run
from ondevice.training.choices import place
from ondevice.training.fit import Trained, train_model
from ondevice.training.identity import (
    DATE,
    LENGTH,
    METHOD_NAME,
    date_of,
    iso,
    placement_of,
    recorded_decisions,
    with_decisions,
    with_placement,
)
from ondevice.training.objective import SCORES, with_objective
from ondevice.training.options import Options
from ondevice.training.rows import OpenedRows, maximum_length
from ondevice.training.trained import adapter_folder

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import ModelConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.method import Placement
    from ondevice.models import LoadedModel
    from ondevice.planning.estimate import Plan

log = logging.getLogger("ondevice.planning")
ADAPTER_TAKEN_OUT = (
    "the adapter of an earlier run is taken out of the model; adapter=RUN would go on from it"
)
BASE_STAYS_ROUNDED = (
    "method.base: {} rounds the weights of the given model in memory, and they stay rounded; "
    "load the model again to have its own"
)


def options_of(adapter: Any = None, sinks: Any = (), callbacks: Any = (), **others: Any) -> Options:
    """Return the options of a run; the adapter may be given as the run that trained it.

    A callback is looked at when the run calls it.

    Raises:
        ArtifactError: the adapter does not exist.
        ConfigError: an argument is of the wrong type.
    """
    for name, values in (("sinks", sinks), ("callbacks", callbacks)):
        if not isinstance(values, Iterable) or isinstance(values, str):
            raise ConfigError(
                f"{name} are of the wrong type",
                expected="a list of them",
                received=type(values).__name__,
            )
    options = Options(sinks=tuple(sinks), callbacks=tuple(callbacks), **others)
    for sink in options.sinks:
        if not callable(sink):
            received = type(sink).__name__
            raise ConfigError(
                "a sink is of the wrong type", expected="a function of an event", received=received
            )
    if adapter is None:
        return options
    return replace(options, adapter=adapter_folder(adapter))


@dataclass(frozen=True)
class Decided:
    """A run with nothing left open: its settings, its place on this machine, its options and its plan.

    Attributes:
        recorded: what the run that is resumed decided; empty for a new one.
    """

    config: RunConfig
    placement: Placement
    options: Options
    plan: Plan
    recorded: dict[str, Any]


def run(config: RunConfig, options: Options, force: bool = False) -> Trained:
    """Decide what a run leaves open, plan it, and train.

    Its rows are known to be there (`RunConfig.check_data`).

    Raises:
        OndeviceError: as `ondevice.train`.
    """
    with naming_methods(partial(trains, config=config)):
        decided = _decide(config, options)
        if not (decided.plan.fits or force):
            raise does_not_fit(decided.plan)
        limit = decided.config.train.memory_limit_bytes
        with (
            nullcontext() if limit is None else memory_limit(limit, decided.plan),
            choices.threads(decided.placement, decided.recorded) as threads,
        ):
            options = replace(decided.options, decided=decided.options.decided | threads)
            return train_model(decided.config, decided.placement, options)


def check(config: RunConfig, options: Options) -> Decided:
    """Decide what a run leaves open and plan it; refuse what `run` would refuse, except a plan that does not fit.

    Nothing is written, and the model's weights are not loaded.

    Raises:
        OndeviceError: as `run`.
    """
    with naming_methods(partial(trains, config=config)):
        decided = _decide(config, options)
        check_run(decided.config, decided.placement, decided.options)
    return decided


def _decide(config: RunConfig, options: Options) -> Decided:
    """Decide what a run leaves open, and plan it."""
    opened = options.rows or OpenedRows(config.data)
    loaded = options.loaded
    resumes = options.resume and not options.overwrite
    recorded = recorded_decisions(config.train.out) if resumes else {}
    decided: dict[str, Any] = {}
    if config.chosen:
        decided[METHOD_NAME] = config.method.name
    decided[DATE] = recorded.get(DATE) or iso(time.time())
    if recorded:
        config = with_decisions(config, choices.usable(recorded, config))
    config = config.for_training()
    placement = place(config.method, config.train, config.model.device)
    decided |= choices.machine_choices(config.train.backend, config.model.device, placement)
    _check_method(config.method, config.train.objective, placement, loaded)
    if config.data.packing:
        _check_packing(config.model, placement, loaded)
    train, said = with_objective(config.train, config.method, placement, opened)
    chosen = choices.precision_of(config.model, config.method, placement)
    decided |= chosen.decided
    config = config.model_copy(
        update={"train": train, "model": chosen.model, "method": chosen.method}
    )
    dims = loaded and loaded.dims
    length, notes = maximum_length(
        config.model,
        opened,
        loaded,
        date_of(decided),
        fits=lambda tokens: plan_run(config.of_length(tokens), placement, dims).fits,
    )
    if config.data.max_length_tokens is None:
        config = config.of_length(length)
        decided[LENGTH] = length
    messages = [*said, *chosen.notes]
    if config.chosen:
        messages = [config.chosen, *messages]
    if loaded is not None and has_adapter(loaded.model):
        messages = [*messages, ADAPTER_TAKEN_OUT]
    base = getattr(config.method, "base", None)
    if loaded is not None and base:
        messages = [*messages, BASE_STAYS_ROUNDED.format(base)]
    placed = with_placement(config, recorded) if recorded else None
    plan = _plan(config, placement, dims, placed)
    resolved = None
    if placement.spec.capability(DecidesFromMemory):
        resolved = plan.request.method
        messages += filter(None, [plan.request.why])
        decided |= placement_of(config.method, resolved)
    kernels = choices.kernels_of(config.method, placement, recorded)
    decided |= {choices.KERNELS: kernels} if kernels else {}
    options = replace(
        options,
        rows=opened,
        notes=notes,
        said=tuple(messages),
        resolved=resolved,
        kernels=kernels,
        decided=decided,
    )
    return Decided(config, placement, options, plan, recorded)


def _check_method(
    method: Any, objective: str, placement: Placement, loaded: LoadedModel | None
) -> None:
    """Refuse what the run asks for and its method cannot do.

    Raises:
        ConfigError: a score without a zeroth-order method, or a model in memory for a method that
            reads files.
    """
    spec = placement.spec
    if objective in SCORES and spec.order != "zeroth":
        raise ConfigError(
            f"method {spec.name} needs a gradient, and a score has none",
            expected=f"a zeroth-order method for train.objective {objective}",
            received=f"method {spec.name}",
            hint="train.objective loss works with every method",
            needs=Need.ZEROTH_ORDER,
        )
    if loaded is not None and spec.reads_files(method, placement.backend):
        raise ConfigError(
            f"method {spec.name} reads the weights from files here, and the model is in memory",
            expected="--backend torch, method.weight_placement: resident",
            received=placement.backend,
            hint="save_pretrained it, and give the folder as model.source",
        )


def _check_packing(model: ModelConfig, placement: Placement, loaded: LoadedModel | None) -> None:
    """Refuse with ConfigError packed rows that would not be kept apart."""
    dims = loaded.dims if loaded else read_dims(model.source, model.revision)
    placement.spec.check_packing(placement.backend, dims.whole)
    if dims.classes:
        raise ConfigError(
            "an encoder takes one row a sequence", received="data.packing", hint="leave it out"
        )


def _plan(
    config: RunConfig, placement: Placement, dims: ModelDims | None, placed: RunConfig | None
) -> Plan:
    """Plan a run; on a GPU, `auto` settings of a method that offloads first need its rates, which
    takes some seconds.

    Args:
        placed: the same run with settings that were decided before, which hold if it still fits.
    """
    if placed is not None:
        plan = plan_run(placed, placement, dims)
        if plan.fits:
            return plan
        log.warning("the placement that this run began with no longer fits: it is decided again")
    plan = plan_run(config, placement, dims)
    decides = plan.request.method != config.method
    offloads = placement.spec.capability(Offloads) is not None
    if decides and offloads and placement.device == "cuda" and placement.world == 1:
        plan = plan_run(config, placement, dims, measure(plan))
    return plan
