"""Records as rows: the format is inferred from the keys, and every bad row is named, never raised.

| format          | keys                                                                                 |
|-----------------|--------------------------------------------------------------------------------------|
| chat            | messages: [{role, content}, ...] or conversations: [{from, value}, ...]              |
| preference      | chosen, rejected, and maybe prompt                                                   |
| thumbs          | prompt, completion, and label: true or false; or prompt, answer and liked            |
| instruct        | instruction, output, and maybe input (or context, response); prompt, response;       |
|                 | question, answer; or question, response; and maybe system (or system_prompt), history |
| completion      | prompt, completion                                                                   |
| text            | text                                                                                 |
| classification  | text or sentence, and label                                                          |
| multiple_choice | question or prompt, choices: [...], and answer: the choice, its letter or its index  |
| a task          | task, prompt_fields: {...}, label; or the task's columns flat, with `task=` given    |
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ondevice.core.config import path_of
from ondevice.core.errors import ConfigError, DataError
from ondevice.data.records import Source, check_text, describe, read_records
from ondevice.data.rows import BadRow, Fields, Format, Row, RowProblem, Rows
from ondevice.data.templates import TASKS, Task, find_task, label_key, plain_name, render


def read_rows(
    path: str | Path, *, task: str | None = None, columns: Mapping[str, str] | None = None, allow_empty: bool = False
) -> Rows:
    """Read every row of a file, a folder, or a Hugging Face data set named `name[:config][@split]`.

    The first record whose keys fit a format decides it for the whole file; rows of other keys, and rows
    with wrong values, are left out and listed in `Rows.problems`.

    Args:
        path: a file of one of `records.SUFFIXES`, a folder of them, or a data set's name.
        task: a task of Table 7 (`templates.TASKS`), or the path of a template of one's own (`.yaml`); None takes it
            from the rows' own "task", if any.
        columns: {field: the file's column}, for columns of other names; dots step into objects.
        allow_empty: return the problems alone where no row is usable, instead of raising.

    Raises:
        ConfigError: `task` is not a task, or `columns` names no field.
        DataError: the file is missing, empty or unreadable, or not one row is usable.
        MissingPackageError: the package that reads this kind of file is not installed.
    """
    path = path_of(path, "the data")
    chosen = named_task(task, path) if task else None
    return rows_of(read_records(path), str(path), chosen, columns=columns, allow_empty=allow_empty)


def rows_of(
    source: Source,
    name: str,
    chosen: Task | None = None,
    *,
    columns: Mapping[str, str] | None = None,
    allow_empty: bool = False,
) -> Rows:
    """Turn records into rows, as `read_rows` does with those of a file; `name` is what messages call them."""
    notes, problems, usable = list(source.notes), [], []
    for line, record, file in source.records:
        if isinstance(record, BadRow):
            problems.append(RowProblem(file or name, line, record.field, record.reason))
        else:
            usable.append((line, record, file))
    if columns or (usable and chosen is None and _plainly(usable[0][1]) is None):
        from ondevice.data.columns import rename

        usable, named = rename(usable, columns, chosen, problems, notes, name)
    else:
        named = frozenset()
    if not usable and allow_empty:
        return Rows(name, chosen.kind if chosen else "text", [], problems, chosen.name if chosen else None, notes)
    format_, chosen = _infer([record for _, record, _ in usable], chosen, named, name, problems)
    convert = converter(format_, chosen, [record for _, record, _ in usable], source.kind)
    items = []
    for line, record, file in usable:
        fields = Fields(record)
        try:
            row = convert(line, fields, file)
            rest = {**row.rest, **fields.unread()}
            items.append(replace(row, rest=rest if row.messages else dict.fromkeys(rest)) if rest else row)
        except BadRow as bad:
            problems.append(RowProblem(file or name, line, bad.field, bad.reason))
    problems.sort(key=lambda problem: (problem.file, problem.line))
    if not items and not allow_empty:
        raise _no_rows(name, problems)
    if chosen is None:
        return Rows(name, format_, items, problems, None, notes)
    return Rows(name, format_, items, problems, chosen.name, notes, chosen.metric, chosen.values)


def named_task(task: str, path: str | Path) -> Task:
    """Find the task of a file; the ConfigError where there is none says what the file is without a task."""
    try:
        return find_task(task)
    except ConfigError as unknown:
        from ondevice.data.columns import advise_task

        unknown.hint = advise_task(path, unknown.hint)
        raise


def _no_rows(name: str, problems: list[RowProblem]) -> DataError:
    first = "; ".join(str(problem) for problem in problems[:3])
    rest = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return DataError(
        f"no usable row in {name}: {first}{rest}" if problems else f"no row in {name}",
        expected="at least one row of a known format",
        received=f"{len(problems)} rows, all with problems" if problems else "none",
        hint=f"`ondevice data '{name}'` lists every bad row",
    )


def _infer(
    records: list[dict[str, Any]], task: Task | None, named: frozenset[str], name: str, problems: list[RowProblem]
) -> tuple[Format, Task | None]:
    """Infer the file's format and task; the format of a task is its kind. Columns that the user `named` decide alone,
    where they suffice."""
    if task is not None:
        return task.kind, task
    unknown = None
    for record in records:
        if "prompt_fields" in record and not named:
            task = TASKS.get(plain_name(str(record.get("task"))))
            if task is not None:
                return task.kind, task
            unknown = unknown or record.get("task")
        elif (format_ := format_of(record, named)) is not None:
            return format_, None
    if not records:
        raise _no_rows(name, problems)
    from ondevice.data.columns import no_format

    raise no_format(records[0], unknown, name)


def _plainly(record: dict[str, Any]) -> Format | str | None:
    return "task" if "prompt_fields" in record else format_of(record)


def format_of(record: dict[str, Any], named: frozenset[str] = frozenset()) -> Format | None:
    """Return the format that a record's keys fit; of the columns that the user `named` alone, where they fit one."""
    if named and (found := format_of({key: record[key] for key in record if key in named})) is not None:
        return found
    keys = set(record)
    if {"chosen", "rejected"} <= keys:
        return "preference"
    if keys & {"messages", "conversations"}:
        return "chat"
    if ("instruction" in keys and keys & {"output", "response"}) or {"prompt", "response"} <= keys:
        return "instruct"
    if {"prompt", "answer", "liked"} <= keys:
        return "thumbs"
    if {"prompt", "completion"} <= keys:
        if "thumbs" in keys or str(record.get("label")).strip().lower() in ("true", "false"):
            return "thumbs"
        return "chat" if isinstance(record["prompt"], list) or isinstance(record["completion"], list) else "completion"
    if {"choices", "answer"} <= keys and keys & {"question", "prompt"}:
        return "multiple_choice"
    if {"question", "answer"} <= keys or {"question", "response"} <= keys:
        return "instruct"
    if keys & {"text", "sentence"} and "label" in keys:
        return "classification"
    return "text" if "text" in keys else None


MAX_CLASSES = 50
"""More distinct labels than this are taken for free text, not for classes."""


def converter(
    format_: Format, task: Task | None, records: list[dict[str, Any]], kind: str
) -> Callable[[int, dict[str, Any], str], Row]:
    """Return the function (line, record, file) -> Row of a format; it raises BadRow."""
    if task is not None:
        return lambda line, record, file: _task_row(task, line, record, file)
    if format_ == "classification":
        classes = _classes(records)
        return lambda line, record, file: _class_row(classes, line, record, file)
    if format_ == "text":
        # A whole file is a stretch of running text, not a document that ends.
        return lambda line, record, file: Row(line, (("", _text(record, "text")),), end=kind != "txt", file=file)
    if format_ in ("chat", "preference", "thumbs"):
        from ondevice.data import conversations

        if format_ == "chat" and not any({"messages", "conversations"} & set(record) for record in records):
            return conversations.prompt_row
        return {"chat": conversations.chat_row, "preference": conversations.preference_row,
                "thumbs": conversations.thumbs_row}[format_]  # fmt: skip
    return {"instruct": _instruct_row, "completion": _completion_row, "multiple_choice": _choice_row}[format_]


def task_fields(name: str | None, record: dict[str, Any]) -> dict[str, Any]:
    """Flatten the columns of a task's record, with its label.

    Raises:
        BadRow: the record is of another task than `name`, or its `prompt_fields` are no object.
    """
    if "prompt_fields" not in record:
        return record
    named = record.get("task", name)
    if name is not None and plain_name(str(named)) != plain_name(name):
        raise BadRow("task", f"expected '{name}', received {describe(named)}")
    if not isinstance(record["prompt_fields"], dict):
        raise BadRow("prompt_fields", f"expected an object, received {describe(record['prompt_fields'])}")
    return record["prompt_fields"] | ({"label": record["label"]} if "label" in record else {})


def _task_row(task: Task, line: int, record: dict[str, Any], file: str) -> Row:
    fields = task_fields(None if task.own else task.name, record)
    nested = Fields(fields) if fields is not record else Fields({})
    rendered = render(task, nested or fields)
    return Row(line, rendered.pairs, rendered.gold, answers=rendered.answers, label=rendered.label,
               end=task.kind == "completion", file=file, value=rendered.value,
               rest=nested.unread("prompt_fields."))  # fmt: skip


def _text(record: dict[str, Any], *keys: str, empty: bool = False) -> str:
    for key in keys:
        if key in record:
            return check_text(record[key], key, empty=empty)
    if empty:
        return ""
    raise BadRow(keys[0], f"is missing; the keys are {', '.join(str(key) for key in record)}")


def _instruct_row(line: int, record: dict[str, Any], file: str) -> Row:
    """Read a question and its answer, behind what the system and earlier turns said: context, not trained on."""
    from ondevice.data.conversations import history_of, system_of

    instruction = _text(record, "instruction", "prompt", "question")
    context = next((_text(record, key, empty=True) for key in ("input", "context") if record.get(key) is not None), "")
    answer = _text(record, "output", "response", "answer")
    system, history = system_of(record), history_of(record)
    asked = f"{instruction}\n\n{context}" if context.strip() else instruction
    block = f"\n\n### Input:\n{context}" if context.strip() else ""
    before = "".join(
        f"### Response:\n{text}\n\n" if role == "assistant" else f"### Instruction:\n{text}\n\n"
        for role, text, *_ in history
    )
    prompt = f"{system}\n\n" if system else ""
    prompt += f"{before}### Instruction:\n{instruction}{block}\n\n### Response:\n"
    first = (("system", system),) if system else ()
    messages = (*first, *history, ("user", asked), ("assistant", answer))
    return Row(line, ((prompt, answer),), messages=messages, file=file)


def _completion_row(line: int, record: dict[str, Any], file: str) -> Row:
    return Row(line, pairs=((_text(record, "prompt", empty=True), _text(record, "completion")),), file=file)


def _classes(records: list[dict[str, Any]]) -> dict[str, str]:
    """Collect every label in the file, {label key: answer text}, sorted by key."""
    classes: dict[str, str] = {}
    for record in records:
        key = label_key(record.get("label"))
        if key:
            classes.setdefault(key, str(record["label"]).strip())
    if len(classes) > MAX_CLASSES:
        raise DataError(
            f"{len(classes)} different labels are too many for classes",
            expected=f"at most {MAX_CLASSES} different values of 'label'",
            received=", ".join(sorted(classes)[:4]) + ", ...",
            hint="for free answers name the columns prompt and completion",
        )
    return dict(sorted(classes.items()))


def _class_row(classes: dict[str, str], line: int, record: dict[str, Any], file: str) -> Row:
    text = _text(record, "text", "sentence")
    label = record.get("label")
    key = label_key(label)
    if not key:
        raise BadRow("label", f"expected a text, a number or a boolean, received {describe(label)}")
    check_text(classes[key], "label")
    pairs = tuple((f"{text.strip()}\nLabel:", f" {answer}") for answer in classes.values())
    return Row(line, pairs, list(classes).index(key), label=classes[key], end=False, file=file)


def _choice_row(line: int, record: dict[str, Any], file: str) -> Row:
    question = _text(record, "question", "prompt").strip()
    texts = texts_of(record.get("choices"), "choices", least=2)
    gold = choice_index(record.get("answer"), texts)
    pairs = tuple((f"{question}\nAnswer:", f" {text}") for text in texts)
    label = chr(ord("A") + gold) if gold < 26 else str(gold)
    return Row(line, pairs, gold, label=label, end=False, file=file)


def texts_of(value: Any, name: str, least: int = 1) -> list[str]:
    """Return the texts of a list, which a CSV cell holds as JSON, without the space around them.

    Raises:
        BadRow: not a list of at least `least` texts.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise BadRow(name, "expected a JSON list of texts in the cell") from None
    if not isinstance(value, list) or len(value) < least:
        count = {1: "one text", 2: "two texts"}[least]
        raise BadRow(name, f"expected a list of at least {count}, received {describe(value)}")
    return [check_text(text, f"{name}.{index}").strip() for index, text in enumerate(value)]


def choice_index(answer: Any, texts: list[str]) -> int:
    """Return the index of the choice that `answer` names: by its text, its letter or its index.

    Raises:
        BadRow: it names none.
    """
    letters = [chr(ord("A") + index) for index in range(min(len(texts), 26))]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return answer
    if isinstance(answer, str):
        # A text first: "1" may be a choice, and then is not an index.
        for names in (texts, letters, [str(index) for index in range(len(texts))]):
            if answer.strip() in names:
                return names.index(answer.strip())
    allowed = f"one of the choices, {letters[0]} to {letters[-1]}, or 0 to {len(texts) - 1}"
    raise BadRow("answer", f"expected {allowed}; received {describe(answer)}")
