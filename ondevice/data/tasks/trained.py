"""What an adapter or a model was trained to do: `ondevice_task.json`, which travels with it.

It records how a row becomes a prompt and what ends an answer, so that everybody asks the adapter as
it was trained. Rows to predict need no label: a placeholder stands for the answer, so a prompt is
rendered, tokenized and cut by the code that trained on it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ondevice.core.config import DataConfig, StrictConfig
from ondevice.core.errors import ArtifactError, ConfigError, DataError
from ondevice.core.untrusted import read_object
from ondevice.core.version import own_version
from ondevice.data.encode import dated
from ondevice.data.examples import Dataset
from ondevice.data.readers.source import Record, Source
from ondevice.data.reading import rows_of
from ondevice.data.rows import Format, Row, Rows
from ondevice.data.tasks.custom import read_task, template_json
from ondevice.data.tasks.task import RECORD, Task, is_template, letter_of, template_text
from ondevice.data.tasks.templates import find_task

TASK_NAME = RECORD
_ANSWER = "\u2603"
"""Stands for the answer of a row to predict; no tokenizer joins it to the text before it."""
_COLUMN = "ondevice's answer"
"""The placeholder's column in files whose columns the user named."""
_ANSWERS: dict[str, tuple[str, ...]] = {
    "classification": ("label",),
    "completion": ("completion", "label", "thumbs", "liked"),
    "instruct": ("response", "output", "answer"),
    "multiple_choice": ("answer",),
}
"""Columns of the answer by format, first the one that takes the placeholder."""
_INPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",),),
    "classification": (("text", "sentence"),),
    "completion": (("prompt",),),
    "instruct": (("instruction", "question", "prompt"),),
    "multiple_choice": (("question", "prompt"), ("choices",)),
    "text": (("text",),),
}
"""Fields by format that a row to predict needs, each with its other names."""


_FIELDS: dict[str, str] = {
    "chat": "messages, conversations or prompt",
    "classification": "text (or sentence)",
    "completion": "prompt",
    "instruct": "instruction, prompt or question",
    "multiple_choice": "question and choices",
    "text": "text",
}
"""The columns of a prompt by format, for messages."""
_TEXTS: dict[str, tuple[str, ...]] = {
    "classification": ("text", "sentence"),
    "completion": ("prompt",),
    "instruct": ("instruction", "prompt", "question"),
    "text": ("text",),
}
"""The column of a row that is only one text."""
_UNSEEN = re.compile("expected (one of|a label of) ")
"""Begins the reason against a row whose label is not one of the task's."""


class BaseModel(StrictConfig):
    """The model that was trained, by which an adapter of another base is recognised."""

    source: str = ""
    revision: str | None = None
    sha256: str | None = None


class TrainedTask(StrictConfig):
    """How rows become prompts, which answers there are, and what ends them."""

    version: Literal[1] = 1
    ondevice: str = ""
    """The version that wrote the file."""

    format: Format
    """Format of the rows."""

    task: str | None = None
    """A task of `templates.TASKS`, or the name of a custom template."""

    template: str | None = None
    """The text of a custom template's YAML file."""

    columns: dict[str, str] = {}
    """{field: column} of the files it was trained on."""

    labels: dict[str, str] = {}
    """The classes of classification rows, {label key: label text}, in the candidates' order."""

    framing: str = ""
    """What makes the prompt: "chat template", "instruction prompt", a task's name, or ""."""

    prompt: str = ""
    """A prompt with the columns' names in braces, from `example_prompt`; empty if there is none."""

    chat_template: str | dict[str, str] | None = None
    """The chat template, if it frames the prompt."""

    date: datetime | None = None
    """The present that the chat template saw."""

    ends: tuple[str, ...] = ()
    """Special tokens that were trained as the end of an answer."""

    max_length_tokens: int = 0
    """Longest sequence of the training; longer prompts lose tokens at their front."""

    longest_answer_tokens: int = 0
    """Label tokens of the longest answer."""

    evaluation: dict[str, Any] | None = None
    """Figures of the last evaluation."""

    base_model: BaseModel = BaseModel()

    @property
    def has_candidates(self) -> bool:
        """True if an answer is one of several texts, and not generated."""
        return self.format in ("classification", "multiple_choice", "regression")

    def found_task(self) -> Task | None:
        """Return the task that renders the rows, or None if their format does."""
        if self.template is not None:
            return read_task(self.template, self.task or "template")
        return find_task(self.task) if self.task else None

    def trained_ends(self, tokenizer: Any) -> list[int]:
        """Return the ids of `ends` in their order, without the tokenizer's own end."""
        known = tokenizer.get_vocab()
        return [known[end] for end in self.ends if end in known]

    @property
    def inputs(self) -> dict[str, str]:
        """The fields that a row to predict needs, with their columns in the training's files."""
        task = self.found_task()
        fields = _INPUTS.get(self.format, ())
        if task is not None:
            places = {field: names[0] for field, names in task.columns.items()}
            return places | {
                field: self.columns[field] for field in places if field in self.columns
            }
        found: dict[str, str] = {}
        for names in fields:
            field = next((name for name in names if name in self.columns), names[0])
            found[field] = self.columns.get(field, field)
        return found

    def with_template(self, tokenizer: Any) -> Any:
        """Return the tokenizer with the chat template and the date of the training."""
        if self.chat_template is None:
            return tokenizer
        result = copy.copy(tokenizer)
        result.chat_template = self.chat_template
        return dated(result, self.date)

    def end_ids(self, tokenizer: Any) -> frozenset[int]:
        """Return the tokens that were trained as the end of an answer; empty if there are none."""
        ids = {tokenizer.convert_tokens_to_ids(end) for end in self.ends}
        if ids and tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        return frozenset(ids - {None})

    def labelled_rows(self, source: Source, name: str) -> Rows:
        """Return records with their labels or answers as rows to evaluate.

        Args:
            source: the records of a file, from `readers.files.read_records`.
            name: of the file, for messages.

        Raises:
            DataError: the task has labels, and the file has none or others than were trained.
        """
        rows = rows_of(
            source,
            name,
            self.found_task(),
            columns=self.columns,
            labels=self.labels,
            allow_empty=self.has_candidates,
        )
        if not self.has_candidates:
            return rows
        unseen = [problem for problem in rows.problems if _UNSEEN.match(problem.reason)]
        if unseen:
            raise DataError(
                f"{name} has labels that were not trained, in {len(unseen)} rows: {unseen[0]}",
                expected=self._label_words(),
                received=unseen[0].reason.rpartition("received ")[2],
                hint="correct them, or train again with rows that have them",
            )
        if rows.format != self.format or not rows.items:
            problem = f"; {rows.problems[0]}" if rows.problems else ""
            raise DataError(
                f"{name} has no labels to compare with{problem}",
                expected=f"a column with the label: {self._label_words()}",
                received="none",
                hint="`ondevice predict` needs no labels; --column label=NAME names the column",
            )
        return rows

    def record_of(self, text: str) -> dict[str, Any]:
        """Return the record of a row that is only one text.

        Raises:
            DataError: the task asks for several texts.
        """
        if self.format == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        task = self.found_task()
        if task is not None and len(task.columns) == 1:
            ((field, names),) = task.columns.items()
            for key in (field, *names):
                if key in self.columns:
                    return {self.columns[key]: text}
            return {names[0]: text}
        for field in _TEXTS.get(self.format, ()) if task is None else ():
            if field in self.columns or not self.columns:
                return {self.columns.get(field, field): text}
        fields = _FIELDS.get(self.format, "")
        if task is not None:
            fields = ", ".join(names[0] for names in task.columns.values())
        raise DataError(
            "the task asks for several texts",
            expected=f"an object with {fields}",
            received="one text",
            hint='write a row as JSON: {"' + fields.partition(",")[0] + '": "...", ...}',
        )

    def no_columns(self, source: Sequence[Record], name: str) -> DataError:
        """Build the error for records without the columns of the task."""
        first = next((one.fields for one in source if isinstance(one.fields, dict)), {})
        task = self.found_task()
        fields = _FIELDS.get(self.format, "")
        if task is not None:
            fields = ", ".join(names[0] for names in task.columns.values())
        elif self.columns:
            answers = _ANSWERS.get(self.format, ())
            fields = ", ".join(at for field, at in self.columns.items() if field not in answers)
        field = re.split(r"[ ,]", fields)[0]
        if self.columns:
            field = next(iter(self.columns))
        return DataError(
            f"{name} lacks the columns of the task",
            expected=fields,
            received=", ".join(map(str, first)) or "no column",
            hint=f"name the column: --column {field}=NAME",
        )

    def answers(self, records: Sequence[Record], name: str = "rows") -> dict[int, set[str]]:
        """Return the accepted answers of the records that have one, by their number from 1."""
        numbered = (record._replace(line=number) for number, record in enumerate(records, 1))
        try:
            rows = rows_of(
                Source("json", numbered),
                name,
                self.found_task(),
                columns=self.columns,
                labels=self.labels,
                allow_empty=True,
            )
        except (ConfigError, DataError):  # there is no column of labels, which is not needed
            return {}
        if rows.format != self.format or self.format == "text":
            return {}
        return {row.line: _accepted(row) for row in rows.items}

    def _label_words(self) -> str:
        """Return the labels, for messages."""
        task = self.found_task()
        if self.labels:
            return ", ".join(self.labels.values())
        if task is not None and task.choices:
            return ", ".join(
                f"{choice.labels[0]} ({choice.text.strip()})" for choice in task.choices
            )
        return "those of the training"

    def prompt_rows(self, source: Source, name: str) -> Rows:
        """Return records as rows to predict; their labels or answers, if any, are not read.

        Args:
            source: the records of a file, from `readers.files.read_records`.
            name: of the file, for messages.

        Raises:
            DataError: no record has the columns of the task.
        """
        task = self.found_task()
        answer: Any = _ANSWER
        names = _ANSWERS.get(self.format, ())
        if task is not None:
            names, answer = task.label, task.placeholder or _ANSWER
        elif self.format == "classification":
            answer = next(iter(self.labels))
        elif self.format == "multiple_choice":
            answer = 0
        columns = {field: at for field, at in self.columns.items() if field not in names}
        if task is not None:
            columns.pop("label", None)
        dropped = {name.lower() for name in names} | set(self.columns.values()) - set(
            columns.values()
        )
        key = _COLUMN if columns and names else next(iter(names), "")
        if columns and names:
            columns[names[0]] = _COLUMN

        def asked(record: dict[str, Any]) -> dict[str, Any]:
            if self.format == "chat":
                return _asked_chat(record)
            if not names:
                return record
            fields = {
                name: value
                for name, value in record.items()
                if str(name).lower() not in dropped and name not in dropped
            }
            if isinstance(fields.get("prompt_fields"), dict):
                fields["prompt_fields"] = fields["prompt_fields"] | {key: answer}
                return fields
            return fields | {key: answer}

        records = (
            record._replace(fields=asked(record.fields))
            if isinstance(record.fields, dict)
            else record
            for record in source.records
        )
        return rows_of(
            Source(source.kind, records, source.notes),
            name,
            task,
            columns=columns,
            labels=self.labels,
        )


def label_texts(row: Row) -> tuple[str, ...]:
    """Return the text of each candidate of a row; letters if the texts are not distinct."""
    texts = tuple(answer.strip() for _, answer in row.pairs)
    if len(set(texts)) < len(texts):
        return tuple(letter_of(index) for index in range(len(texts)))
    return texts


def named_task_only(name: str) -> TrainedTask:
    """Describe a task by its name or its template's path, if nothing recorded the training."""
    template = None
    if is_template(name):
        template = template_text(name)
    task = find_task(name)
    return TrainedTask(format=task.kind, task=task.name, template=template)


def _accepted(row: Row) -> set[str]:
    if row.gold is not None:
        return {label_texts(row)[row.gold]}
    if row.answers:
        return {answer.strip() for answer in row.answers}
    if row.messages:
        return {str(row.messages[-1][1]).strip()}
    return {answer.strip() for _, answer in row.pairs}


def _asked_chat(record: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation whose last assistant turn is the placeholder."""
    if isinstance(record.get("prompt"), list):
        return record | {"completion": [{"role": "assistant", "content": _ANSWER}]}
    for key, names, values in (
        ("messages", ("role", "content"), ("assistant", _ANSWER)),
        ("conversations", ("from", "value"), ("gpt", _ANSWER)),
    ):
        turns = record.get(key)
        if not isinstance(turns, list) or not turns:
            continue
        last = turns[-1]
        if isinstance(last, dict) and last.get(names[0]) in ("assistant", "gpt", "model"):
            turns = turns[:-1]
        return record | {key: [*turns, dict(zip(names, values, strict=True))]}
    return record


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


def known_task(data: DataConfig, max_length_tokens: int) -> TrainedTask:
    """Describe the task that a run file names, before any row is read.

    Its label texts are those of the task; a tokenizer's chat template frames none of its prompts.

    Raises:
        ConfigError: there is no such task, or the template cannot be used.
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
