"""What an adapter or a model was trained to do: `ondevice_task.json`, which travels with it.

Everybody asks the adapter as it was trained: `record.py` has its fields, `prompts.py` its rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ondevice.core.config import DataConfig
from ondevice.core.errors import ArtifactError, ConfigError, DataError, MissingPackageError
from ondevice.core.process import own_version
from ondevice.core.untrusted import read_object
from ondevice.data.encode import encode
from ondevice.data.examples import Dataset
from ondevice.data.readers.source import Record, Source
from ondevice.data.tasks.custom import template_json
from ondevice.data.tasks.prompts import TrainedTask
from ondevice.data.tasks.task import is_template, template_text
from ondevice.data.tasks.templates import find_task

TASK_NAME = "ondevice_task.json"
_FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "{message}"}]},
    "classification": {"text": "{text}"},
    "completion": {"prompt": "{prompt}"},
    "instruct": {"instruction": "{instruction}"},
    "multiple_choice": {"question": "{question}", "choices": ["{first}", "{second}"]},
}
"""A row of each format that can be asked; the others have no prompt of one text."""
_ANY_LENGTH = 1 << 20


def named_task_only(name: str) -> TrainedTask:
    """Describe a task by its name or its template's path, if nothing recorded the training."""
    template = None
    if is_template(name):
        template = template_text(name)
    task = find_task(name)
    return TrainedTask(format=task.kind, task=task.name, template=template)


def trained_task(
    data: DataConfig,
    dataset: Dataset,
    tokenizer: Any,
    *,
    task: str | None = None,
    date: datetime | None = None,
) -> TrainedTask:
    """Describe what a run on `dataset` trains; its base model and its figures are added later.

    Args:
        data: how the rows were read.
        task: the task of an exported program; `data.task` comes first.
        date: the present that the chat template saw.
    """
    named = data.task or task
    template = template_text(named) if named and is_template(named) else None
    framed = dataset.template == "chat template"
    if named is None and dataset.task:
        named = dataset.task
    return TrainedTask(
        format=dataset.format,
        task=dataset.task if template else named,
        template=template,
        columns=data.columns,
        labels=dict(dataset.labels),
        framing=dataset.template,
        chat_template=tokenizer.chat_template if framed else None,
        date=date if framed else None,
        ends=tuple(end for end, _ in dataset.report.ends.most_common() if end),
        max_length_tokens=dataset.max_length_tokens,
        longest_answer_tokens=max(
            (item.example.trained_tokens for item in dataset.items), default=0
        ),
    )


def example_prompt(task: TrainedTask, tokenizer: Any) -> str:
    """Return the prompt of a row whose columns hold their own names in braces.

    READMEs show it, and programs that frame a prompt in their own way follow it. A row of the training is never shown.
    Special tokens that the tokenizer adds itself are left out: whoever tokenizes the text adds
    them. Empty if the format has no such prompt, or the task does not take words in braces.
    """
    record = _example_row(task)
    if record is None:
        return ""
    source = Source("json", iter([Record(1, record)]), [])
    try:
        rows = task.prompt_rows(source, "the example")
        row = next(iter(rows.items))
        if not task.chat_template and row.pairs:
            return row.pairs[row.gold or 0][0]
        framed = task.with_template(tokenizer)
        item = encode(rows, framed, max_length_tokens=_ANY_LENGTH).items[-1]
    except (DataError, MissingPackageError, StopIteration):
        return ""
    return tokenizer.decode(
        item.example.ids[: item.prompt_tokens],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )


def _example_row(task: TrainedTask) -> dict[str, Any] | None:
    """Return a row under the column names of the files that were trained on."""
    rendered = task.found_task()
    if rendered is not None:
        columns = [task.columns.get(field, names[0]) for field, names in rendered.columns.items()]
        return {column: f"{{{column}}}" for column in columns}
    fields = _FIELDS.get(task.format)
    if fields is None or not task.columns:
        return fields
    named = {column: f"{{{column}}}" for column in task.columns.values()}
    return named | {key: fields[key] for key in ("choices",) if key in fields}


def known_task(data: DataConfig, max_length_tokens: int) -> TrainedTask:
    """Describe the task that a run file names, before any row is read.

    Its label texts are those of the task; a tokenizer's chat template frames none of its prompts.

    Raises:
        ConfigError: the task is unknown, or the template cannot be used.
    """
    assert data.task is not None  # noqa: S101  the caller's condition
    task = find_task(data.task)
    template = template_text(data.task) if is_template(data.task) else None
    return TrainedTask(
        format=task.kind,
        task=task.name,
        template=template,
        columns=data.columns,
        framing=task.name,
        max_length_tokens=max_length_tokens,
    )


def for_hosts(task: TrainedTask) -> TrainedTask:
    """Return the record for hosts without Python: its template is JSON, which is YAML too."""
    if task.template is None:
        return task
    return task.model_copy(update={"template": template_json(task.template)})


def to_text(task: TrainedTask) -> str:
    """Return the content of `ondevice_task.json`."""
    values = task.model_dump(mode="json", exclude_defaults=True)
    values |= {"version": task.version, "ondevice": own_version()}
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def read_trained_task(folder: Path) -> TrainedTask | None:
    """Read a folder's `ondevice_task.json`; None if it has none.

    Raises:
        ArtifactError: the file is damaged or of a newer version.
    """
    path = folder / TASK_NAME
    if not path.is_file():
        return None
    return parse_trained_task(read_object(path, ArtifactError, hint="copy it again"), str(path))


def parse_trained_task(values: Mapping[str, Any], name: str) -> TrainedTask:
    """Check the values of an `ondevice_task.json`; `name` is the file's in messages.

    Raises:
        ArtifactError: they are damaged or of a newer version.
    """
    if values.get("version") != 1:
        raise ArtifactError(
            f"{name}: field 'version'",
            expected=1,
            received=values.get("version"),
            hint="it was written by a newer version: pip install --upgrade ondevice-train",
        )
    try:
        task = TrainedTask.parse(dict(values), name, hint="train again, or copy the file again")
        task.found_task()
    except ConfigError as error:
        raise ArtifactError(
            error.message, expected=error.expected, received=error.received, hint=error.hint
        ) from None
    if task.format == "classification" and not task.task and not task.labels:
        raise ArtifactError(f"{name}: field 'labels'", expected="the label texts", received="none")
    return task
