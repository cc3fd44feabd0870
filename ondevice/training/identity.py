"""What a run computes with beyond its settings: rows as they are trained, template, tokenizer, machine, own choices.

A resume compares both groups with the log. Rows, template and tokenizer decide every loss, so a change is refused by
name, unless `train.accept_changes` takes it. Libraries, threads and processor may change the last bits only: the run
goes on, and says so.

A choice that a run made for itself may follow a measurement, the free memory or the installed packages, so making it
again could give another one. Rank 0 decides for all ranks, the head of the log keeps the choice as a value by dotted
key, and a resumed run takes it from there.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import sha256_file, sha256_spread
from ondevice.core.capabilities import HalfOnGpu, OwnPrecision
from ondevice.core.registry import methods
from ondevice.data.examples import rows_sha256, template_sha256, tokenizer_sha256
from ondevice.data.readers.files import check_source, hash_files
from ondevice.data.tasks.task import is_template
from ondevice.training import events
from ondevice.training.choices import DTYPE, PLACEMENT
from ondevice.training.events import FILE_NAME, read_start

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import DataConfig

DATE = "data.date"
"""Key of a run's decisions: the date and time that its chat template sees, in ISO format and local time."""
METHOD_NAME = "method.name"
LENGTH = "data.max_length_tokens"
ENCODED = "encoded"
"""Key of an identity: digests of what the rows became."""
NAMES = {
    f"{ENCODED}.rows": "the rows as token ids and labels",
    f"{ENCODED}.evaluation_rows": "the rows to evaluate as token ids and labels",
    f"{ENCODED}.template": "the chat template",
    f"{ENCODED}.tokenizer": "the tokenizer",
    "data.sha256": "the data",
    "data.task_sha256": "the task's template",
}
"""Keys of an identity that `train.accept_changes` takes other values of, each as a message calls it."""
LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "jinja2",
    "numpy",
    "peft",
    "bitsandbytes",
    "mlx",
    "executorch",
)


LATER = ("columns", "validation_split", "packing", "group_by_length", "streaming")
"""Settings of the rows that an identity has only if they are set: older logs do not have them."""


def data_identity(data: DataConfig, batch_size: int, sha256: str | None) -> dict[str, Any]:
    """Return what makes two runs' data the same: hashes of the rows and of a template, and the settings.

    Args:
        sha256: of rows that Python holds; None hashes the file.
    """
    hidden = {"path", "eval_path", "strict_columns"}
    hidden |= {name for name in LATER if not getattr(data, name)}
    if not data.streaming:
        hidden.add("shuffle_records")
    if sha256 is None and data.path is not None:
        if data.path.is_file():
            sha256 = sha256_spread(data.path) if data.streaming else sha256_file(data.path)
        elif check_source(data.path) == "folder":
            sha256 = hash_files(data.path)
    settings = data.model_dump(mode="json", exclude=hidden)
    identity = {"sha256": sha256, "batch_size": batch_size, **settings}
    if data.task is not None and is_template(data.task):
        identity["task_sha256"] = sha256_file(Path(data.task))
    return identity


def encoded_identity(tokenizer: Any, rows: Any, evaluation: Any) -> dict[str, Any]:
    """Return the digests of a run's rows.

    Args:
        rows: the data set to train on; None for a streamed file, whose windows are compared as they are read.
        evaluation: the data set to evaluate on, or None.
    """
    digests = {"template": template_sha256(tokenizer), "tokenizer": tokenizer_sha256(tokenizer)}
    for name, dataset in (("rows", rows), ("evaluation_rows", evaluation)):
        if dataset is not None:
            digests[name] = rows_sha256(dataset.items)
    return digests


def environment() -> dict[str, Any]:
    """Return what can change the last bits of a run: versions of loaded libraries, threads, processor, precision."""
    values: dict[str, Any] = {"python": platform.python_version(), "processor": platform.machine()}
    for name in ("ondevice-train", *(name for name in LIBRARIES if name in sys.modules)):
        try:
            values[name] = version(name)
        except PackageNotFoundError:  # imported from a folder
            continue
    torch = sys.modules.get("torch")
    if torch is not None:
        values["threads"] = torch.get_num_threads()
        values["instructions"] = torch.backends.cpu.get_cpu_capability()
        values["matmul_precision"] = torch.get_float32_matmul_precision()
        if torch.cuda.is_available():
            values["gpu"] = torch.cuda.get_device_name()
    return values


def date_of(decided: Mapping[str, Any]) -> datetime | None:
    """Return the date that a run's chat template sees; None if none was decided."""
    text = decided.get(DATE)
    if isinstance(text, str):
        return datetime.fromisoformat(text)
    return None


def iso(time_s: float) -> str:
    """Return seconds since the epoch as a value of `DATE`."""
    return datetime.fromtimestamp(int(time_s)).isoformat()


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the keys of two flat mappings whose values differ, each as [before, after]."""
    keys = sorted(before.keys() | after.keys())
    return {
        key: [before.get(key), after.get(key)] for key in keys if before.get(key) != after.get(key)
    }


def identity_of(start: events.Start) -> dict[str, Any]:
    """Return the settings that a resume must have in common with the run, as JSON values."""
    return events.plain({"model": start.model_sha256, "seed": start.seed, **start.identity})


def recorded_decisions(out: Path) -> dict[str, Any]:
    """Return what the run in `out` decided, by dotted key; nothing if there is no log."""
    start = read_start(out / FILE_NAME)
    if start is None:
        return {}
    # An older log has its date, threads and precision elsewhere than among its choices.
    older: dict[str, Any] = {DATE: iso(start.time_s)}
    if "threads" in start.environment:
        older["threads"] = start.environment["threads"]
    method = start.config.get("method", {})
    for spec in methods():
        if spec.name != method.get("name"):
            continue
        own = spec.capability(OwnPrecision)
        if own is not None and own.setting in method:
            older[f"method.{own.setting}"] = method[own.setting]
        if spec.capability(HalfOnGpu) and "dtype" in start.identity:
            older[DTYPE] = start.identity["dtype"]
    return {**older, **start.decided}


def with_decisions(config: RunConfig, decided: dict[str, Any]) -> RunConfig:
    """Return the run file with recorded choices in place of those that it leaves open."""
    name = decided.get(METHOD_NAME)
    if config.chosen and name is not None and name != config.method.name:
        config = config.with_method(name)
    for key, value in decided.items():
        section_name, _, field = key.partition(".")
        section = getattr(config, section_name, None)
        if key == METHOD_NAME or section is None or field not in type(section).model_fields:
            continue
        is_open = getattr(section, field) in (None, "auto")
        if field not in section.model_fields_set or is_open:
            config = config.model_copy(
                update={section_name: section.model_copy(update={field: value})}
            )
    return config


def with_placement(config: RunConfig, decided: dict[str, Any]) -> RunConfig | None:
    """Return the run file with the recorded placement in place of `auto`; None if there is nothing to replace."""
    method = config.method
    known = {
        field: decided[PLACEMENT + field]
        for field in type(method).model_fields
        if getattr(method, field) == "auto" and PLACEMENT + field in decided
    }
    if known:
        return config.model_copy(update={"method": method.model_copy(update=known)})
    return None


def placement_of(method: Any, resolved: Any) -> dict[str, Any]:
    """Return what was decided for the settings that `method` leaves as `auto`."""
    open_fields = (field for field in type(method).model_fields if getattr(method, field) == "auto")
    taken = {PLACEMENT + field: getattr(resolved, field) for field in open_fields}
    return {key: value for key, value in taken.items() if value != "auto"}
