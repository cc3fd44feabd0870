"""A classification, question-answering or generation task, and the values that its columns hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ondevice.core.errors import ConfigError
from ondevice.core.untrusted import parse_row, read_object
from ondevice.data.rows import BadRow, check_text, describe

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One class: the label text that stands for it, and the labels in data files that mean it."""

    text: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One row of Table 7, or a custom template.

    `columns` maps a placeholder of `prompt` to the names of its column in data files (dots step
    into nested objects). `pairs` replaces `prompt` if candidates are not simply appended to it.
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
    """Renders a row of a custom template (`custom.load_task`)."""

    metric: str = ""
    values: tuple[float, ...] = ()
    """The numbers that the candidates of a custom template's regression stand for."""

    a_label: str = ""
    """A label that every row of a custom template may have; empty if its answers are free."""

    @property
    def placeholder(self) -> str:
        """A label for rows to predict, whose own is not known; empty if answers are free."""
        return self.choices[0].labels[0] if self.choices else self.a_label


@dataclass(frozen=True, slots=True)
class Rendered:
    """A row as texts: one (prompt, answer) pair for each candidate, and the index of the right one.

    Question answering has one pair with the first answer, and every accepted answer in `answers`.
    """

    pairs: Pairs
    gold: int | None = None
    answers: tuple[str, ...] = ()
    label: str | None = None
    value: float | None = None


RECORD = "ondevice_task.json"
"""Name of the file in which a trained task is recorded, with its template."""


def is_template(name: str | None) -> bool:
    """Return whether a task's name is the path of a custom template, or of a record that has one."""
    if name is None:
        return False
    return name.lower().endswith((".yaml", ".yml")) or Path(name).name == RECORD


def template_text(path: str) -> str:
    """Return the text of a custom template, which may lie in the record of a trained task.

    Raises:
        ConfigError: a record cannot be read, or has no template.
        OSError, ValueError: as `Path.read_text`.
    """
    if Path(path).name != RECORD:
        return Path(path).read_text(encoding="utf-8")
    text = read_object(Path(path), ConfigError, hint="copy it again").get("template")
    if not isinstance(text, str):
        raise ConfigError(f"{path} has no template", expected="a field 'template'", received=text)
    return text


def plain_name(name: str) -> str:
    """Return the task's name without case, '-' and '_'."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def column(fields: dict[str, Any], keys: tuple[str, ...]) -> Any:
    """Return the value of the first key that the record has; dots step into objects.

    Raises:
        BadRow: it has none of them.
    """
    for key in keys:
        value: Any = fields
        for part in (key,) if key in fields else key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return value
    reason = "is missing"
    if keys[1:]:
        reason += f"; expected one of the keys {', '.join(keys)}"
    raise BadRow(keys[0], reason)


def label_key(value: Any) -> str | None:
    """Return the label's text in `Choice.labels`: 1, 1.0, "1" and " 1 " are the same label."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int | float):
        return str(value) if abs(value) < 10**9 else None
    if isinstance(value, str):
        return value.strip().lower()
    return None


def answers_of(value: Any, name: str) -> tuple[str, ...]:
    """Read answers: SQuAD's [{"text": ...}], Hugging Face's {"text": [...]}, a list, or a text.

    Raises:
        BadRow: the list is empty, or an answer is not a text.
    """
    if isinstance(value, dict):
        value = value.get("text")
    items = value if isinstance(value, list) else [value]
    texts = [item.get("text") if isinstance(item, dict) else item for item in items]
    if not texts:
        raise BadRow(name, "has no answer")
    return tuple(dict.fromkeys(check_text(text, name).strip() for text in texts))


def texts_of(value: Any, name: str, least: int = 1) -> list[str]:
    """Return the stripped texts of a list, which a CSV cell holds as JSON.

    Raises:
        BadRow: not a list of at least `least` texts.
    """
    if isinstance(value, str):
        try:
            value = parse_row(value)
        except ValueError:
            raise BadRow(name, "expected a JSON list of texts in the cell") from None
    if not isinstance(value, list) or len(value) < least:
        texts = {1: "one text", 2: "two texts"}[least]
        raise BadRow(name, f"expected a list of at least {texts}, received {describe(value)}")
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


def letter_of(index: int) -> str:
    """Return the letter of a choice, A to Z; its index beyond them."""
    if index < 26:
        return chr(ord("A") + index)
    return str(index)
