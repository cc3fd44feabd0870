"""A template of one's own: a YAML file that says how a row becomes a prompt, and what its answers are.

    prompt: |
      {premise}
      Question: {hypothesis} True, False or Neither?
    fields: {premise: [premise, sentence1]}   # columns, where they are not named like the placeholder
    label: label                              # the column with the right answer
    candidates: {entailment: True, contradiction: False, neutral: Neither}
    metric: macro_f1

Every value is read as text, so that `Yes`, `No` and `1` mean what they say.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError
from ondevice.core.untrusted import parse_row
from ondevice.core.untrusted.yaml_documents import read_yaml
from ondevice.data.rows import BadRow, check_text, describe
from ondevice.data.tasks.task import Rendered, Task, answers_of, choice_index, column, label_key

_PLACEHOLDER = re.compile(r"\{([^{}\n]*)\}")
CHOSEN = ("accuracy", "macro_f1", "matthews")
RANKED = ("pearson", "spearman")
GENERATED = ("f1", "exact_match")


class Template(StrictConfig):
    """A template of one's own."""

    prompt: str = Field(min_length=1)
    """The text before the answer; `{name}` stands for a field, and a list in it becomes lines A., B., ..."""

    name: str | None = None
    """Its name in messages; the file's unless given."""

    fields: dict[str, tuple[str, ...]] = {}
    """Columns of a placeholder, the first that is there is taken; dots step into objects. A placeholder that is not
    here is its own column."""

    label: tuple[str, ...] = ("label",)
    """The column with the right answer, or several, of which the first that is there is taken."""

    candidates: dict[str, str] | tuple[str, ...] | str | None = None
    """The answers to choose from: label to answer word; a list of answers, which may hold placeholders; or one
    placeholder of a column that holds the list. Without them the label is a free answer."""

    labels: str | None = None
    """The column with the names of the candidates, where rows bring their own (ARC's choices.label)."""

    metric: (
        Literal["accuracy", "macro_f1", "matthews", "pearson", "spearman", "f1", "exact_match"]
        | None
    ) = None
    """The figure of an evaluation: `accuracy`, `macro_f1`, `matthews` of candidates; `pearson` or `spearman` of labels
    that are numbers; `f1` or `exact_match` of generated answers. The accuracy, or the loss of free answers, unless
    given."""

    @field_validator("fields", "label", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: (item,) if isinstance(item, str) else item for key, item in value.items()}
        return (value,) if isinstance(value, str) else value


def load_task(path: str | Path) -> Task:
    """Read a template and return the task that renders it.

    Raises:
        ConfigError: no such file, no YAML, an unknown key, a field without a place, or settings that exclude each
            other.
    """
    path = Path(path)
    try:
        # As text throughout: YAML's own types would turn the answers Yes and No into booleans.
        values = read_yaml(path, yaml.BaseLoader)
    except FileNotFoundError:
        hint = "check the path; relative paths start at the folder you are in"
        raise ConfigError(f"there is no template {path}", received=str(path), hint=hint) from None
    except (OSError, ValueError) as error:
        reason = str(error)
        hint = "put a prompt with colons or quotes behind 'prompt: |'"
        raise ConfigError(f"{path} is not readable YAML", received=reason, hint=hint) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds no template",
            expected="a mapping with the key prompt",
            received=str(values)[:40],
        )
    template = Template.parse(
        values, str(path), hint=f"the keys of a template are {', '.join(Template.model_fields)}"
    )
    names = _names(template.prompt)
    if not names and not _names(_answer_texts(template)):
        raise ConfigError(
            f"{path}: the prompt has no field",
            expected="{column} in it",
            received=template.prompt[:60],
        )
    unused = set(template.fields) - set(names) - set(_names(_answer_texts(template)))
    if unused:
        raise ConfigError(f"{path}: fields without a place in the prompt: {', '.join(sorted(unused))}",
                          expected=f"some of {', '.join(names)}", received=", ".join(template.fields))  # fmt: skip
    metric = template.metric or ("accuracy" if template.candidates is not None else "")
    _check(template, metric, path)
    name = template.name or path.stem
    columns = {
        key: template.fields.get(key, (key,))
        for key in dict.fromkeys((*names, *_names(_answer_texts(template))))
    }
    kind, numbers = _kind(template, metric), ()
    if kind == "regression" and isinstance(template.candidates, dict):
        numbers = tuple(float(label) for label in template.candidates)
    return Task(name, kind, columns, label=template.label, own=lambda task, row: _render(template, task, row),
                metric=metric, values=numbers)  # fmt: skip


def _check(template: Template, metric: str, path: Path) -> None:
    candidates = template.candidates
    if not template.label or not all(template.fields.values()):
        raise ConfigError(
            f"{path}: a field has no column", expected="a name, or several", received="none"
        )
    if (candidates is None) != (metric in ("", *GENERATED)):
        raise ConfigError(f"{path}: metric '{metric}' does not fit", received=metric,
                          expected=", ".join(GENERATED if candidates is None else CHOSEN + RANKED))  # fmt: skip
    if isinstance(candidates, dict | tuple) and len(candidates) < 2:
        raise ConfigError(f"{path}: candidates are two or more", received=len(candidates))
    if isinstance(candidates, str) and not _PLACEHOLDER.fullmatch(candidates.strip()):
        raise ConfigError(f"{path}: candidates are a mapping, a list, or one placeholder", expected="{choices}",
                          received=candidates)  # fmt: skip
    if metric in RANKED:
        numbers = (
            [_number(label) for label in candidates] if isinstance(candidates, dict) else [None]
        )
        words = list(candidates.values()) if isinstance(candidates, dict) else []
        if None in numbers or len(set(words)) < len(words):
            raise ConfigError(f"{path}: {metric} is of labels that are numbers, each with its own answer",
                              expected="candidates: {0: ..., 5: ...}",
                              received=str(candidates))  # fmt: skip


def _kind(
    template: Template, metric: str
) -> Literal["classification", "multiple_choice", "qa", "completion", "regression"]:
    if template.candidates is None:
        return "qa" if metric in GENERATED else "completion"
    if metric in RANKED:
        return "regression"
    fixed = isinstance(template.candidates, dict | tuple) and not _names(_answer_texts(template))
    return "classification" if fixed else "multiple_choice"


def _answer_texts(template: Template) -> str:
    """The texts of the candidates as one, for the placeholders in them."""
    answers = template.candidates or ""
    return (
        answers
        if isinstance(answers, str)
        else "\n".join(answers.values() if isinstance(answers, dict) else answers)
    )


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in _PLACEHOLDER.findall(text)))


def _render(template: Template, task: Task, row: dict[str, Any]) -> Rendered:
    """Render a row; BadRow where a column is missing or the label is none of the candidates."""

    def filled(text: str) -> str:
        return _PLACEHOLDER.sub(
            lambda match: _shown(column(row, task.columns[match[1].strip()]), match[1]), text
        )

    prompt = filled(template.prompt).rstrip(" ")
    value = column(row, task.label)
    if template.candidates is None:
        answers = answers_of(str(value) if isinstance(value, int | float) else value, task.label[0])
        ending = "\n" if task.kind == "qa" else ""  # a generated answer is its first line
        return Rendered(
            ((prompt, _answer(prompt, answers[0]) + ending),), answers=answers if ending else ()
        )
    if isinstance(template.candidates, str):
        name = template.candidates.strip()[1:-1].strip()
        texts = list(answers_of(_list(column(row, task.columns[name])), name))
    else:
        words = template.candidates
        texts = [
            filled(word).strip() for word in (words.values() if isinstance(words, dict) else words)
        ]
    gold, number = _gold(template, task, value, texts, row)
    fixed = task.kind in ("classification", "regression")
    label = texts[gold] if fixed else chr(ord("A") + gold) if gold < 26 else str(gold)
    distinct = list(dict.fromkeys(texts))  # several labels may have one answer
    if len(distinct) < 2:
        raise BadRow("", f"its candidates are all '{texts[0]}'")
    pairs = tuple((prompt, _answer(prompt, text)) for text in distinct)
    return Rendered(pairs, distinct.index(texts[gold]), label=label, value=number)


def _gold(
    template: Template, task: Task, value: Any, texts: list[str], row: dict[str, Any]
) -> tuple[int, float | None]:
    """Return the index of the right candidate and, of a regression, the label's number."""
    name = task.label[0]
    if task.values:
        number = _number(value)
        if number is None:
            raise BadRow(name, f"expected a number, received {describe(value)}")
        return min(
            range(len(task.values)), key=lambda index: abs(task.values[index] - number)
        ), number
    if template.labels is not None:
        known = [str(label) for label in _list(column(row, (template.labels.strip("{} "),)))]
    elif isinstance(template.candidates, dict):
        known = list(template.candidates)
    else:
        return choice_index(value.strip() if isinstance(value, str) else value, texts), None
    keys = [label_key(label) for label in known]
    if (key := label_key(value)) not in keys or key is None:
        raise BadRow(
            name, f"expected a label of {task.name}: {', '.join(known)}; received {describe(value)}"
        )
    return keys.index(key), None


def _answer(prompt: str, answer: str) -> str:
    """The answer behind a space, unless the prompt ends its line."""
    return answer if not prompt or prompt[-1].isspace() else f" {answer}"


def _shown(value: Any, name: str) -> str:
    """A field in the prompt: a text, a number, or a list as lines A., B., ..."""
    if isinstance(value, list | dict):
        texts = answers_of(value, name)
        return "\n".join(f"{chr(ord('A') + index)}. {text}" for index, text in enumerate(texts))
    text = str(value) if isinstance(value, int | float) else value
    return check_text(text, name).strip()


def _list(value: Any) -> Any:
    """A list, which a cell of a table holds as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_row(value)
        except ValueError:
            return value
    return value


def _number(value: Any) -> float | None:
    try:
        number = (
            float(value)
            if isinstance(value, str | int | float) and not isinstance(value, bool)
            else math.nan
        )
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
