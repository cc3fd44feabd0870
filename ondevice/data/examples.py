"""Encoded rows: token ids with label masks, their report, the check of their ids, and digests."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.data.pictures import FIRST_ID
from ondevice.data.rows import AnswerTooLong, Format, RowProblem, Rows, count_reasons


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. `labels[t]` is `ids[t]` if token t is trained on, else -100; not shifted."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        """Label tokens that count towards the loss: those after the first position."""
        return sum(label != IGNORE for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Item:
    """One encoded row: its training example, and the candidates or answers that evaluate it."""

    example: Example
    candidates: tuple[Example, ...] = ()
    """One for each class or choice, with the label text's tokens labelled; empty without choices."""

    gold: int | None = None
    """Index of the right candidate."""

    answers: tuple[str, ...] = ()
    """Accepted answers of a question-answering row."""

    line: int = 0
    """Line of the data file, from 1."""

    file: str = ""
    """The file inside a folder of files; empty if the data is one file."""

    value: float | None = None
    """The target of a regression row."""

    liked: bool | None = None
    """Whether a rated answer was liked."""

    prompt_tokens: int = 0
    """Tokens before the answer (in a chat before the last assistant turn): generation continues
    `ids[:prompt_tokens]`."""

    dropped_tokens: int = 0
    """Tokens cut from the front of the prompt, or with complete turns, to fit the maximum length."""

    unread: tuple[str, ...] = ()
    """Columns and keys of the row that nothing reads."""

    @property
    def longest(self) -> int:
        """Tokens of the example or of its longest candidate."""
        return max(len(example) for example in (self.example, *self.candidates))


@dataclass(slots=True)
class Report:
    """Counts of what encoding did in addition to the examples."""

    unread: Counter[str] = field(default_factory=Counter)
    """Columns of the file, and keys of turns, that neither the format nor the template reads."""

    ends: Counter[str] = field(default_factory=Counter)
    """Answers by the special tokens that are trained as their end; "" without one."""

    conversations: Counter[str] = field(default_factory=Counter)
    """Conversations of several answers, as "one" sequence or as "several", and their sequences."""

    notes: Counter[str] = field(default_factory=Counter)
    """Other notes on answers or turns, each with its count."""

    def add(self, other: Report) -> None:
        """Add another report's counts."""
        for part in fields(self):
            getattr(self, part.name).update(getattr(other, part.name))

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts as JSON types, by field."""
        return {part.name: dict(getattr(self, part.name)) for part in fields(self)}

    @property
    def unread_counts(self) -> dict[str, int]:
        """The columns and keys that nothing reads, the most frequent first."""
        return dict((+self.unread).most_common())

    def sentences(self) -> tuple[str, ...]:
        """Return the sentences that a run's log and `ondevice data` show."""
        sentences = []
        if one := self.conversations["one"]:
            sentences.append(
                "conversations that are one sequence each, "
                f"as the chat template only appends: {one:,}"
            )
        if several := self.conversations["several"]:
            count = self.conversations["several sequences"]
            sentences.append(
                "conversations that are one sequence for each answer, as the chat template "
                f"rewrites earlier turns: {several:,}, as {count:,} sequences"
            )
        for end, count in self.ends.most_common():
            if end:
                sentences.append(f"answers whose end is trained as {end}: {count:,}")
            else:
                sentences.append(
                    "answers without an end token, after which a model does not learn to stop: "
                    f"{count:,}"
                )
        sentences += [f"{note}: {count:,}" for note, count in self.notes.most_common() if count]
        return tuple(sentences)


@dataclass(slots=True)
class Dataset:
    """Encoded rows, the rows left out (by the reader and here), and how they were encoded."""

    items: list[Item] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    format: Format = "text"
    max_length_tokens: int = 0
    too_long_tokens: list[int] = field(default_factory=list)
    """Full lengths of the rows left out because they do not fit."""

    template: str = ""
    """The template of the rows: "chat template", "instruction prompt", a task's name, or ""."""

    task: str | None = None
    """The task of the rows, by its name."""

    notes: tuple[str, ...] = ()
    """How the file was understood, if that is not obvious."""

    report: Report = field(default_factory=Report)
    """What encoding did in addition to the examples."""

    metric: str = ""
    """The metric of a custom template."""

    values: tuple[float, ...] = ()
    """The numbers that a regression's candidates stand for."""

    labels: Mapping[str, str] = field(default_factory=dict)
    """The classes of classification rows, {label key: label text}, in the candidates' order."""

    file: str = ""
    """The data in messages: its path or its name; empty for rows that Python holds."""

    def __len__(self) -> int:
        return len(self.items)

    def place(self, item: Item) -> str:
        """Return file and line of a row, for messages."""
        file = item.file or self.file
        return f"{file}:{item.line}" if file else f"line {item.line}"

    @property
    def truncated(self) -> int:
        """Rows that lost tokens of their prompt."""
        return sum(item.dropped_tokens > 0 for item in self.items)

    def figures(self) -> dict[str, Any]:
        """Return the figures of a run's log and `--json`: sequences, rows left out or cut, why."""
        return {
            "sequences": len(self.items),
            "left_out": count_reasons(self.problems),
            "cut": self.truncated,
            "cut_tokens": sum(item.dropped_tokens for item in self.items),
            "max_length_tokens": self.max_length_tokens,
            "notes": [*self.notes, *self.report.sentences()],
            "unread": self.report.unread_counts,
        }


def refuse_unread(file: str, report: Report) -> None:
    """Raise DataError if there is a column or a key that nothing reads."""
    unread = report.unread_counts
    if unread:
        raise DataError(
            f"{file} has columns or keys that nothing reads",
            expected="only what the format and the chat template read",
            received=", ".join(f"{name} ({count:,})" for name, count in unread.items()),
            hint="remove or rename them (--column FIELD=COLUMN), or leave --strict-columns out",
        )


def refuse_preferences(rows: Rows) -> None:
    """Raise DataError for preferences, where they are not learnt from or evaluated."""
    column = {"preference": "chosen", "thumbs": "completion"}.get(rows.format)
    if column is not None:
        raise DataError(
            f"{rows.file} holds preferences; only `ondevice train`, `run` and `fleet` learn from them",
            expected="rows with answers to learn",
            received=f"format {rows.format}",
            hint=f"--column prompt=prompt --column completion={column} takes only the {column} texts",
        )


def check_fit(answer_tokens: int, limit: int, prompt_tokens: int, full_tokens: int = 0) -> None:
    """Raise `AnswerTooLong` unless the answer fits after one token of the prompt, if there is one."""
    room = limit - bool(prompt_tokens)
    if answer_tokens > room:
        reason = f"the answer has {answer_tokens} tokens; "
        reason += f"with max_length_tokens={limit} at most {room} fit"
        raise AnswerTooLong(reason, full_tokens or prompt_tokens + answer_tokens)


def check_ids(dataset: Dataset, vocabulary: int, file: str) -> Dataset:
    """Return the rows if the embedding has all of their tokens.

    Args:
        vocabulary: rows of the model's embedding.
        file: names a row that does not name its own file.

    Raises:
        DataError: names the first row with another token, and the token.
    """
    for item in dataset.items:
        token = unknown_token(item, vocabulary)
        if token is None:
            continue
        row = item.file or file
        if item.line:
            row = f"{row}:{item.line}"
        raise DataError(
            f"{row}: token {token} is not in the model's vocabulary",
            expected=f"ids from 0 to {vocabulary - 1}, as the embedding has {vocabulary} rows",
            received=token,
            hint="the rows were encoded with another model's tokenizer, "
            "or the embedding was not resized for all of its tokens",
        )
    return dataset


def unknown_token(item: Item, vocabulary: int) -> int | None:
    """Return the first token of a row that is not in the embedding, or None."""
    for example in (item.example, *item.candidates):
        if min(example.ids) >= 0 and max(max(example.ids), max(example.labels)) < vocabulary:
            continue
        tokens = (*example.ids, *(label for label in example.labels if label >= 0))
        unknown = (token for token in tokens if not 0 <= token < vocabulary and token < FIRST_ID)
        if (token := next(unknown, None)) is not None:
            return token
    return None


def rows_sha256(items: Iterable[Item]) -> str:
    """Hash rows in their order: ids, labels, candidates and answers."""
    digest = hashlib.sha256()
    for item in items:
        for example in (item.example, *item.candidates):
            digest.update(f"{len(example)} ".encode())
            digest.update(array("q", example.ids))
            digest.update(array("q", example.labels))
        digest.update(f"{item.gold} {item.value} {item.answers!r}\n".encode())
        if item.liked is not None:
            digest.update(f"{item.liked}".encode())
    return digest.hexdigest()


def template_sha256(tokenizer: Any) -> str:
    """Hash the chat template, or all of them if there are several; `none` without one."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "none"
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hash what turns text into ids: vocabulary, merges, normaliser, added and special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        text = json.dumps(sorted(tokenizer.get_vocab().items()))
    else:
        # The part before holds the last call's truncation and padding, which do not belong here.
        text = backend.to_str()
        text = text[text.index('"added_tokens"') :]
    special = getattr(tokenizer, "special_tokens_map", {})
    # Padding is never trained on.
    marks = {name: str(value) for name, value in special.items() if name != "pad_token"}
    return hashlib.sha256(f"{text}\n{json.dumps(marks, sort_keys=True)}".encode()).hexdigest()
