"""A classification, question-answering or generation task, and the values that its columns hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ondevice.core.untrusted import parse_row
from ondevice.data.rows import BadRow, check_text, describe

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One class: the answer text that stands for it, and the labels in data files that mean it."""

    answer: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of Table 7.

    `columns` maps a placeholder of `prompt` to the names that the column has in data files (dots step
    into nested objects). `pairs` replaces `prompt` where candidates are not simply appended to it.
    """

    name: str
    kind: Literal["classification", "multiple_choice", "qa", "completion", "regression"]
    columns: dict[str, tuple[str, ...]]
    choices: tuple[Choice, ...] = ()
    prompt: str = ""
    label: tuple[str, ...] = ("label",)
    clean: Callable[[dict[str, str]], dict[str, str]] = dict
    pairs: Callable[[dict[str, str]], Pairs] | None = None
    own: Callable[[Task, dict[str, Any]], Rendered] | None = None
    """Renders a row of a template of one's own (`custom.load_task`)."""

    metric: str = ""
    values: tuple[float, ...] = ()
    """Of a template of one's own: what it is judged by, and the numbers that a regression's candidates stand for."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row in words: one (prompt, answer) pair per candidate, the index of the right one, and for
    question answering every accepted answer (the pair holds the first)."""

    pairs: Pairs
    gold: int | None = None
    answers: tuple[str, ...] = ()
    label: str | None = None
    value: float | None = None


def is_template(name: str | None) -> bool:
    """Return True if a task's name is the path of a template of one's own."""
    return name is not None and name.lower().endswith((".yaml", ".yml"))


def plain_name(name: str) -> str:
    """Return the task's name without case, '-' and '_'."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def column(fields: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the value under the first of the keys that is there; dots step into objects.

    Raises:
        BadRow: none is there.
    """
    for key in keys:
        value: Any = fields
        for part in (key,) if key in fields else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    others = f"; expected one of the keys {', '.join(keys)}" if keys[1:] else ""
    raise BadRow(keys[0], f"is missing{others}")


def label_key(value: Any) -> str | None:
    """Return the label as the text by which choices know it: 1, 1.0, "1" and " 1 " are the same label."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float):
        return str(value) if abs(value) < 10**9 else None
    return value.strip().lower() if isinstance(value, str) else None


def answers_of(value: Any, name: str) -> tuple[str, ...]:
    """Read answers: SQuAD's [{"text": ...}], Hugging Face's {"text": [...]}, a list of texts or one text.

    Raises:
        BadRow: there is none, or one is no text.
    """
    if isinstance(value, dict):
        value = value.get("text")
    items = value if isinstance(value, list) else [value]
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    if not texts:
        raise BadRow(name, "has no answer")
    return tuple(dict.fromkeys(check_text(text, name).strip() for text in texts))


def texts_of(value: Any, name: str, least: int = 1) -> list[str]:
    """Return the texts of a list, which a CSV cell holds as JSON, without the space around them.

    Raises:
        BadRow: not a list of at least `least` texts.
    """
    if isinstance(value, str):
        try:
            value = parse_row(value)
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
