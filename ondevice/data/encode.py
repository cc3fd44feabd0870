"""Rows as token ids with label masks: only the answer is trained on, and the answer is never cut."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError, DataError
from ondevice.core.session import IGNORE
from ondevice.data.rows import AnswerTooLong, BadRow, Format, Row, RowProblem, Rows, count_reasons

if TYPE_CHECKING:
    from ondevice.data.readers.objects import Given
    from ondevice.data.tasks.chat import ChatEncoder


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence. `labels[t]` is `ids[t]` where token t is trained on, else -100; the program shifts."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_tokens(self) -> int:
        """Targets that count towards the loss: labels other than -100, without the first position."""
        return sum(label != IGNORE for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Item:
    """One row, encoded: its training example, and the candidates or answers that evaluate it."""

    example: Example
    candidates: tuple[Example, ...] = ()
    """One per class or choice, answer tokens labelled; empty where there is nothing to choose."""

    gold: int | None = None
    """Index of the right candidate."""

    answers: tuple[str, ...] = ()
    """Accepted answers of a question answering row."""

    line: int = 0
    """Line of the data file, from 1."""

    file: str = ""
    """The file inside a folder of files; empty where the data is one file."""

    value: float | None = None
    """The number that a row of a regression is of."""

    prompt_tokens: int = 0
    """Tokens before the answer (for chat before the last assistant turn): `ids[:prompt_tokens]` is what
    a model continues when it answers."""

    dropped_tokens: int = 0
    """Tokens cut from the front of the prompt, or in whole turns, to fit the maximum length."""

    unread: tuple[str, ...] = ()
    """Columns and keys of the row that nothing reads."""


@dataclass(slots=True)
class Report:
    """What encoding did with the rows beyond their examples, counted."""

    unread: Counter[str] = field(default_factory=Counter)
    """Columns of the file, and keys of turns, that nothing reads: not the format, not the chat template."""

    ends: Counter[str] = field(default_factory=Counter)
    """Answers by the special tokens that are trained as their end; "" where there is none."""

    conversations: Counter[str] = field(default_factory=Counter)
    """Conversations of several answers: how many are "one" sequence, how many "several", and the sequences of each."""

    notes: Counter[str] = field(default_factory=Counter)
    """Other things to say of answers or turns, each with how many."""

    def add(self, other: Report) -> None:
        """Add another report's counts."""
        for part in fields(self):
            getattr(self, part.name).update(getattr(other, part.name))

    def to_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts as JSON types, by field."""
        return {part.name: dict(getattr(self, part.name)) for part in fields(self)}

    @property
    def left(self) -> dict[str, int]:
        """The columns and keys that nothing reads, the most frequent first."""
        return dict((+self.unread).most_common())

    def said(self) -> tuple[str, ...]:
        """Return the sentences that a run's log and `ondevice data` show."""
        sentences = []
        if one := self.conversations["one"]:
            sentences.append(
                f"conversations that are one sequence each, as the chat template only appends: {one:,}"
            )
        if several := self.conversations["several"]:
            count = self.conversations["several sequences"]
            sentences.append(
                "conversations that are one sequence for each answer, as the chat template rewrites earlier turns: "
                f"{several:,}, as {count:,} sequences"
            )
        for end, count in self.ends.most_common():
            if end:
                sentences.append(f"answers whose end is trained as {end}: {count:,}")
            else:
                sentences.append(
                    f"answers without an end token, after which a model does not learn to stop: {count:,}"
                )
        sentences += [
            f"{sentence}: {count:,}" for sentence, count in self.notes.most_common() if count
        ]
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
    """The template that framed the rows: "chat template", "instruction prompt", a task's name, or ""."""

    notes: tuple[str, ...] = ()
    """How the file was understood, where that is not plain."""

    report: Report = field(default_factory=Report)
    """What encoding did with the rows beyond their examples."""

    metric: str = ""
    values: tuple[float, ...] = ()
    """Of a template of one's own: what it is judged by, and the numbers that a regression's candidates stand for."""

    def __len__(self) -> int:
        return len(self.items)

    @property
    def truncated(self) -> int:
        """Rows that lost tokens of their prompt."""
        return sum(item.dropped_tokens > 0 for item in self.items)

    def figures(self) -> dict[str, Any]:
        """Return what a run's log and `--json` say of the rows: how many, which were left out or cut, and why."""
        return {
            "sequences": len(self.items),
            "left_out": count_reasons(self.problems) if self.problems else {},
            "cut": self.truncated,
            "cut_tokens": sum(item.dropped_tokens for item in self.items),
            "max_length_tokens": self.max_length_tokens,
            "notes": [*self.notes, *self.report.said()],
            "unread": self.report.left,
        }


def encode(
    rows: Rows,
    tokenizer: Any,
    *,
    max_length_tokens: int,
    train_on_prompt: bool = False,
    allow_empty: bool = False,
    classes: int = 0,
    strict_columns: bool = False,
) -> Dataset:
    """Tokenize every row.

    What is trained on: assistant turns with their end-of-turn token (chat, and instruct where the
    tokenizer has a chat template; see `ondevice.data.tasks.chat`); the answer and the end-of-sequence token
    (completion, instruct); the answer alone (classification, multiple choice, and question answering,
    whose answers end with a newline as in MeZO); everything (text, cut into windows that overlap by one
    token, so that every token but the first is predicted once). With `train_on_prompt` every token of `Item.example` is
    trained on; `Item.candidates` always label the answer only.

    Prompt and answer are tokenized as one text. If the prompt's own ids are not a prefix of the result,
    the token that spans the boundary belongs to the answer. Special tokens that the tokenizer puts in
    front (BOS) stay, also where the prompt is truncated.

    Args:
        rows: from `read_rows`.
        tokenizer: a fast tokenizer of transformers.
        max_length_tokens: longest sequence, at least 2. Prompts lose tokens at their front to fit, and
            conversations whole turns; a row whose answer does not fit behind one token of context, or whose
            last turns do not fit whole, becomes a problem.
        train_on_prompt: label the prompt, too.
        allow_empty: return the problems alone where no row could be encoded, instead of raising.
        classes: of the model's classification head; 0 for a language model. The prompt then has all of the tokenizer's
            own marks, and the label of its second place is the number of the right candidate.
        strict_columns: refuse rows with a column or a key that nothing reads.

    Raises:
        ConfigError: `max_length_tokens` below 2.
        DataError: no row could be encoded, the tokenizer is not a fast one, chat rows without a
            chat template, or something is not read under `strict_columns`.
    """
    encoder = Encoder(rows, rows.items[0] if rows.items else Row(0), tokenizer, max_length_tokens=max_length_tokens,
                      train_on_prompt=train_on_prompt, classes=classes)  # fmt: skip
    dataset = Dataset(
        report=encoder.report,
        format=rows.format,
        max_length_tokens=max_length_tokens,
        template=encoder.template,
        notes=tuple(rows.notes),
        metric=rows.metric,
        values=rows.values,
    )
    for row in rows.items:
        for one in encoder.encoded(row):
            if isinstance(one, Item):
                dataset.items.append(one)
                continue
            dataset.problems.append(
                RowProblem(row.file or rows.file, row.line, one.field, one.reason)
            )
            if isinstance(one, AnswerTooLong):
                dataset.too_long_tokens.append(one.length_tokens)
    if strict_columns:
        refuse_unread(rows.file, dataset.report)
    if not dataset.items and not allow_empty:
        first = dataset.problems[0] if dataset.problems else f"{rows.file} has no rows"
        hint = "raise max_length_tokens, or shorten the answers"
        if dataset.problems and not dataset.too_long_tokens:
            hint = "`ondevice data FILE` lists every row and its fault"
            if dataset.problems[0].field == "messages":
                hint = "write the turns as the model's chat template takes them, or change its chat_template.jinja"
        raise DataError(
            f"no row can be trained on: {first}", received=f"{len(rows.items)} rows", hint=hint
        )
    dataset.problems = sorted(rows.problems + dataset.problems, key=lambda problem: problem.line)
    return dataset


class Encoder:
    """Tokenizes the rows of a file, one at a time; arguments and errors are those of `encode`.

    Args:
        rows: what is known of all rows; its `items` are not looked at.
        first: the first row, which decides how all are framed.
        report: to count in what encoding does beyond examples.
    """

    def __init__(
        self,
        rows: Rows,
        first: Row,
        tokenizer: Any,
        *,
        max_length_tokens: int,
        train_on_prompt: bool = False,
        classes: int = 0,
        report: Report | None = None,
    ) -> None:
        if max_length_tokens < 2:
            raise ConfigError(
                "max_length_tokens is too small", expected="at least 2", received=max_length_tokens
            )
        if not getattr(tokenizer, "is_fast", False):
            raise DataError("a slow tokenizer cannot say which text a token covers", expected="a fast tokenizer",
                            received=type(tokenizer).__name__, hint="save it with a tokenizer.json")  # fmt: skip
        # A base model has no template; rows of one question and one answer do without.
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        if first.messages and not first.pairs and not self.has_template:
            raise DataError(
                f"{rows.file} has chat rows, and the tokenizer has no chat template",
                expected="a tokenizer with a chat template, as instruction-tuned models have",
                received=getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__,
                hint="use an instruction-tuned model, or write the rows as prompt and completion",
            )
        framed = "instruction prompt" if rows.format == "instruct" else rows.task or ""
        self.template = "chat template" if first.messages and self.has_template else framed
        self.format: Format = rows.format
        self.tokenizer, self.classes = tokenizer, classes
        self.max_length_tokens, self.train_on_prompt = max_length_tokens, train_on_prompt
        self.report = Report() if report is None else report
        self._chat: ChatEncoder | None = None

    def encoded(self, row: Row) -> list[Item | BadRow]:
        """Tokenize a row: one item, one for each answer or window of it, and for what cannot be trained on, why."""
        try:
            if row.messages and self.has_template and not self.classes:
                return list(self._conversations().encode(row))
            return _encode_row(row, self.format, self.tokenizer, self.max_length_tokens, self.train_on_prompt,
                               self.classes, self.report)  # fmt: skip
        except BadRow as bad:
            return [bad]

    def _conversations(self) -> ChatEncoder:
        if self._chat is None:
            from ondevice.data.tasks.chat import ChatEncoder

            self._chat = ChatEncoder(
                self.tokenizer, self.max_length_tokens, self.train_on_prompt, self.report
            )
        return self._chat


def _encode_row(
    row: Row,
    format_: Format,
    tokenizer: Any,
    limit: int,
    train_on_prompt: bool,
    classes: int,
    report: Report,
) -> list[Item | BadRow]:
    """Encode a row that is not a conversation, or one whose tokenizer has no chat template."""
    if classes:
        items = [_class_item(row, tokenizer, limit, classes)]
    elif format_ == "text":
        items = list(_windows(row, tokenizer, limit))
    else:
        items = [_pair_item(row, tokenizer, limit, train_on_prompt)]
    report.unread.update(row.rest.keys())
    items = [replace(item, unread=tuple(row.rest)) for item in items] if row.rest else items
    if row.end and not classes and row.gold is None:
        last = items[-1].example.ids[-1]
        ends = last in (*end_ids(tokenizer), tokenizer.eos_token_id)
        report.ends[str(tokenizer.convert_ids_to_tokens(last)) if ends else ""] += 1
    return [*items]


def refuse_unread(file: str, report: Report) -> None:
    """Raise DataError if there is a column or a key that nothing reads."""
    if report.left:
        raise DataError(
            f"{file} has columns or keys that nothing reads",
            expected="only what the format and the chat template read",
            received=", ".join(f"{name} ({count:,})" for name, count in report.left.items()),
            hint="remove or rename them (--column FIELD=COLUMN), or leave --strict-columns out",
        )


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens with which the chat template ends a turn: behind one of them no other end follows."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    from ondevice.data.tasks.chat_template import end_marks

    return tuple(tokenizer.convert_tokens_to_ids(mark) for mark in end_marks(tokenizer))


def _tokenize(tokenizer: Any, text: str) -> list[int]:
    """Tokenize with the special tokens that the tokenizer adds in front, but none that it adds behind."""
    ids = list(
        tokenizer(text, add_special_tokens=not _has_bos(tokenizer, text), verbose=False)[
            "input_ids"
        ]
    )
    eos = tokenizer.eos_token_id
    while eos is not None and ids and ids[-1] == eos and not text.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def _has_bos(tokenizer: Any, text: str) -> bool:
    """Return True if a text begins with the BOS mark, which the tokenizer would put in front once more."""
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)


def _common_prefix(first: list[int], second: list[int]) -> int:
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


def _pair_item(row: Row, tokenizer: Any, limit: int, train_on_prompt: bool) -> Item:
    """Encode a row of pairs: completion, classification, multiple choice, question answering, and instruct without a
    chat template. All candidates lose as many prompt tokens as the one with the longest answer needs."""
    if not row.pairs:
        raise BadRow("messages", "the tokenizer has no chat template")
    # Prompt and answer as one text, as a model would have seen them.
    pair_ids = [_tokenize(tokenizer, prompt + answer) for prompt, answer in row.pairs]
    shared: dict[str, list[int]] = {}
    for (prompt, _), ids in zip(row.pairs, pair_ids, strict=True):
        context = shared[prompt] if prompt in shared else _tokenize(tokenizer, prompt)
        shared[prompt] = context[
            : _common_prefix(context, ids)
        ]  # candidates of one prompt share their context
    sequences = [
        (ids, len(shared[prompt])) for (prompt, _), ids in zip(row.pairs, pair_ids, strict=True)
    ]
    for ids, start in sequences:
        if row.end and not _ends(tokenizer, ids):
            ids.append(tokenizer.eos_token_id)
        if len(ids) - max(start, 1) < 1:
            raise BadRow("", "the answer has no token that can be trained on")
    check_fit(
        max(len(ids) - start for ids, start in sequences),
        limit,
        min(start for _, start in sequences),
    )
    # Cut all prompts at their front to one length: candidates are compared behind the same context.
    bos = _leading_bos(tokenizer, sequences[0][0], sequences[0][1])
    keep = limit - max(len(ids) - start for ids, start in sequences)
    cut, dropped = [], 0
    for ids, start in sequences:
        lost = max(0, start - keep)
        dropped = max(dropped, lost)
        cut.append((ids[:bos] + ids[bos + lost :], start - lost) if lost else (ids, start))
    candidates = tuple(_example(ids, start) for ids, start in cut) if row.gold is not None else ()
    ids, start = cut[row.gold or 0]
    example = _example(ids, 0 if train_on_prompt else start)
    return Item(
        example, candidates, row.gold, row.answers, row.line, row.file, row.value, start, dropped
    )


def _class_item(row: Row, tokenizer: Any, limit: int, classes: int) -> Item:
    """Encode a row for a classification head. A prompt that is too long loses tokens behind its first one."""
    if row.gold is None or len({prompt for prompt, _ in row.pairs}) != 1:
        raise BadRow("label", "a classification head needs a text and a label")
    if len(row.pairs) != classes:
        raise BadRow(
            "label", f"the task has {len(row.pairs)} labels, and the model's head {classes}"
        )
    ids = list(tokenizer(row.pairs[0][0].rstrip(), verbose=False)["input_ids"])
    dropped = max(0, len(ids) - limit)
    ids = ids[:1] + ids[1 + dropped :]
    if len(ids) < 2:
        raise BadRow("text", "the text has fewer than two tokens")
    rest = (IGNORE,) * (len(ids) - 2)
    candidates = tuple(Example(tuple(ids), (IGNORE, number, *rest)) for number in range(classes))
    return Item(
        candidates[row.gold],
        candidates,
        row.gold,
        row.answers,
        row.line,
        row.file,
        row.value,
        0,
        dropped,
    )


def _ends(tokenizer: Any, ids: list[int]) -> bool:
    """Return True if the ids end with an end token, or the tokenizer has none to append."""
    return (
        tokenizer.eos_token_id is None
        or ids[-1:] == [tokenizer.eos_token_id]
        or ids[-1] in end_ids(tokenizer)
    )


def check_fit(answer_tokens: int, limit: int, prompt_tokens: int, full_tokens: int = 0) -> None:
    """Raise `AnswerTooLong` unless the answer fits behind one token of the prompt, if there is one."""
    room = limit - 1 if prompt_tokens else limit
    if answer_tokens > room:
        reason = f"the answer has {answer_tokens} tokens; with max_length_tokens={limit} at most {room} fit"
        raise AnswerTooLong(reason, full_tokens or prompt_tokens + answer_tokens)


def _leading_bos(tokenizer: Any, ids: list[int], start: int) -> int:
    """Return 1 if the sequence begins with a BOS token that truncation has to keep, else 0."""
    return int(
        start > 0 and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id
    )


def _example(ids: list[int], start: int) -> Example:
    return Example(tuple(ids), (IGNORE,) * start + tuple(ids[start:]))


def _windows(row: Row, tokenizer: Any, limit: int) -> Iterator[Item]:
    """Cut plain text into windows of at most `limit` tokens; each begins with the last token of the one before."""
    text = row.pairs[0][1]
    marked = _has_bos(tokenizer, text)
    encoded = tokenizer(
        text, add_special_tokens=not marked, return_offsets_mapping=True, verbose=False
    )
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    if row.end and not _ends(tokenizer, ids):
        ids.append(tokenizer.eos_token_id)
    if len(ids) < 2:
        raise BadRow("text", "has fewer than two tokens")
    newlines = [index for index, character in enumerate(text) if character == "\n"]
    for begin in range(0, len(ids) - 1, limit - 1):
        window = ids[begin : begin + limit]
        line = row.line + bisect_right(newlines, offsets[begin][0] - 1) if not row.end else row.line
        yield Item(_example(window, 0), line=line, file=row.file)


def read_dataset(
    path: Path | str | Given,
    tokenizer: Any,
    *,
    task: str | None,
    max_length_tokens: int,
    train_on_prompt: bool = False,
    columns: Mapping[str, str] | None = None,
    classes: int = 0,
    strict_columns: bool = False,
) -> Dataset:
    """Read and encode the rows of a file, or those that Python holds; bad rows are in `.problems`.

    Raises:
        DataError: if no row can be used, or the rows are preferences, which no method here trains on.
    """
    from ondevice.data.readers.objects import Given, as_rows
    from ondevice.data.reading import read_rows

    if isinstance(path, Given):
        if path.tokenized:
            from ondevice.data.token_rows import tokens

            return tokens(path, max_length_tokens, strict_columns)
        rows = as_rows(path, task, columns)
    else:
        rows = read_rows(path, task=task, columns=columns)
    refuse_preferences(rows)
    return encode(
        rows,
        tokenizer,
        max_length_tokens=max_length_tokens,
        train_on_prompt=train_on_prompt,
        classes=classes,
        strict_columns=strict_columns,
    )


def refuse_preferences(rows: Rows) -> None:
    """Raise DataError for rows that are read and shown, and that no method here trains on."""
    column = {"preference": "chosen", "thumbs": "completion"}.get(rows.format)
    if column is not None:
        raise DataError(
            f"{rows.file} holds preferences, which `ondevice data` shows and no method here trains on",
            expected="rows with answers to learn",
            received=f"format {rows.format}",
            hint=f"--column prompt=prompt --column completion={column} trains on the {column} texts alone",
        )
