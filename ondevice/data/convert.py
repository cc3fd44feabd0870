"""One record of a known format as a row."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ondevice.data.rows import BadRow, Format, Row, check_text, describe
from ondevice.data.templates import Task, label_key, plain_name, render
from ondevice.errors import DataError

MAX_CLASSES = 50
"""More distinct labels than this are taken for free text, not for classes."""

ROLES = ("system", "user", "assistant")


def converter(
    format_: Format, task: Task | None, records: list[dict[str, Any]], kind: str
) -> Callable[[int, dict[str, Any]], Row]:
    """The function (line, record) -> Row of a format; it raises BadRow."""
    if task is not None:
        return lambda line, record: _task_row(task, line, record)
    if format_ == "classification":
        classes = _classes(records)
        return lambda line, record: _class_row(classes, line, record)
    if format_ == "text":
        # A whole file is a stretch of running text, not a document that ends.
        return lambda line, record: Row(line, pairs=(("", _text(record, "text")),), end=kind != "txt")
    return {"chat": _chat_row, "instruct": _instruct_row, "completion": _completion_row,
            "multiple_choice": _choice_row}[format_]  # fmt: skip


def task_fields(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The columns of a task's record, flat, with its label.

    Raises:
        BadRow: the record is of another task, or its `prompt_fields` are no object.
    """
    if "prompt_fields" not in record:
        return record
    named = record.get("task", name)
    if plain_name(str(named)) != plain_name(name):
        raise BadRow("task", f"expected '{name}', received {describe(named)}")
    if not isinstance(record["prompt_fields"], dict):
        raise BadRow("prompt_fields", f"expected an object, received {describe(record['prompt_fields'])}")
    return record["prompt_fields"] | ({"label": record["label"]} if "label" in record else {})


def _task_row(task: Task, line: int, record: dict[str, Any]) -> Row:
    rendered = render(task, task_fields(task.name, record))
    return Row(line, rendered.pairs, rendered.gold, answers=rendered.answers, label=rendered.label, end=False)


def _text(record: dict[str, Any], *keys: str, empty: bool = False) -> str:
    for key in keys:
        if key in record:
            return check_text(record[key], key, empty=empty)
    if empty:
        return ""
    raise BadRow(keys[0], f"is missing; the keys are {', '.join(str(key) for key in record)}")


def _chat_row(line: int, record: dict[str, Any]) -> Row:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages", f"expected a list of turns, received {describe(messages)}")
    turns = []
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if not isinstance(message, dict):
            raise BadRow(where, f"expected an object with role and content, received {describe(message)}")
        if message.get("role") not in ROLES:
            reason = f"expected {', '.join(ROLES)}; received {describe(message.get('role'))}"
            raise BadRow(f"{where}.role", reason)
        turns.append((message["role"], check_text(message.get("content"), f"{where}.content")))
    while turns and turns[-1][0] != "assistant":
        turns.pop()  # nothing after the last assistant turn is trained on or needed as context
    if not turns:
        raise BadRow("messages", "has no assistant turn to train on")
    if turns[0][0] == "assistant":
        raise BadRow("messages.0.role", "expected system or user first, received assistant")
    return Row(line, messages=tuple(turns))


def _instruct_row(line: int, record: dict[str, Any]) -> Row:
    instruction = _text(record, "instruction", "prompt")
    given = {key: value for key, value in record.items() if value is not None}
    context = _text(given, "input", "context", empty=True)
    answer = _text(record, "output", "response")
    asked = f"{instruction}\n\n{context}" if context.strip() else instruction
    block = f"\n\n### Input:\n{context}" if context.strip() else ""
    prompt = f"### Instruction:\n{instruction}{block}\n\n### Response:\n"
    return Row(line, pairs=((prompt, answer),), messages=(("user", asked), ("assistant", answer)))


def _completion_row(line: int, record: dict[str, Any]) -> Row:
    return Row(line, pairs=((_text(record, "prompt", empty=True), _text(record, "completion")),))


def _classes(records: list[dict[str, Any]]) -> dict[str, str]:
    """{label key: answer text} of every label in the file, sorted by key."""
    found: dict[str, str] = {}
    for record in records:
        key = label_key(record.get("label"))
        if key:
            found.setdefault(key, str(record["label"]).strip())
    if len(found) > MAX_CLASSES:
        raise DataError(
            f"{len(found)} different labels are too many for classes",
            expected=f"at most {MAX_CLASSES} different values of 'label'",
            received=", ".join(sorted(found)[:4]) + ", ...",
            hint="for free answers name the columns prompt and completion",
        )
    return dict(sorted(found.items()))


def _class_row(classes: dict[str, str], line: int, record: dict[str, Any]) -> Row:
    text = _text(record, "text", "sentence")
    label = record.get("label")
    key = label_key(label)
    if not key:
        raise BadRow("label", f"expected a text, a number or a boolean, received {describe(label)}")
    check_text(classes[key], "label")
    pairs = tuple((f"{text.strip()}\nLabel:", f" {answer}") for answer in classes.values())
    return Row(line, pairs, list(classes).index(key), label=classes[key], end=False)


def _choice_row(line: int, record: dict[str, Any]) -> Row:
    question = _text(record, "question", "prompt").strip()
    texts = texts_of(record.get("choices"), "choices", least=2)
    gold = choice_index(record.get("answer"), texts)
    pairs = tuple((f"{question}\nAnswer:", f" {text}") for text in texts)
    return Row(line, pairs, gold, label=chr(ord("A") + gold) if gold < 26 else str(gold), end=False)


def texts_of(value: Any, name: str, least: int = 1) -> list[str]:
    """The texts of a list, which a CSV cell holds as JSON, without the space around them.

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
    """The index of the choice that `answer` names: by its text, its letter or its index.

    Raises:
        BadRow: it names none.
    """
    letters = [chr(ord("A") + index) for index in range(min(len(texts), 26))]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return answer
    if isinstance(answer, str):
        for known in (texts, letters, [str(index) for index in range(len(texts))]):
            if answer.strip() in known:
                return known.index(answer.strip())
    allowed = f"one of the choices, {letters[0]} to {letters[-1]}, or 0 to {len(texts) - 1}"
    raise BadRow("answer", f"expected {allowed}; received {describe(answer)}")
