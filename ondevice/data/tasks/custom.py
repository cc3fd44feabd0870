"""A custom template: a YAML file that tells how a row becomes a prompt, and its possible answers.

    prompt: |
      {premise}
      Question: {hypothesis} True, False or Neither?
    fields: {premise: [premise, sentence1]}   # columns with other names than the placeholder
    label: label                              # the column with the right answer
    candidates: {entailment: True, contradiction: False, neutral: Neither}
    metric: macro_f1

Every value is read as text, so that `Yes`, `No` and `1` mean what they say.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError
from ondevice.core.untrusted import parse_row
from ondevice.core.untrusted.yaml_documents import parse_yaml, read_yaml
from ondevice.data.rows import BadRow, check_text, describe
from ondevice.data.tasks.task import (
    RECORD,
    Rendered,
    Task,
    answers_of,
    choice_index,
    column,
    label_key,
    letter_of,
    template_text,
)

_PLACEHOLDER = re.compile(r"\{([^{}\n]*)\}")
_NOT_IN_YAML = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that JSON allows in a text, and YAML refuses or takes for a line's end."""
CHOSEN = ("accuracy", "macro_f1", "matthews")
RANKED = ("pearson", "spearman")
GENERATED = ("f1", "exact_match")


class Template(StrictConfig):
    """A custom template."""

    prompt: str = Field(min_length=1)
    """The text before the answer; `{name}` stands for a field, a list becomes lines A., B., ..."""

    name: str | None = None
    """Its name in messages; by default the file's."""

    fields: dict[str, tuple[str, ...]] = {}
    """Columns of a placeholder, of which the first that the row has is taken; dots step into
    objects. A placeholder that is missing here is its own column."""

    label: tuple[str, ...] = ("label",)
    """The column with the right answer, or several, of which the first that the row has is taken."""

    candidates: dict[str, str] | tuple[str, ...] | str | None = None
    """The label texts to choose from: a mapping from label to text; a list of texts, which may hold
    placeholders; or one placeholder of a column that holds the list. Without them the label is a
    free answer."""

    labels: str | None = None
    """The column with the names of the candidates, if rows have their own (ARC's choices.label)."""

    metric: (
        Literal["accuracy", "macro_f1", "matthews", "pearson", "spearman", "f1", "exact_match"]
        | None
    ) = None
    """The metric of an evaluation: `accuracy`, `macro_f1` or `matthews` for candidates; `pearson`
    or `spearman` for numeric labels; `f1` or `exact_match` for generated answers. By default the
    accuracy, or the loss of free answers."""

    @field_validator("fields", "label", mode="before")
    @classmethod
    def _lists(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: (item,) if isinstance(item, str) else item for key, item in value.items()}
        if isinstance(value, str):
            return (value,)
        return value


def load_task(path: str | Path) -> Task:
    """Read a template and return the task that renders it.

    Raises:
        ConfigError: the file does not exist or is not YAML, a key is unknown, the prompt does not
            use a field, or settings exclude each other.
    """
    path = Path(path)
    if path.name == RECORD:
        return read_task(template_text(str(path)), str(path))
    try:
        # Only text: YAML's own types would turn the answers Yes and No into booleans.
        values = read_yaml(path, yaml.BaseLoader)
    except FileNotFoundError:
        hint = "check the path; relative paths start at the current folder"
        raise ConfigError(f"no such template: {path}", received=str(path), hint=hint) from None
    except (OSError, ValueError) as error:
        hint = "write a prompt with colons or quotes after 'prompt: |'"
        raise ConfigError(f"{path} is not readable YAML", received=str(error), hint=hint) from None
    return _task_of(values, path)


def read_task(text: str, name: str) -> Task:
    """Return the task of a template's text, as `load_task` does of a file.

    Args:
        name: of the template, for messages and if it has none itself.
    """
    path = Path(name)
    try:
        values = parse_yaml(text, yaml.BaseLoader)
    except ValueError as error:
        raise ConfigError(f"{path} is not readable YAML", received=str(error)) from None
    return _task_of(values, path)


def template_json(text: str) -> str:
    """Return a template's text as JSON, which is YAML too: the app has no reader for the latter.

    Raises:
        ConfigError: the text is not a template, or would not come back the same.
    """
    values = parse_yaml(text, yaml.BaseLoader)
    written = json.dumps(values, ensure_ascii=False, indent=2)
    written = _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", written)
    try:
        is_same = parse_yaml(written, yaml.BaseLoader) == values
    except ValueError:
        is_same = False
    if not is_same:
        raise ConfigError(
            "the template cannot be written as JSON",
            expected="keys of at most 1024 characters, and no control characters",
            received=text[:60],
        )
    return written + "\n"


def _task_of(values: Any, path: Path) -> Task:
    if not isinstance(values, dict):
        raise ConfigError(
            f"not a template: {path}",
            expected="a mapping with the key prompt",
            received=str(values)[:40],
        )
    hint = f"the keys of a template are {', '.join(Template.model_fields)}"
    template = Template.parse(values, str(path), hint=hint)
    names = _names(template.prompt)
    label_names = _names(_label_texts(template))
    if not names and not label_names:
        raise ConfigError(
            f"{path}: the prompt has no field",
            expected="{column} in it",
            received=template.prompt[:60],
        )
    unused = set(template.fields) - set(names) - set(label_names)
    if unused:
        raise ConfigError(
            f"{path}: the prompt does not use the fields {', '.join(sorted(unused))}",
            expected=f"some of {', '.join(names)}",
            received=", ".join(template.fields),
        )
    metric = template.metric or ""
    if not metric and template.candidates is not None:
        metric = "accuracy"
    _check(template, metric, path)
    kind = _kind(template, metric)
    numbers: tuple[float, ...] = ()
    if kind == "regression" and isinstance(template.candidates, dict):
        numbers = tuple(float(label) for label in template.candidates)
    return Task(
        template.name or path.stem,
        kind,
        {key: template.fields.get(key, (key,)) for key in dict.fromkeys((*names, *label_names))},
        label=template.label,
        own=lambda task, row: _render(template, task, row),
        metric=metric,
        values=numbers,
        a_label=_a_label(template),
    )


def _a_label(template: Template) -> str:
    if isinstance(template.candidates, dict):
        return next(iter(template.candidates))
    return "" if template.candidates is None else "0"


def _check(template: Template, metric: str, path: Path) -> None:
    candidates = template.candidates
    if not template.label or not all(template.fields.values()):
        raise ConfigError(
            f"{path}: a field has no column", expected="a name, or several", received="none"
        )
    if (candidates is None) != (metric in ("", *GENERATED)):
        allowed = GENERATED if candidates is None else CHOSEN + RANKED
        raise ConfigError(
            f"{path}: metric '{metric}' does not fit",
            expected=", ".join(allowed),
            received=metric,
        )
    if isinstance(candidates, dict | tuple) and len(candidates) < 2:
        raise ConfigError(f"{path}: there must be two candidates or more", received=len(candidates))
    if isinstance(candidates, str) and not _PLACEHOLDER.fullmatch(candidates.strip()):
        raise ConfigError(
            f"{path}: candidates are a mapping, a list, or one placeholder",
            expected="{choices}",
            received=candidates,
        )
    if metric in RANKED:
        texts = candidates if isinstance(candidates, dict) else {"": ""}
        is_numeric = all(_number(label) is not None for label in texts)
        if not is_numeric or len(set(texts.values())) < len(texts):
            raise ConfigError(
                f"{path}: {metric} needs labels that are numbers, each with its own text",
                expected="candidates: {0: ..., 5: ...}",
                received=str(candidates),
            )


def _kind(
    template: Template, metric: str
) -> Literal["classification", "multiple_choice", "qa", "completion", "regression"]:
    if template.candidates is None:
        return "qa" if metric in GENERATED else "completion"
    if metric in RANKED:
        return "regression"
    if isinstance(template.candidates, str) or _names(_label_texts(template)):
        return "multiple_choice"
    return "classification"


def _label_texts(template: Template) -> str:
    """Return the candidates as one text, for the placeholders in it."""
    texts = template.candidates or ""
    if isinstance(texts, dict):
        return "\n".join(texts.values())
    return texts if isinstance(texts, str) else "\n".join(texts)


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name.strip() for name in _PLACEHOLDER.findall(text)))


def _render(template: Template, task: Task, row: dict[str, Any]) -> Rendered:
    """Render a row; BadRow if a column is missing or the label is not one of the candidates."""

    def shown(match: re.Match[str]) -> str:
        return _shown(column(row, task.columns[match[1].strip()]), match[1])

    def filled(text: str) -> str:
        return _PLACEHOLDER.sub(shown, text)

    prompt = filled(template.prompt).rstrip(" ")
    value = column(row, task.label)
    candidates = template.candidates
    if candidates is None:
        if isinstance(value, int | float):
            value = str(value)
        answers = answers_of(value, task.label[0])
        text = _after(prompt, answers[0])
        if task.kind == "qa":  # a generated answer is its first line
            return Rendered(((prompt, text + "\n"),), answers=answers)
        return Rendered(((prompt, text),))
    if isinstance(candidates, str):
        name = candidates.strip()[1:-1].strip()
        texts = list(answers_of(_list(column(row, task.columns[name])), name))
    else:
        words = candidates.values() if isinstance(candidates, dict) else candidates
        texts = [filled(word).strip() for word in words]
    gold, number = _gold(template, task, value, texts, row)
    is_fixed = task.kind in ("classification", "regression")
    label = texts[gold] if is_fixed else letter_of(gold)
    distinct = list(dict.fromkeys(texts))  # several labels may have one text
    if len(distinct) < 2:
        raise BadRow("", f"its candidates are all '{texts[0]}'")
    pairs = tuple((prompt, _after(prompt, text)) for text in distinct)
    return Rendered(pairs, distinct.index(texts[gold]), label=label, value=number)


def _gold(
    template: Template, task: Task, value: Any, texts: list[str], row: dict[str, Any]
) -> tuple[int, float | None]:
    """Return the index of the right candidate and, for a regression, the label's number."""
    name = task.label[0]
    if task.values:
        number = _number(value)
        if number is None:
            raise BadRow(name, f"expected a number, received {describe(value)}")
        distances = [abs(value - number) for value in task.values]
        return distances.index(min(distances)), number
    if template.labels is not None:
        known = [str(label) for label in _list(column(row, (template.labels.strip("{} "),)))]
    elif isinstance(template.candidates, dict):
        known = list(template.candidates)
    else:
        return choice_index(value, texts), None
    keys = [label_key(label) for label in known]
    key = label_key(value)
    if key not in keys or key is None:
        reason = f"expected a label of {task.name}: {', '.join(known)}; received {describe(value)}"
        raise BadRow(name, reason)
    return keys.index(key), None


def _after(prompt: str, text: str) -> str:
    """Return a text after a space, unless the prompt is empty or ends its line."""
    if not prompt or prompt[-1].isspace():
        return text
    return f" {text}"


def _shown(value: Any, name: str) -> str:
    """Return a field for the prompt: a text, a number, or a list as lines A., B., ..."""
    if isinstance(value, list | dict):
        texts = answers_of(value, name)
        return "\n".join(f"{chr(ord('A') + index)}. {text}" for index, text in enumerate(texts))
    if isinstance(value, int | float):
        value = str(value)
    return check_text(value, name).strip()


def _list(value: Any) -> Any:
    """Return a list, which a cell of a table holds as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return parse_row(value)
        except ValueError:
            return value
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    if math.isfinite(number):
        return number
    return None
