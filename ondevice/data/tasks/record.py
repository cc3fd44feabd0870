"""The record of what was trained: how a row becomes a prompt and what ends an answer; and the tokens of label texts,
for methods whose loss is over these tokens only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from ondevice.core.config import StrictConfig
from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.data.encode import dated, encode
from ondevice.data.examples import Dataset
from ondevice.data.rows import Format, Row, Rows
from ondevice.data.tasks.custom import read_task
from ondevice.data.tasks.task import Task, is_template
from ondevice.data.tasks.templates import find_task

_INPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "chat": (("messages",),),
    "classification": (("text", "sentence"),),
    "completion": (("prompt",),),
    "instruct": (("instruction", "question", "prompt"),),
    "multiple_choice": (("question", "prompt"), ("choices",)),
    "text": (("text",),),
}
"""Fields by format that a row to predict needs, each with its other names."""


class BaseModel(StrictConfig):
    """The model that was trained, by which an adapter of another base is recognised."""

    source: str = ""
    revision: str | None = None
    sha256: str | None = None


class TaskRecord(StrictConfig):
    """How rows become prompts, which answers there are, and what ends them."""

    version: Literal[1] = 1
    ondevice: str = ""
    """The version that wrote the file."""

    format: Format
    """Format of the rows."""

    task: str | None = None
    """A task of `templates.TASKS`, or the name of a custom template."""

    template: str | None = None
    """The text of a custom template's YAML file."""

    columns: dict[str, str] = {}
    """{field: column} of the files it was trained on."""

    labels: dict[str, str] = {}
    """The classes of classification rows, {label key: label text}, in the candidates' order."""

    framing: str = ""
    """What makes the prompt: "chat template", "instruction prompt", a task's name, or ""."""

    prompt: str = ""
    """A prompt with the columns' names in braces, from `example_prompt`; empty if there is none."""

    chat_template: str | dict[str, str] | None = None
    """The chat template, if it frames the prompt."""

    date: datetime | None = None
    """The present that the chat template saw."""

    ends: tuple[str, ...] = ()
    """Special tokens that were trained as the end of an answer."""

    max_length_tokens: int = 0
    """Longest sequence of the training; longer prompts lose tokens at their front."""

    longest_answer_tokens: int = 0
    """Label tokens of the longest answer."""

    evaluation: dict[str, Any] | None = None
    """Figures of the last evaluation."""

    base_model: BaseModel = BaseModel()

    @property
    def has_candidates(self) -> bool:
        """True if an answer is one of several texts, and not generated."""
        return self.format in ("classification", "multiple_choice", "regression")

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end an answer: one to a question is one line."""
        if self.format == "qa":
            return ("\n",)
        return ()

    def found_task(self) -> Task | None:
        """Return the task that renders the rows, or None if their format does."""
        if self.template is not None:
            return read_task(self.template, self.task or "template")
        return find_task(self.task) if self.task else None

    def trained_ends(self, tokenizer: Any) -> list[int]:
        """Return the ids of `ends` in their order, without the tokenizer's own end."""
        known = tokenizer.get_vocab()
        return [known[end] for end in self.ends if end in known]

    @property
    def inputs(self) -> dict[str, str]:
        """The fields that a row to predict needs, with their columns in the training's files."""
        task = self.found_task()
        fields = _INPUTS.get(self.format, ())
        if task is not None:
            places = {field: names[0] for field, names in task.columns.items()}
            return places | {
                field: self.columns[field] for field in places if field in self.columns
            }
        found: dict[str, str] = {}
        for names in fields:
            field = next((name for name in names if name in self.columns), names[0])
            found[field] = self.columns.get(field, field)
        return found

    def with_template(self, tokenizer: Any) -> Any:
        """Return the tokenizer with the chat template and the date of the training."""
        if self.chat_template is None:
            return tokenizer
        result = copy.copy(tokenizer)
        result.chat_template = self.chat_template
        return dated(result, self.date)

    def end_ids(self, tokenizer: Any) -> frozenset[int]:
        """Return the tokens that were trained as the end of an answer; empty if there are none."""
        ids = {tokenizer.convert_tokens_to_ids(end) for end in self.ends}
        if ids and tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        return frozenset(ids - {None})


LONGEST = 512
"""Maximum tokens of the made-up row that shows a task's label tokens."""


def label_tokens_of_rows(dataset: Dataset) -> tuple[tuple[int, ...], str]:
    """Return the token of each candidate, or () and the reason: all rows must share one token each."""
    if any(not item.candidates for item in dataset.items):
        return (), "its rows have no candidates"
    shared = None
    for item in dataset.items:
        tokens = tuple(
            tuple(label for label in candidate.labels if label != IGNORE)
            for candidate in item.candidates
        )
        if any(len(text) != 1 for text in tokens):
            return (), "a label text has several tokens"
        if len(set(tokens)) < len(tokens):
            return (), "two label texts are the same token"
        if shared not in (None, tokens):
            return (), "its rows have different candidates"
        shared = tokens
    return tuple(text[0] for text in shared or ()), ""


def label_tokens_of_task(name: str, tokenizer: Any) -> tuple[tuple[int, ...], str]:
    """Return `label_tokens_of_rows` for a task whose classes are words, without any of its rows."""
    task = find_task(name)
    if task.kind != "classification" or task.pairs or task.own or is_template(name):
        return (), f"the label texts of {name} are known only from its rows"
    prompt = task.prompt.format(**dict.fromkeys(task.columns, "word"))
    pairs = tuple((prompt, choice.text) for choice in task.choices)
    rows = Rows("", "classification", items=[Row(1, pairs, 0, end=False)], task=name)
    return label_tokens_of_rows(encode(rows, tokenizer, max_length_tokens=LONGEST))


def refuse_other_labels(dataset: Dataset | None, answers: Sequence[int]) -> None:
    """Refuse rows with a label that a loss over `answers` does not know: their loss would be 0.

    Raises:
        DataError: with the number of such rows and the first one's line.
    """
    if dataset is None or not answers:
        return
    known = {*answers, IGNORE}
    others = [
        item
        for item in dataset.items
        if any(not known.issuperset(one.labels) for one in (item.example, *item.candidates))
    ]
    if others:
        raise DataError(
            "rows have labels that the loss over label tokens does not know",
            expected=f"labels of one token: {', '.join(map(str, sorted(answers)))} (token ids)",
            received=f"{len(others):,} of {len(dataset.items):,} rows, the first in line {others[0].line}",
            hint="use the task or template of the training, or train or export again with rows of all labels",
        )
