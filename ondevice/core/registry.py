"""Methods and targets by name: folders of `ondevice/methods` and `exporters`, and entry points of other packages."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

from ondevice.core.capabilities import (
    AnyDecoder,
    Classifies,
    LearnsPreferences,
    Offloads,
    Packs,
    Ranked,
    Writes,
)
from ondevice.core.errors import ConfigError, Need, OndeviceError
from ondevice.core.method import Backend, MethodSpec, metal
from ondevice.core.near import nearest_value
from ondevice.core.target import TargetSpec

if TYPE_CHECKING:
    from ondevice.core.session import Session

log = logging.getLogger("ondevice.core")
GROUP = "ondevice.methods"
"""The package whose folders are methods, and the entry point group of methods elsewhere."""
TARGET_GROUP = "ondevice.targets"
"""The entry point group of targets outside `exporters`."""
EXPORTERS = "ondevice.exporters"
DEFAULT_METHOD = "mesp"


@cache
def _places() -> dict[str, str | EntryPoint]:
    """Map every method's name to the place of its spec; ours win over a foreign one of the same name."""
    package = importlib.import_module(GROUP)
    places: dict[str, str | EntryPoint] = {entry.name: entry for entry in entry_points(group=GROUP)}
    # Ours are entered last: an installed package must not change what `--method prge` means.
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            places[module.name.replace("_", "-")] = f"{GROUP}.{module.name}"
    return dict(sorted(places.items()))


def method_names() -> tuple[str, ...]:
    """List the names of all methods, in alphabetical order; nothing of a method is imported."""
    return tuple(_places())


def method(name: str) -> MethodSpec:
    """Return the spec of method `name`, as a run file or a job says it: anything may stand there.

    Raises:
        ConfigError: it is unknown, or another package's cannot be imported.
    """
    if not isinstance(name, str) or name not in _places():
        near = nearest_value(name, method_names())
        raise ConfigError(
            f"unknown method '{name}'",
            expected=", ".join(method_names()),
            received=name,
            hint=near and f"did you mean '{near}'?",
        )
    return _spec(name)


@cache
def _spec(name: str) -> MethodSpec:
    place = _places()[name]
    if isinstance(place, str):
        return importlib.import_module(place).METHOD
    return _foreign(place, MethodSpec)


def methods() -> tuple[MethodSpec, ...]:
    """Return all specs; one of another package that cannot be imported is left out, with a warning."""
    places = _places()
    return tuple(
        _all(method, places, {name for name, place in places.items() if isinstance(place, str)})
    )


@cache
def _target_places() -> dict[str, TargetSpec | EntryPoint]:
    """Map every target's name to its spec, or to where that is; ours win over a foreign one of the same name.

    A folder may hold several targets, so our packages are imported for their names; they import nothing themselves.
    """
    targets: dict[str, TargetSpec | EntryPoint] = {
        entry.name: entry for entry in entry_points(group=TARGET_GROUP)
    }
    package = importlib.import_module(EXPORTERS)
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg:
            inside = importlib.import_module(f"{EXPORTERS}.{module.name}")
            specs = [
                *getattr(inside, "TARGETS", ()),
                *filter(None, [getattr(inside, "TARGET", None)]),
            ]
            targets |= {spec.name: spec for spec in specs}
    return dict(sorted(targets.items()))


def target_names() -> tuple[str, ...]:
    """Return the names of all targets, in alphabetical order."""
    return tuple(_target_places())


@cache
def target(name: str) -> TargetSpec:
    """Return the spec of target `name`.

    Raises:
        ConfigError: it is unknown, or another package's cannot be imported.
    """
    place = None
    if isinstance(name, str):
        place = _target_places().get(name)
    if place is None:
        raise ConfigError(
            f"unknown target '{name}'", expected=", ".join(target_names()), received=name
        )
    if isinstance(place, TargetSpec):
        return place
    return _foreign(place, TargetSpec)


def targets() -> tuple[TargetSpec, ...]:
    """Return all specs; one of another package that cannot be imported is left out, with a warning."""
    places = _target_places()
    return tuple(
        _all(
            target,
            places,
            {name for name, place in places.items() if isinstance(place, TargetSpec)},
        )
    )


def _foreign(place: EntryPoint, kind: type) -> Any:
    """Load the spec at another package's entry point, and check it."""
    what = "method" if kind is MethodSpec else "target"
    try:
        spec = place.load()
    except Exception as error:  # whatever a foreign package does at import
        raise ConfigError(
            f"{what} '{place.name}' cannot be imported: {type(error).__name__}: {error}",
            expected=f"a {kind.__name__} at {place.value}",
            hint=f"repair or uninstall the package that offers it ({place.value.partition(':')[0]})",
        ) from None
    if not isinstance(spec, kind) or getattr(spec, "name", None) != place.name:
        raise ConfigError(
            f"{what} '{place.name}' is not what its package says",
            expected=f"a {kind.__name__} named {place.name} at {place.value}",
            received=getattr(spec, "name", type(spec).__name__),
        )
    return spec


def _all(find: Any, names: Iterable[str], ours: set[str]) -> Iterator[Any]:
    """Yield every spec that can be imported; ours must be."""
    for name in names:
        try:
            yield find(name)
        except ConfigError as error:
            if name in ours:
                raise
            log.warning("%s", error)


_HAS: dict[Need, Callable[[MethodSpec], bool]] = {
    Need.ANY_DECODER: lambda spec: spec.capability(AnyDecoder) is not None,
    Need.ADAPTS_EXPERTS: lambda spec: bool(getattr(spec.config, "adapts_experts", False)),
    Need.CLASSIFIES: lambda spec: spec.capability(Classifies) is not None,
    Need.PACKS: lambda spec: spec.capability(Packs) is not None,
    Need.OFFLOADS: lambda spec: spec.capability(Offloads) is not None,
    Need.RANKS: lambda spec: spec.capability(Ranked) is not None,
    Need.TRAINS_ALL: lambda spec: spec.trains == "all",
    Need.ZEROTH_ORDER: lambda spec: spec.order == "zeroth",
    Need.PREFERENCES: lambda spec: spec.capability(LearnsPreferences) is not None,
    Need.REWARDS: lambda spec: spec.capability(Writes) is not None,
    Need.TORCH: lambda spec: "torch" in spec.sessions,
    Need.MLX: lambda spec: "mlx" in spec.sessions,
}


Able = Callable[[MethodSpec], bool]
"""Whether a method would do what was refused, such as train the run's model in its backend."""


def name_methods(error: OndeviceError, able: Able = lambda spec: True) -> None:
    """Add the names of the methods that have what `error` needs, once; for the command line and the API."""
    if error.needs is not None and error.methods is None:
        has = _HAS[error.needs]
        error.methods = tuple(spec.name for spec in methods() if has(spec) and able(spec))


@contextmanager
def naming_methods(able: Able = lambda spec: True) -> Iterator[None]:
    """Name the methods that would do in an error that leaves this block or function.

    Args:
        able: asked of each method that has what the error needs, so that advice is never refused.
    """
    try:
        yield
    except OndeviceError as error:
        name_methods(error, able)
        raise


def spec_of(config: Any) -> MethodSpec:
    """Return the spec of the method that `config` has the settings of.

    Raises:
        ConfigError: it has no method's settings.
    """
    if not hasattr(config, "name"):
        raise ConfigError(
            "a method's settings are of the wrong type",
            expected="ondevice.method_config(NAME)",
            received=type(config).__name__,
        )
    return method(config.name)


def method_config(name: str, values: dict[str, Any] | None = None) -> Any:
    """Build the settings of method `name`, with `values` over the defaults.

    Raises:
        ConfigError: for an unknown method, an unknown key or a wrong value.
    """
    return method(name).config.parse(
        {**(values or {}), "name": name}, "method", elsewhere=_keys_elsewhere
    )


def _keys_elsewhere() -> dict[str, set[str]]:
    """Map every setting of any method to the names of the methods that have it."""
    keys: dict[str, set[str]] = {}
    for spec in methods():
        for key in spec.config.model_fields:
            keys.setdefault(key, set()).add(spec.name)
    return keys


def backend_for(config: Any, backend: str) -> Backend:
    """Resolve `train.backend` to `torch` or `mlx` for a method's settings; `auto` takes MLX on a Mac with Metal.

    Raises:
        ConfigError: the method has no part in the backend that is asked for.
    """
    sessions = spec_of(config).sessions
    if (
        backend == "auto"
    ):  # MLX computes on other systems too, but slowly: there only for a method that has no torch
        if ("mlx" in sessions and metal()) or "torch" not in sessions:
            return "mlx"
        return "torch"
    if backend not in sessions:
        raise ConfigError(
            f"method {config.name} does not run in {backend}",
            expected=" or ".join(f"--backend {name}" for name in sessions),
            received=f"--backend {backend}",
            needs={"mlx": Need.MLX}.get(backend, Need.TORCH),
        )
    return cast(Backend, backend)


def open_session(
    loaded: Any,
    config: Any,
    seed: int,
    device: str | None = None,
    backend: str = "torch",
) -> Session:
    """Open an eager session of the method that `config` names; changes `loaded.model` in place.

    Args:
        loaded: a model with its weights; `ModelFiles` for MLX, and for torch if the method reads files itself.
        device: on which torch computes, for methods that offload, stream or quantise; None is the model's.
            Other methods take the model's.
        backend: `torch` or `mlx`, from `backend_for`.

    Raises:
        ConfigError: `loaded` is no model of these, or `config` no method's settings.
        MissingPackageError: the framework is not installed.
    """
    bare = hasattr(loaded, "named_parameters") and not hasattr(
        loaded, "dims"
    )  # a model as transformers loads it
    if bare or not hasattr(config, "name"):
        wrong = loaded if bare else config
        raise ConfigError(
            "a session opens a loaded model with a method's settings",
            expected="ondevice.load_model(...) or ondevice.wrap_model(model, tokenizer); ondevice.method_config(...)",
            received=type(wrong).__name__,
        )
    spec = spec_of(config)
    with naming_methods(lambda other: other.name != spec.name):
        return spec.open_session(loaded, config, seed, device, backend)
