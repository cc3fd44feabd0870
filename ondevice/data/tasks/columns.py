"""The format that a file's columns fit, and columns of other names: mapped, or found by case."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ondevice.core.errors import ConfigError, DataError, OndeviceError
from ondevice.data.readers.files import read_records
from ondevice.data.rows import BadRow, describe
from ondevice.data.tasks.formats import MAX_CLASSES, format_of
from ondevice.data.tasks.task import Task, column, label_key
from ondevice.data.tasks.templates import TASKS

FIELDS = (
    *("messages", "conversations", "tools", "prompt", "completion", "instruction", "input"),
    *("context", "output", "response", "text", "sentence", "label", "question", "choices"),
    *("answer", "chosen", "rejected", "thumbs", "liked", "system", "system_prompt", "history"),
)
"""Names that formats have for their columns."""
LABEL_CHARACTERS = 40
"""Longer values are texts, not labels."""


def parse_columns(pairs: Iterable[str]) -> dict[str, str]:
    """Read `field=column` pairs.

    Raises:
        ConfigError: a pair without `=`, or a field twice.
    """
    columns: dict[str, str] = {}
    for pair in pairs:
        field, separator, source = (part.strip() for part in pair.partition("="))
        if not (field and separator and source) or field in columns:
            expected = "field=column, each field once: prompt=Question"
            raise ConfigError(f"not a column mapping: {pair}", expected=expected, received=pair)
        columns[field] = source
    return columns


Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Renames a record's columns to the names that formats know; BadRow if a column is missing."""


def renaming(
    first: dict[str, Any] | None,
    columns: Mapping[str, str] | None,
    task: Task | None,
    notes: list[str],
) -> tuple[Change, frozenset[str]]:
    """Return a function that renames the columns of a file, and the names from the user.

    Without `columns`, the names in the `first` record are matched in any case, if they then fit a
    format. A note on the names is added to `notes`.

    Raises:
        ConfigError: `columns` names a field that neither a format nor the task has.
    """
    if not columns:
        names = _without_case(first or {})
        if not names:
            return lambda record: record, frozenset()
        notes.append("columns are named without regard to case: " + ", ".join(names.values()))
        fields = {source: field for field, source in names.items()}  # a row may lack some of them

        def lowered(record: dict[str, Any]) -> dict[str, Any]:
            return {fields.get(key, key): value for key, value in record.items()}

        return lowered, frozenset()
    _check_fields(columns, task)
    named = ", ".join(f"{field} is '{source}'" for field, source in columns.items())
    notes.append(f"columns: {named}")

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if isinstance(record.get("prompt_fields"), dict):
            others = {key: record[key] for key in record if key not in ("prompt_fields", "task")}
            record = record["prompt_fields"] | others
        values = {_key(field, task): column(record, (name,)) for field, name in columns.items()}
        renamed = set(columns.values()) - set(values)
        return {key: value for key, value in record.items() if key not in renamed} | values

    return change, frozenset(columns)


def no_column(fields: dict[str, Any], columns: Mapping[str, str], name: str) -> DataError:
    """Build the error for a file without the columns that the user named; `fields` is its first."""
    fields = fields.get("prompt_fields", fields)
    missing = next((source for source in columns.values() if not _has(fields, source)), "")
    near = difflib.get_close_matches(missing, list(map(str, fields)), n=1, cutoff=0.5)
    hint = "name columns as the file does"
    if near:
        hint = f"did you mean '{near[0]}'?"
    return DataError(
        f"{name} has no column '{missing}'",
        expected=", ".join(map(str, fields)),
        received=missing,
        hint=hint,
    )


def _has(fields: dict[str, Any], source: str) -> bool:
    try:
        column(fields, (source,))
    except BadRow:
        return False
    return True


def _key(field: str, task: Task | None) -> str:
    """Return the column that the task looks for first; other formats have one name a field."""
    if task is None:
        return field
    for name, keys in task.columns.items():
        if field == name or field in keys:
            return keys[0]
    return task.label[0]


def _check_fields(columns: Mapping[str, str], task: Task | None) -> None:
    known = set(FIELDS)
    if task is not None:
        known = {
            "label",
            *task.label,
            *task.columns,
            *(key for keys in task.columns.values() for key in keys),
        }
    for field in columns:
        if field not in known:
            near = difflib.get_close_matches(field, known, n=1)
            hint = "the format's field comes first: text=Review"
            if near:
                hint = f"did you mean '{near[0]}'?"
            raise ConfigError(
                f"unknown field '{field}'",
                expected=", ".join(sorted(known)),
                received=field,
                hint=hint,
            )


def _without_case(record: dict[str, Any]) -> dict[str, str]:
    """Map fields to columns that differ from them only in case; empty if that fits no format."""
    lowered = {str(key).strip().lower(): key for key in record}
    values = {field: record[key] for field, key in lowered.items()}
    if len(lowered) < len(record) or format_of(values) is None:
        return {}
    return {field: key for field, key in lowered.items() if field in FIELDS and field != key}


def no_format(records: list[dict[str, Any]], task: Any, name: str) -> DataError:
    """Build the error for a file that fits no format.

    Args:
        records: the first ones, from whose values the columns are guessed.
        task: an unknown one of its rows, or None.
    """
    record = records[0]
    keys = [str(key) for key in record]
    if task is not None:
        return DataError(
            f"{name} is of a task without a prompt",
            expected=f"one of {', '.join(TASKS)}",
            received=describe(task),
            hint="write a custom template, --task my.yaml; docs/howto/data.md shows one",
        )
    sides = [side for side in ("chosen", "rejected") if side in keys]
    if len(sides) == 1:
        return _half_a_pair(sides[0], keys, name)
    fitting = [
        task.name
        for task in TASKS.values()
        if all(
            any(_has(record, name) for name in names)
            for names in (*task.columns.values(), task.label)
        )
    ]
    question, answer = question_and_answer(records)
    text, label = map(_quoted, text_and_label(records) or (question, answer))
    first, last = map(_quoted, (question, answer))
    advice = [
        f"name the columns: --column text={text} --column label={label} for classes, "
        f"--column prompt={first} --column completion={last} for free answers"
    ]
    if system := next((key for key in keys if _words_of(key) & _SYSTEM), None):
        flags = f"--column system={_quoted(system)} --column response={last} instead of completion"
        advice[0] += f"; with {flags} the system speaks before the question"
    if fitting:
        advice.insert(0, f"the columns are those of --task {' or '.join(fitting)}")
    if len(keys) == 1 and (odd := re.search(r"[:^~#]|\s{2,}", keys[0])):
        shown = odd[0].strip() or "spaces"
        cause = f"if '{shown}' separates the columns, save the file with commas, semicolons or tabs"
        advice.insert(0, cause)
    received = "the keys " + ", ".join(keys)
    if not keys[1:]:
        received += " (the first line of a table is its header)"
    return DataError(
        f"cannot tell the format of {name}",
        expected="the keys messages; instruction and output; prompt and completion; question and "
        "answer; text; text and label; question, choices and answer; chosen and rejected",
        received=received,
        hint="; or ".join(advice),
    )


def _half_a_pair(side: str, keys: list[str], name: str) -> DataError:
    """Build the error for preference pairs of which no row has the other side."""
    other = "rejected" if side == "chosen" else "chosen"
    hint = f"add it, or name its column: --column {other}=COLUMN"
    if "prompt" in keys:
        hint += f"; --column prompt=prompt --column completion={side} takes only the {side} texts"
    return DataError(
        f"{name}: '{other}' is missing in every row",
        expected="a preference pair in each row: chosen and rejected",
        received="the keys " + ", ".join(keys),
        hint=hint,
    )


_SYSTEM = {"system", "sys"}
_ASKS = {
    *("question", "instruction", "prompt", "query", "input", "user", "human", "ask"),
    *("problem", "task", "q"),
}
_ANSWERS = {
    *("answer", "response", "output", "completion", "target", "reply", "assistant"),
    *("solution", "label", "a"),
}
_SAYS_LESS = {
    *("id", "idx", "index", "uuid", "history", "source", "tools", "date", "time", "lang"),
    *("language", "context"),
}


def question_and_answer(records: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the columns that are most likely a question and its answer.

    Names decide, then the two longest texts in their order. A column for the system is never one of them.
    """
    likely = _likely(records[0])
    if len(likely) < 2:
        return "QUESTION", "ANSWER"
    longest = sorted(likely, key=lambda key: length_of(records, key), reverse=True)[:2]
    longest.sort(key=likely.index)
    answer = next((key for key in reversed(likely) if _words_of(key) & _ANSWERS), longest[-1])
    others = [key for key in likely if key != answer]
    questions = [key for key in others if _words_of(key) & _ASKS]
    questions += [key for key in longest if key != answer]
    return questions[0], answer


def text_and_label(records: Sequence[dict[str, Any]]) -> tuple[str, str] | None:
    """Return the columns that are most likely a text and its label; None if no column looks like labels.

    A label is short and has few different values; a column that is named so comes first. The text is
    the longest of the others.
    """
    keys = [str(key) for key in records[0]]
    counts = {key: _classes(records, key) for key in keys}
    most = min(MAX_CLASSES, len(records) / 2)
    labels = [
        key
        for key in keys
        if 2 <= counts[key] <= most and length_of(records, key) <= LABEL_CHARACTERS * len(records)
    ]
    if not labels or len(keys) < 2:
        return None
    label = min(labels, key=lambda key: (key.lower() not in ("label", "class"), counts[key]))
    text = max((key for key in keys if key != label), key=lambda key: length_of(records, key))
    return text, label


def _classes(records: Sequence[dict[str, Any]], key: str) -> int:
    """Count the different values of a column; 0 if one of them cannot be a label."""
    values = {label_key(record.get(key)) for record in records if record.get(key) not in (None, "")}
    return 0 if None in values else len(values)


def _likely(record: dict[str, Any]) -> list[str]:
    """Return the columns that may be asked or answered: of two and more, those that say something."""
    keys = [str(key) for key in record if not _words_of(str(key)) & _SYSTEM]
    likely = [key for key in keys if not _words_of(key) & _SAYS_LESS]
    if len(likely) < 2:
        return keys
    return likely


def length_of(records: Sequence[dict[str, Any]], key: str) -> int:
    """Return how many letters a column has in all."""
    return sum(len(str(record.get(key) or "")) for record in records)


def _words_of(key: str) -> set[str]:
    """Return the words of a column's name: "systemPrompt" and "system_prompt" have two."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key)}


def _quoted(key: str) -> str:
    return key if re.fullmatch(r"[\w.-]+", key) else f"'{key}'"


def advise_task(path: str | Path, hint: str | None) -> str | None:
    """Add to an unknown task's hint the format that the file has without a task, if any."""
    try:
        records = read_records(path).records
        first = next((fields for _, fields, _ in records if isinstance(fields, dict)), {})
    except OndeviceError:
        return hint
    lowered = {field: first[key] for field, key in _without_case(first).items()}
    format_ = format_of(first) or format_of(lowered)
    if format_:
        return f"{hint}; without --task the rows are read as {format_}"
    return hint
