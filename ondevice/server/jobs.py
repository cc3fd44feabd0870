"""The request of a job, its run file, and the models, artifacts and data sets that it can use."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, field_validator

from ondevice.api.export import run_config
from ondevice.api.runfile import RunConfig
from ondevice.artifact.manifest import ANSWERS, ANSWERS_FILE, MANIFEST_NAME, read_manifest
from ondevice.core.config import StrictConfig
from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.core.manifest import Manifest
from ondevice.core.registry import DEFAULT_METHOD, method, target
from ondevice.core.untrusted import read_json
from ondevice.models import family_classes, find_cached
from ondevice.models.sources.hub import HUB_ID
from ondevice.models.sources.package import KNOWN
from ondevice.server.fields import at_most
from ondevice.server.store import ID, MissingError, Store

ARTIFACT = "artifact:"
"""Prefix of an artifact's id in place of a model's."""
THUMBS = "thumbs"
"""In place of a data set's id: the ratings of the store."""
Clock = Annotated[str, Field(pattern=r"^([01][0-9]|2[0-3]):[0-5][0-9]$", examples=["22:30"])]
_SECTIONS = ("method", "train", "data", "model")
_OURS = {
    "model": ("source",),
    "data": ("path", "eval_path"),
    "train": ("out", "memory_limit_bytes"),
}
"""Keys of a run file that the store sets: a job that sets a path could read and write anywhere."""
TASK_NAME = r"^[\w -]*$"
"""The name of a task; a template's path would name a file of the server."""

MOST_ROWS = 1000
"""Rows of a request to predict."""
_DEEPEST = 20


class Window(StrictConfig):
    """A daily window in local time; `end` may be on the next morning."""

    start: Clock
    """Time at which a job may start or go on."""
    end: Clock
    """Time at which it is stopped, with its state saved."""


class Limits(StrictConfig):
    """Limits of a job: memory, time, and crashes in a row."""

    memory_bytes: int | None = Field(default=None, ge=1 << 20, le=1 << 50)
    """Memory of all processes of the job, without pages of files. A job that exceeds it fails."""
    time_s: float | None = Field(default=None, gt=0, lt=1e9)
    """Total seconds of running. A job that exceeds it saves its state and fails."""
    retries: int = Field(default=3, ge=0, le=1_000_000)
    """Crashes in a row, without a new checkpoint between them, after which a job fails."""


def one_of(*names: str) -> dict[str, Any]:
    """Say in a JSON schema that a request gives exactly one of these fields a value."""
    ways = []
    for name in names:
        others = {other: {"type": "null"} for other in names if other != name}
        ways.append({"required": [name], "properties": {name: {"type": "string"}, **others}})
    return {"oneOf": ways}


class JobSpec(StrictConfig):
    """A job in the store: what to train, with which rows, and how it may run."""

    model_config = ConfigDict(json_schema_extra=one_of("model", "artifact"))

    name: str = Field(default="", max_length=200)
    """For people."""
    model: str | None = Field(default=None, max_length=200)
    """A model of GET /v1/models, or a hub id. A job has a model or an artifact."""
    artifact: str | None = Field(default=None, max_length=200)
    """An artifact of GET /v1/artifacts."""
    dataset: str = Field(max_length=64)
    """A data set of GET /v1/datasets; `thumbs` for the ratings of GET /v1/thumbs as they are now, of
    which the job keeps a data set."""
    eval_dataset: str | None = Field(default=None, max_length=64)
    """Held-out rows, only evaluated. If both are `thumbs`, every fifth prompt is kept back."""
    adapter: str | None = Field(default=None, max_length=64)
    """An adapter of GET /v1/adapters to start from."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Sections `method`, `train`, `data` and `model` of a run file, without the store's keys."""
    window: Window | None = None
    """Daily window in which it may run; None for always."""
    limits: Limits = Field(default_factory=Limits)
    """Memory, time and retries."""
    force: bool = False
    """Run even if the plan says it does not fit."""
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], at_most(16)] = Field(
        default={}, max_length=16
    )
    """Of the client, for OpenAI's form of a job; it changes nothing."""

    @field_validator("config")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        _check_values(value)
        return value


class JobRequest(JobSpec):
    """The body of POST /v1/jobs."""

    priority: int = Field(default=0, ge=-1000, le=1000)
    """Higher runs first."""
    dry_run: bool = False
    """Check everything and return the plan; create nothing."""


def resolve(spec: JobSpec, store: Store, out: Path) -> RunConfig:
    """Resolve a job to its run file, with the present paths of this store.

    Raises:
        ConfigError: a wrong setting, or one that the store sets.
        MissingError: the data set, model, artifact or adapter does not exist.
    """
    if (spec.model is None) == (spec.artifact is None):
        raise ConfigError(
            "a job has a model or an artifact", expected="one of them", received="both or none"
        )
    _check_sections(spec.config, store.rewards)
    ours: dict[str, Any] = {"data.path": dataset_file(store, spec.dataset), "train.out": out}
    if spec.eval_dataset is not None:
        ours["data.eval_path"] = dataset_file(store, spec.eval_dataset)
    ours = {key: str(value) for key, value in ours.items()}
    if spec.limits.memory_bytes is not None:
        ours["train.memory_limit_bytes"] = spec.limits.memory_bytes
    if spec.adapter is not None:
        adapter_folder(store, spec.adapter)
    if spec.artifact is not None:
        flat = _flatten(spec.config) | ours
        if "data.task" in flat:
            flat["data.task"] = locate_task(store, flat["data.task"])
        return run_config(artifact_folder(store, spec.artifact), None, flat)
    ours["model.source"] = locate_model(store, str(spec.model))
    config: dict[str, Any] = json.loads(json.dumps(spec.config))
    for section in ("model", "data", "train"):
        if not isinstance(config.setdefault(section, {}), dict):
            raise ConfigError(
                f"'{section}' is not a section",
                expected="an object",
                received=repr(config[section]),
            )
    for key, value in ours.items():
        section, name = key.split(".")
        config[section][name] = value
    if isinstance(config.setdefault("method", {}), dict):
        config["method"].setdefault("name", method_name(config))
    options = dataset_options(store, spec.dataset)
    if config["data"].get("task") not in (None, options.get("task")):
        options.pop("columns", None)  # they are named for the upload's task
    for key, value in options.items():
        if not config["data"].get(key):
            config["data"][key] = value
    if isinstance(config["data"].get("task"), str):
        config["data"]["task"] = locate_task(store, config["data"]["task"])
    _check_method(config["method"])
    return RunConfig.load(None, _sections(config))


def with_method(spec: JobSpec, choose: Callable[[], str]) -> JobSpec:
    """Return a job with its method named; `choose` finds it in a helper process."""
    values = spec.config.get("method", {})
    has_model = spec.model is not None and spec.artifact is None
    if not has_model or not isinstance(values, dict) or "name" in values:
        return spec
    return spec.model_copy(
        update={"config": {**spec.config, "method": {"name": choose(), **values}}}
    )


def method_name(config: dict[str, Any]) -> str:
    """Return the method's name in a job's `config`, or the default of older versions."""
    values = config.get("method", {})
    return str(values.get("name", DEFAULT_METHOD) if isinstance(values, dict) else values)


def dataset_file(store: Store, name: str) -> Path:
    """Return the path of a data set's rows; raise MissingError if it does not exist."""
    row = store.row("SELECT file FROM datasets WHERE id = ?", name)
    if row is None:
        raise MissingError(f"no such data set: {name}", hint="GET /v1/datasets lists them")
    return store.path("datasets", name) / row["file"]


OPTIONS = ".options.json"
"""File with the task and the columns that a data set was uploaded with, next to its rows."""


def dataset_options(store: Store, name: str) -> dict[str, Any]:
    """Return the task and the columns that a data set was uploaded with."""
    try:
        return json.loads((store.path("datasets", name) / OPTIONS).read_text())
    except (OSError, ValueError):  # from a version that did not store them
        return {}


def locate_task(store: Store, name: str | None) -> str | None:
    """Return the path of a template of the store, or any other task's name as it is."""
    if name and ID.fullmatch(name):
        path = store.root / "templates" / f"{name}.yaml"
        if path.is_file():
            return str(path)
    return name


def adapter_folder(store: Store, name: str) -> Path:
    """Return the folder of an adapter; raise MissingError if it does not exist."""
    if store.row("SELECT id FROM adapters WHERE id = ?", name) is None:
        raise MissingError(f"no such adapter: {name}", hint="GET /v1/adapters lists them")
    return store.path("adapters", name)


def artifact_folder(store: Store, name: str) -> Path:
    """Return the folder of an artifact; raise MissingError if it does not exist."""
    folder = store.path("artifacts", name)
    if not (folder / "manifest.json").is_file():
        raise MissingError(f"no such artifact: {name}", hint="GET /v1/artifacts lists them")
    return folder


def is_program(folder: Path) -> bool:
    """Return True for an artifact that answers in a runtime of its own, and not in PyTorch."""
    try:
        written_ns = (folder / MANIFEST_NAME).stat().st_mtime_ns
    except OSError:
        written_ns = 0  # `read_manifest` names the missing file
    return _is_program(folder, written_ns)


@functools.lru_cache(64)  # every request for a text asks, in the daemon and in its helper
def _is_program(folder: Path, written_ns: int) -> bool:
    return target(read_manifest(folder, check_files=False).target).runtime != "torch"


def _check_sections(config: dict[str, Any], rewards: frozenset[str]) -> None:
    """Refuse keys that the store sets, also hidden in a key with dots, and code that the daemon's
    owner has not allowed."""
    for section, values in config.items():
        if section not in _SECTIONS:
            reason = f"'{section}' is not a section of a job"
            if section == "export":
                reason = "a job cannot export"
            raise ConfigError(reason, expected=", ".join(_SECTIONS), received=section)
        for key in values if isinstance(values, dict) else ():
            if key in _OURS.get(section, ()):
                raise ConfigError(
                    f"'{section}.{key}' is set by the server",
                    expected="the job's fields model, dataset, eval_dataset, limits",
                    received=f"config.{section}.{key}",
                )
            if key in ("objective_command", "reward") and values[key] is not None:
                _check_reward(section, key, values[key], rewards)
            if (section, key) == ("data", "task") and not re.fullmatch(TASK_NAME, str(values[key])):
                raise ConfigError("a job names its task", expected="a task of GET /v1/settings",
                                  received=str(values[key])[:80])  # fmt: skip
            if "." in key:
                raise ConfigError(
                    "a key has a dot", expected=f"a setting of '{section}'", received=repr(key)
                )


def _check_reward(section: str, key: str, value: Any, rewards: frozenset[str]) -> None:
    """Refuse a function or a program that the daemon's owner has not allowed: it is code, and the
    name comes from whoever sent the job."""
    if isinstance(value, str) and value in rewards:
        return
    raise ConfigError(
        "the daemon's owner has not allowed this reward or score",
        expected=", ".join(sorted(rewards)) or "objective loss, accuracy or f1; none is allowed",
        received=f"config.{section}.{key}: {value!r:.200}",
        hint="the owner allows it by its exact words: `ondevice serve --allow-reward WORDS`",
    )


def _check_method(values: Any) -> None:
    """Refuse settings of a method that are paths, because they would be the server's."""
    if not isinstance(values, dict):
        return
    fields = method(values["name"]).config.model_fields
    for key in values:
        if key in fields and Path in (fields[key].annotation, *get_args(fields[key].annotation)):
            raise ConfigError("a job cannot name a path of the server", expected="a job without it",
                              received=f"config.method.{key}")  # fmt: skip


def _check_values(config: dict[str, Any]) -> None:
    """Refuse JSON values that the store cannot hold.

    Raises:
        ValueError: invalid Unicode, a number that is not finite or exceeds 64 bits, or deep
            nesting.
    """
    # No recursion, which hostile input would overflow.
    waiting: list[tuple[Any, int]] = [(config, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise ValueError("the settings are nested too deeply")
        if isinstance(value, dict):
            waiting += [(item, depth + 1) for pair in value.items() for item in pair]
        elif isinstance(value, list):
            waiting += [(item, depth + 1) for item in value]
        elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError("a text holds half a surrogate pair")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number is not finite")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("a number does not fit in 64 bits")


def _sections(config: dict[str, Any]) -> dict[str, Any]:
    """Return dotted keys, two levels deep, for `RunConfig.load`; the method's name comes first."""
    flat = _flatten(config)
    return dict(sorted(flat.items(), key=lambda item: item[0] != "method.name"))


def _flatten(config: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, values in config.items():
        if isinstance(values, dict):
            flat |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            flat[section] = values
    return flat


def list_models(store: Store) -> list[dict[str, Any]]:
    """List the models on this machine: id, kind, size, and the sizes in their configuration."""
    models = []
    for folder in sorted((store.root / "models").iterdir()):
        if ID.fullmatch(folder.name) and (source := _source(folder)):
            files = [path for path in folder.rglob("*") if path.is_file()]
            about = _config(Path(source)) if Path(source).is_dir() else {"model_type": "gguf"}
            models.append(
                {
                    "id": folder.name,
                    "kind": "folder",
                    "bytes": sum(path.stat().st_size for path in files),
                    **about,
                }
            )
    for name in KNOWN:
        if (folder := find_cached(f"package:{name}")) is not None:
            size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
            models.append(
                {"id": f"package:{name}", "kind": "package", "bytes": size, **_config(folder)}
            )
    return models + [
        {"id": f"tiny:{name}", "kind": "random", "bytes": 0, "model_type": name}
        for name in sorted(family_classes())
    ]


def locate_model(store: Store, name: str) -> str:
    """Return the source string (as for `load_model`) of a model's id.

    Raises:
        MissingError: neither a folder of the store, a known package, a `tiny:` family, nor a hub
            id.
    """
    if ID.fullmatch(name) and (source := _source(store.path("models", name))):
        return source
    kind, _, rest = name.partition(":")
    if (kind == "tiny" and rest in family_classes()) or (kind == "package" and rest in KNOWN):
        return name
    if "/" in name and HUB_ID.fullmatch(name) and ".." not in name:
        return name
    raise MissingError(
        f"no such model: {name!r}",
        expected="an id of GET /v1/models, or a hub id such as Qwen/Qwen2.5-0.5B-Instruct",
        received=name,
        hint="upload it as a zip, or put its folder into the store's models folder",
    )


def list_artifacts(store: Store) -> list[dict[str, Any]]:
    """List the artifacts of the store, and whether each answers with text. Jobs check hashes."""
    artifacts = []
    for folder in sorted((store.root / "artifacts").iterdir()):
        if not ID.fullmatch(folder.name) or not (folder / "manifest.json").is_file():
            continue
        try:
            manifest = read_manifest(folder, check_files=False)
        except ArtifactError:
            continue
        artifacts.append(
            {
                "id": folder.name,
                "target": manifest.target,
                "runtime": manifest.runtime,
                "method": str(manifest.method.get("name", "")),
                "model": manifest.model.source,
                "generates": _generates(folder, manifest),
                "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
            }
        )
    return artifacts


def _generates(folder: Path, manifest: Manifest) -> bool:
    """Return True if an artifact answers with text: in PyTorch, or by a program that can."""
    try:
        runtime = target(manifest.target).runtime
    except ConfigError:  # of a plugin that is not installed here
        return False
    if runtime == "torch" or (folder / ANSWERS / ANSWERS_FILE).is_file():
        return True
    return "block_prefill" in manifest.program_spec.methods


def _source(folder: Path) -> str | None:
    """Return the source in a folder of the store: the folder, its only .gguf file, or None."""
    if (folder / "config.json").is_file():
        return str(folder)
    files = []
    if folder.is_dir():
        files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return str(files[0])
    return None


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return {}
    names = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    return {
        key: config[key]
        for key in names
        if isinstance(config, dict) and isinstance(config.get(key), int | str)
    }
