"""Rows to evaluate and to predict, as a recorded task asks for them.

Rows to predict need no label: a placeholder stands for the answer, so a prompt is rendered,
tokenized and cut by the code that trained on it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ondevice.core.errors import ConfigError, DataError
from ondevice.data.readers.source import Record, Source
from ondevice.data.reading import rows_of
from ondevice.data.rows import Row, Rows
from ondevice.data.tasks.record import TaskRecord
from ondevice.data.tasks.task import letter_of

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


class Answers(NamedTuple):
    """Answers that records have.

    Attributes:
        accepted: of each record that has one, by its number from 1.
        unseen: how many records have each label that was not trained.
    """

    accepted: dict[int, set[str]]
    unseen: dict[str, int]


class TrainedTask(TaskRecord):
    """How rows become prompts, which answers there are, and what ends them; and the rows of files."""

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

    def answers(self, records: Sequence[Record], name: str = "rows") -> Answers:
        """Return the answers that the records have."""
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
            return Answers({}, {})
        if rows.format != self.format or self.format == "text":
            return Answers({}, {})
        shown = (
            problem.reason.rpartition("received ")[2]
            for problem in rows.problems
            if self.has_candidates and _UNSEEN.match(problem.reason)
        )
        # A row with an empty label has none.
        unseen = Counter(one.removeprefix("'").removesuffix("'") for one in shown if one != "''")
        return Answers({row.line: _accepted(row) for row in rows.items}, dict(unseen))

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
