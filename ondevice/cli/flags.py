"""Flags of the run file's settings, with the names, types, defaults and help of the settings."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from ondevice.api.runfile import NULL, RunConfig
from ondevice.cli.common import one_of
from ondevice.core.config import Documented, TargetModule
from ondevice.core.errors import ConfigError
from ondevice.core.flags import Flag
from ondevice.core.registry import method_names, methods
from ondevice.core.untrusted.yaml_documents import parse_yaml

EVERY_DAY = ("data.path", "train.steps", "method.name", "model.source", "train.out")
"""Settings whose flags come first in the help."""
SENTENCE_END = re.compile(r"\.\s+(?=[A-Z0-9`])|\.$")


@dataclass(frozen=True)
class Option:
    """A flag and the setting that it sets.

    Attributes:
        names: the flag, then other spellings of it.
        key: dotted, such as `train.steps`.
        type: of the value on the command line: `bool` is a switch, `list[...]` a flag to repeat.
        help: one sentence without its full stop.
        parse: turns the value on the command line into the setting's.
        of_all: False for a flag that only some methods have.
    """

    names: tuple[str, ...]
    key: str
    type: Any
    help: str
    parse: Callable[[Any], Any] = lambda value: value
    of_all: bool = True

    @property
    def argument(self) -> str:
        """Name of the verb's parameter."""
        return self.names[0].lstrip("-").replace("-", "_")

    @property
    def annotation(self) -> Any:
        """Type of the verb's parameter."""
        kind = bool
        if self.type is not bool:
            kind = self.type | None
        return Annotated[kind, typer.Option(*self.names, help=f"{self.help}.")]


def columns_of(pairs: list[str] | None) -> dict[str, str] | None:
    """Parse `--column field=column`; return None without one."""
    if not pairs:
        return None
    from ondevice.data.tasks.columns import parse_columns  # it loads numpy

    return parse_columns(pairs)


def _names(text: str) -> list[str]:
    """Split `a,b` into names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def options_of(section: str, config: type[Documented]) -> Iterator[Option]:
    """Yield the flags of a section's settings, in the order of its fields."""
    texts = config.descriptions()
    for name, field in config.model_fields.items():
        for flag in field.metadata:
            if isinstance(flag, Flag):
                text = flag.help or SENTENCE_END.split(texts.get(name, ""))[0]
                yield _option(flag, f"{section}.{name}", field.annotation, text)


def _option(flag: Flag, key: str, annotation: Any, text: str) -> Option:
    """Build a setting's flag; its help also says what may be given."""
    parts = [part for part in get_args(annotation) if part is not NoneType]
    kind = annotation
    if NoneType in get_args(annotation):
        kind = parts[0]
    item = next(iter(get_args(kind)), None)
    option = Option(tuple(filter(None, (flag.name, flag.also))), key, flag.type or kind, text)
    notes = []
    if get_origin(kind) is Literal:
        option = replace(option, type=str)
        notes.append(", ".join(get_args(kind)))
    elif get_origin(kind) is dict:
        option = replace(option, type=list[str], parse=columns_of)
        notes.append("repeat for more")
    elif get_origin(kind) is tuple and flag.repeat:
        option = replace(option, type=list[item])
        notes.append("repeat for more")
    elif get_origin(kind) is tuple:
        option = replace(option, type=str, parse=_names)
        notes.append("comma-separated")
        notes += [", ".join(get_args(item))] if get_origin(item) is Literal else []
    elif kind is Path:
        option = replace(option, parse=str)
    if notes:
        return replace(option, help=f"{text} ({'; '.join(notes)})")
    return option


def _default_of(config: type[Documented], name: str) -> str:
    """Return a setting's default as a flag's value; "" if it has none or is decided at run time."""
    field = config.model_fields[name]
    if field.is_required():
        return ""
    default = field.get_default(call_default_factory=True)
    if isinstance(default, bool) or default is None or default in ((), {}, ""):
        return ""
    if isinstance(default, tuple):
        return (
            "all" if set(default) == set(get_args(TargetModule)) else ", ".join(map(str, default))
        )
    if isinstance(default, float):
        return f"{default:g}"
    return str(default)


def _with_default(option: Option, default: str) -> Option:
    """Add a default to a flag's help, unless its help speaks of it."""
    if not default or "default" in option.help:
        return option
    text, bracket, rest = option.help, "", ""
    if text.endswith(")"):
        text, bracket, rest = text[:-1].rpartition(" (")
    notes = f"{rest}; default: {default}" if bracket else f"default: {default}"
    return replace(option, help=f"{text} ({notes})")


def _shared_default(defaults: dict[str, str]) -> str:
    """Return the default of a setting that several methods have; each value names its methods."""
    values = dict.fromkeys(filter(None, defaults.values()))
    if len(values) < 2:
        return next(iter(values), "")
    parts = []
    for value in values:
        owners = [name for name, default in defaults.items() if default == value]
        parts.append(f"{value} for {', '.join(owners)}")
    return "; ".join(parts)


def _method_options() -> Iterator[Option]:
    """Yield `--method` and the flags of every method; their help names the methods."""
    yield Option(
        ("--method",),
        "method.name",
        str,
        f"Training method; by default the one that fits the model: {', '.join(method_names())}",
    )
    options: dict[str, Option] = {}
    defaults: dict[str, dict[str, str]] = {}
    for spec in methods():
        for option in options_of("method", spec.config):
            options.setdefault(option.key, option)
            default = _default_of(spec.config, option.key.partition(".")[2])
            defaults.setdefault(option.key, {})[spec.name] = default
    for key, option in options.items():
        owners = defaults[key]
        option = _with_default(option, _shared_default(owners))
        if len(owners) < len(methods()):
            option = replace(option, help=f"{option.help} [{', '.join(owners)}]", of_all=False)
        yield option


@functools.cache
def all_options(run: type[RunConfig] = RunConfig) -> dict[str, Option]:
    """Return the flags of a run file's settings by key, section by section."""
    options: list[Option] = []
    for section, field in run.model_fields.items():
        if section == "method":
            options += _method_options()
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Documented):
            for option in options_of(section, field.annotation):
                default = _default_of(field.annotation, option.key.partition(".")[2])
                options.append(_with_default(option, default))
    return {option.key: option for option in options}


def flag(key: str) -> Any:
    """Return one setting's flag, for verbs without a run file: `flag("data.task")`."""
    option = all_options()[key]
    return typer.Option(*option.names, help=f"{option.help}.")


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="A run file (YAML), or a preset: phone, jetson, one-gpu, mac. Flags win over it.",
    ),
]
FirstModel = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help="The model: the same as --model.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Set any key of the run file: method.rank=8 (repeat for more)."),
]
Model = Annotated[str | None, flag("model.source")]
Revision = Annotated[str | None, flag("model.revision")]
Dtype = Annotated[str | None, flag("model.dtype")]
Task = Annotated[str | None, flag("data.task")]
Columns = Annotated[list[str] | None, flag("data.columns")]
StrictColumns = Annotated[bool, flag("data.strict_columns")]
MaxLength = Annotated[int | None, flag("data.max_length_tokens")]
BatchSize = Annotated[int | None, flag("train.batch_size")]


def with_settings(
    *keys: str,
    without: tuple[str, ...] = (),
    run: type[RunConfig] = RunConfig,
    model_first: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a verb `--config`, `--set` and flags of the run file's settings.

    The verb receives the path `config` and the dictionary `overrides` of dotted keys, without those
    whose flags were not given. Flags win over `--set`.

    Args:
        keys: which settings: sections, such as `train`, or keys, such as `train.seed`.
        without: sections and keys to leave out.
        run: the run file's class.
        model_first: the model may also be the first word.
    """

    def among(key: str, names: tuple[str, ...]) -> bool:
        return key in names or key.partition(".")[0] in names

    options = {
        option.argument: option
        for key, option in all_options(run).items()
        if among(key, keys) and not among(key, without)
    }
    model_first = model_first and "model" in options

    def decorate(verb: Callable[..., None]) -> Callable[..., None]:
        # Typer reads a function's signature, so the flags are written into that of a wrapper; a
        # type checker does not know that functions have the attribute.
        @functools.wraps(verb)
        def wrapped(config: Path | None, settings: list[str] | None, **values: Any) -> None:
            if model_first:
                values["model"] = one_of(values.pop("first"), values["model"], "model")
            overrides = parse_settings(settings)
            if values.get("steps") is not None and values.get("epochs") is not None:
                raise ConfigError(
                    "--steps and --epochs both say how long to train", expected="one of them"
                )
            for argument, option in options.items():
                value = values.pop(argument)
                # None, False and [] mean that the flag was not given. 0 equals False, and was.
                if value is not None and value is not False and value != []:
                    overrides[option.key] = option.parse(value)
            verb(config=config, overrides=overrides, **values)

        own = inspect.signature(verb, eval_str=True).parameters
        parameters = []
        if model_first:
            parameters = [_parameter("first", FirstModel)]
        every_day = [
            option for key in EVERY_DAY for option in options.values() if option.key == key
        ]
        others = [option for option in options.values() if option not in every_day]
        parameters += map(_parameter_of, every_day)
        parameters.append(_parameter("config", Config))
        parameters += [_parameter_of(option) for option in others if option.of_all]
        for parameter in own.values():
            if parameter.name not in ("config", "overrides"):
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        parameters += [_parameter_of(option) for option in others if not option.of_all]
        parameters.append(_parameter("settings", Settings))
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {item.name: item.annotation for item in parameters}
        return wrapped

    return decorate


def _parameter_of(option: Option) -> inspect.Parameter:
    default = None
    if option.type is bool:
        default = False
    return _parameter(option.argument, option.annotation, default)


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def parse_settings(settings: list[str] | None) -> dict[str, Any]:
    """Return the dotted keys of `--set a.b=c` with their values, which are YAML; null is `NULL`.

    Raises:
        ConfigError: one has no `=`, or a value that is not YAML.
    """
    values: dict[str, Any] = {}
    for item in settings or []:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise ConfigError(
                f"--set {item}", expected="key=value, such as method.rank=8", received=item
            )
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"--set {item}: the value is not YAML", received=str(error)) from None
        values[key.strip()] = NULL if value is None and text.strip() else value
    return values
