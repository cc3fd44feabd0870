"""Records as rows: the format is inferred from the keys, and every bad row is named, never raised.

| format          | keys                                                                                 |
|-----------------|--------------------------------------------------------------------------------------|
| chat            | messages: [{role, content}, ...]                                                     |
| instruct        | instruction, output, and maybe input (or context, response); or prompt, response     |
| completion      | prompt, completion                                                                   |
| text            | text                                                                                 |
| classification  | text or sentence, and label                                                          |
| multiple_choice | question or prompt, choices: [...], and answer: the choice, its letter or its index  |
| a task          | task, prompt_fields: {...}, label; or the task's columns flat, with `task=` given    |
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.data.convert import converter
from ondevice.data.files import read_records
from ondevice.data.rows import BadRow, Format, RowProblem, Rows, describe
from ondevice.data.templates import TASKS, Task, find_task, plain_name
from ondevice.errors import DataError


def read_rows(path: str | Path, *, task: str | None = None, allow_empty: bool = False) -> Rows:
    """Read every row of a file (or of a Hugging Face data set named `name[:config][@split]`).

    The first record whose keys fit a format decides it for the whole file; rows of other keys, and rows
    with wrong values, are left out and listed in `Rows.problems`.

    Args:
        path: a .jsonl, .csv (with header) or .txt file in UTF-8, or a data set's name.
        task: a task of Table 7 (`templates.TASKS`); None takes it from the rows' own "task", if any.
        allow_empty: return the problems alone where no row is usable, instead of raising.

    Raises:
        ConfigError: `task` is not a task.
        DataError: the file is missing, empty or unreadable, or not one row is usable.
        MissingPackageError: a data set's name, and `datasets` is not installed.
    """
    chosen = find_task(task) if task else None
    kind, records = read_records(path)
    name, problems, usable = str(path), [], []
    for line, record in records:
        if isinstance(record, BadRow):
            problems.append(RowProblem(name, line, record.field, record.reason))
        else:
            usable.append((line, record))
    if not usable and allow_empty:
        return Rows(name, chosen.kind if chosen else "text", [], problems, chosen.name if chosen else None)
    format_, chosen = _infer([record for _, record in usable], chosen, name, problems)
    convert = converter(format_, chosen, [record for _, record in usable], kind)
    items = []
    for line, record in usable:
        try:
            items.append(convert(line, record))
        except BadRow as bad:
            problems.append(RowProblem(name, line, bad.field, bad.reason))
    problems.sort(key=lambda problem: problem.line)
    if not items and not allow_empty:
        raise _no_rows(name, problems)
    return Rows(name, format_, items, problems, chosen.name if chosen else None)


def _no_rows(name: str, problems: list[RowProblem]) -> DataError:
    first = "; ".join(str(problem) for problem in problems[:3])
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return DataError(
        f"no usable row in {name}: {first}{more}" if problems else f"no row in {name}",
        expected="at least one row of a known format",
        received=f"{len(problems)} rows, all with problems" if problems else "none",
        hint=f"`ondevice data '{name}'` lists every bad row",
    )


def _infer(
    records: list[dict[str, Any]], task: Task | None, name: str, problems: list[RowProblem]
) -> tuple[Format, Task | None]:
    """The file's format and task; the format of a task is its kind."""
    if task is not None:
        return task.kind, task
    unknown = None
    for record in records:
        if "prompt_fields" in record:
            task = TASKS.get(plain_name(str(record.get("task"))))
            if task is not None:
                return task.kind, task
            unknown = unknown or record.get("task")
        elif (format_ := _format_of(record)) is not None:
            return format_, None
    if unknown is not None:
        message = f"{name} is of a task without a prompt"
        hint = "write the rows as prompt and completion, or as messages"
        raise DataError(message, expected=f"one of {', '.join(TASKS)}", received=describe(unknown), hint=hint)
    if not records:
        raise _no_rows(name, problems)
    raise DataError(
        f"cannot tell the format of {name}",
        expected="the keys messages; instruction and output; prompt and completion; text; text and label; "
        "question, choices and answer; or a task with its columns",
        received="the keys " + ", ".join(str(key) for key in records[0]),
        hint=f"name the task with --task ({', '.join(TASKS)}) or rename the keys",
    )


def _format_of(record: dict[str, Any]) -> Format | None:
    keys = set(record)
    if "messages" in keys:
        return "chat"
    if ("instruction" in keys and keys & {"output", "response"}) or {"prompt", "response"} <= keys:
        return "instruct"
    if {"prompt", "completion"} <= keys:
        return "completion"
    if {"choices", "answer"} <= keys and keys & {"question", "prompt"}:
        return "multiple_choice"
    if keys & {"text", "sentence"} and "label" in keys:
        return "classification"
    return "text" if "text" in keys else None
