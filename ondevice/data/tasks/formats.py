"""Records as rows, by the format that their keys fit; each bad row is reported, never raised.

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

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ondevice.core.errors import DataError
from ondevice.data.rows import BadRow, Fields, Format, Row, Turn, check_text, describe
from ondevice.data.tasks.conversations import (
    chat_row,
    history_of,
    preference_row,
    prompt_row,
    system_of,
    thumbs_row,
)
from ondevice.data.tasks.task import Task, choice_index, label_key, letter_of, plain_name, texts_of
from ondevice.data.tasks.templates import TASKS, render


def fits(record: dict[str, Any]) -> bool:
    """Return whether a record's own keys fit a format."""
    return "prompt_fields" in record or format_of(record) is not None


def format_of(record: dict[str, Any], named: frozenset[str] = frozenset()) -> Format | None:
    """Return the format that a record's keys fit; columns that the user `named` come first."""
    if named:
        by_name = format_of({key: record[key] for key in record if key in named})
        if by_name is not None:
            return by_name
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
        turns = (record["prompt"], record["completion"], record.get("images"))
        if any(isinstance(value, list) for value in turns):
            return "chat"
        return "completion"
    if {"choices", "answer"} <= keys and keys & {"question", "prompt"}:
        return "multiple_choice"
    if {"question", "answer"} <= keys or {"question", "response"} <= keys:
        return "instruct"
    if keys & {"text", "sentence"} and "label" in keys:
        return "classification"
    if "text" in keys:
        return "text"
    return None


def infer(
    records: Iterable[dict[str, Any]],
    task: Task | None,
    named: frozenset[str],
    refuse: Callable[[Any], DataError],
) -> tuple[Format, Task | None]:
    """Infer the file's format and task; a task's format is its kind.

    Columns that the user `named` decide by themselves if they suffice.

    Raises:
        DataError: from `refuse`, called with an unknown task or None, if no record fits.
    """
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
    raise refuse(unknown)


MAX_CLASSES = 50
"""More distinct labels than this are taken for free text, not for classes."""
MOST_LABEL_CHARACTERS = 4 << 20
"""Of all distinct labels together; counting stops there."""


def converter(
    format_: Format,
    task: Task | None,
    records: Callable[[], Iterator[dict[str, Any]]],
    kind: str,
    labels: Mapping[str, str],
) -> Callable[[int, dict[str, Any], str], Row]:
    """Return a format's function (line, record, file) -> Row, which raises BadRow.

    Args:
        records: reads all records again.
        labels: the classes of classification rows, {label key: label text}.
    """
    if task is not None:
        return lambda line, record, file: _task_row(task, line, record, file)
    if format_ == "classification":
        return lambda line, record, file: _class_row(labels, line, record, file)
    if format_ == "text":
        # A whole file is a stretch of running text, not a document that ends.
        end = kind != "txt"
        return lambda line, record, file: Row(
            line, (("", _text(record, "text")),), end=end, file=file
        )
    if format_ == "chat":
        has_turns = any({"messages", "conversations"} & set(record) for record in records())
        return chat_row if has_turns else prompt_row
    return {
        "preference": preference_row,
        "thumbs": thumbs_row,
        "instruct": _instruct_row,
        "completion": _completion_row,
        "multiple_choice": _choice_row,
    }[format_]


def task_fields(name: str | None, record: dict[str, Any]) -> dict[str, Any]:
    """Flatten the columns of a task's record, with its label.

    Raises:
        BadRow: the record is of another task than `name`, or `prompt_fields` is not an object.
    """
    if "prompt_fields" not in record:
        return record
    named = record.get("task", name)
    if name is not None and plain_name(str(named)) != plain_name(name):
        raise BadRow("task", f"expected '{name}', received {describe(named)}")
    fields = record["prompt_fields"]
    if not isinstance(fields, dict):
        raise BadRow("prompt_fields", f"expected an object, received {describe(fields)}")
    return fields | {key: record[key] for key in ("label",) if key in record}


def _task_row(task: Task, line: int, record: dict[str, Any], file: str) -> Row:
    fields = task_fields(None if task.own else task.name, record)
    nested = Fields({} if fields is record else fields)
    rendered = render(task, nested or fields)
    return Row(
        line,
        rendered.pairs,
        rendered.gold,
        answers=rendered.answers,
        label=rendered.label,
        end=task.kind == "completion",
        file=file,
        value=rendered.value,
        rest=nested.unread("prompt_fields."),
    )


def _text(record: dict[str, Any], *keys: str, empty: bool = False) -> str:
    for key in keys:
        if key in record:
            return check_text(record[key], key, empty=empty)
    if empty:
        return ""
    raise BadRow(keys[0], f"is missing; the keys are {', '.join(str(key) for key in record)}")


def _instruct_row(line: int, record: dict[str, Any], file: str) -> Row:
    """Read a question and its answer; the system and earlier turns are context."""
    instruction = _text(record, "instruction", "prompt", "question")
    inputs = (key for key in ("input", "context") if record.get(key) is not None)
    context = "".join(_text(record, key, empty=True) for key in islice(inputs, 1))
    answer = _text(record, "output", "response", "answer")
    messages: tuple[Turn, ...] = history_of(record)
    headings = {"assistant": "Response"}
    prompt = "".join(
        f"### {headings.get(role, 'Instruction')}:\n{text}\n\n" for role, text, *_ in messages
    )
    if system := system_of(record):
        messages = (("system", system), *messages)
        prompt = f"{system}\n\n{prompt}"
    asked = instruction
    prompt += f"### Instruction:\n{instruction}"
    if context.strip():
        asked += f"\n\n{context}"
        prompt += f"\n\n### Input:\n{context}"
    prompt += "\n\n### Response:\n"
    messages = (*messages, ("user", asked), ("assistant", answer))
    return Row(line, ((prompt, answer),), messages=messages, file=file)


def _completion_row(line: int, record: dict[str, Any], file: str) -> Row:
    pair = _text(record, "prompt", empty=True), _text(record, "completion")
    return Row(line, pairs=(pair,), file=file)


def labels_of(records: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Collect every label in the file, {label key: label text}, sorted by key."""
    classes: dict[str, str] = {}
    size = 0
    for record in records:
        key = label_key(record.get("label"))
        if key and key not in classes:
            classes[key] = str(record["label"]).strip()
            size += len(key)
        if size > MOST_LABEL_CHARACTERS:
            break
    if len(classes) > MAX_CLASSES:
        more = "more than " * (size > MOST_LABEL_CHARACTERS)
        raise DataError(
            f"{more}{len(classes)} different labels are too many for classes",
            expected=f"at most {MAX_CLASSES} different values of 'label'",
            received=", ".join(sorted(classes)[:4]) + ", ...",
            hint="for free answers name the columns prompt and completion",
        )
    return dict(sorted(classes.items()))


def _class_row(classes: Mapping[str, str], line: int, record: dict[str, Any], file: str) -> Row:
    text = _text(record, "text", "sentence")
    label = record.get("label")
    key = label_key(label)
    if not key:
        raise BadRow("label", f"expected a text, a number or a boolean, received {describe(label)}")
    if key not in classes:
        raise BadRow("label", f"expected one of {', '.join(classes)}; received {describe(label)}")
    check_text(classes[key], "label")
    pairs = tuple((f"{text.strip()}\nLabel:", f" {answer}") for answer in classes.values())
    return Row(line, pairs, list(classes).index(key), label=classes[key], end=False, file=file)


def _choice_row(line: int, record: dict[str, Any], file: str) -> Row:
    question = _text(record, "question", "prompt").strip()
    texts = texts_of(record.get("choices"), "choices", least=2)
    gold = choice_index(record.get("answer"), texts)
    pairs = tuple((f"{question}\nAnswer:", f" {text}") for text in texts)
    return Row(line, pairs, gold, label=letter_of(gold), end=False, file=file)
