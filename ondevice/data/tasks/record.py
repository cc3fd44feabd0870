"""The record of what was trained: how a row becomes a prompt and what ends an answer."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any, Literal

from ondevice.core.config import StrictConfig
from ondevice.data.encode import dated
from ondevice.data.rows import Format
from ondevice.data.tasks.custom import read_task
from ondevice.data.tasks.task import Task
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
