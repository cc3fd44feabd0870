"""Rows as token ids with label masks; only answers are trained on, and an answer is never cut."""

from __future__ import annotations

import copy
import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from ondevice.core.errors import ConfigError, DataError
from ondevice.core.session import IGNORE
from ondevice.data.examples import Dataset, Example, Item, Report, check_fit, refuse_unread
from ondevice.data.pictures import FIELD
from ondevice.data.readers.objects import NAME
from ondevice.data.rows import AnswerTooLong, BadRow, Format, Row, RowProblem, Rows
from ondevice.data.tasks.chat import ChatEncoder, common_length
from ondevice.data.tasks.chat_template import CLOCK, clock, end_marks


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

    These tokens are labelled:

    - chat, and instruct if the tokenizer has a chat template: assistant turns with their
      end-of-turn token (see `ondevice.data.tasks.chat`);
    - completion and instruct: the answer and the end-of-sequence token;
    - classification, multiple choice and question answering: only the answer, which for question
      answering ends with a newline as in MeZO;
    - text: everything. It is cut into windows that overlap by one token, so that every token but
      the first is predicted once.

    With `train_on_prompt` every token of `Item.example` is labelled; `Item.candidates` label only
    the answer. Prompt and answer are tokenized as one text. If the prompt's own ids are not a
    prefix of the result, the token that spans the boundary belongs to the answer. Special tokens
    that the tokenizer puts in front (BOS) stay, also if the prompt is truncated.

    Args:
        rows: from `read_rows`.
        tokenizer: a fast tokenizer of transformers.
        max_length_tokens: longest sequence, at least 2. To fit, prompts lose tokens at the front,
            and conversations lose complete turns. A row becomes a problem if its answer does not
            fit after one token of context, or its last turns do not fit.
        train_on_prompt: label the prompt, too.
        allow_empty: if no row can be encoded, return only the problems instead of raising.
        classes: of the model's classification head; 0 for a language model. The prompt then has
            all of the tokenizer's own marks, and the label at its second position is the number of
            the right candidate.
        strict_columns: refuse rows with a column or a key that nothing reads.

    Raises:
        ConfigError: `max_length_tokens` is below 2.
        DataError: no row could be encoded, the tokenizer is not a fast one, chat rows come without
            a chat template, or something is not read under `strict_columns`.
    """
    encoder = Encoder(
        rows,
        next(iter(rows.items), Row(0)),
        tokenizer,
        max_length_tokens=max_length_tokens,
        train_on_prompt=train_on_prompt,
        classes=classes,
    )
    dataset = Dataset(
        report=encoder.report,
        format=rows.format,
        max_length_tokens=max_length_tokens,
        template=encoder.template,
        notes=tuple(rows.notes),
        metric=rows.metric,
        values=rows.values,
        labels=rows.labels,
        task=rows.task,
        file="" if rows.file == NAME else rows.file,
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
        raise _nothing_encoded(rows, dataset)
    dataset.problems = sorted(rows.problems + dataset.problems, key=lambda problem: problem.line)
    return dataset


def _nothing_encoded(rows: Rows, dataset: Dataset) -> DataError:
    first = next(iter(dataset.problems), None)
    hint = "raise max_length_tokens, or shorten the answers"
    if first is not None and not dataset.too_long_tokens:
        hint = "`ondevice data FILE` lists every row and its fault"
        if first.field == "messages":
            hint = "write the turns as the template takes them, or change its chat_template.jinja"
    reason = first or f"{rows.file} has no rows"
    return DataError(
        f"no row can be trained on: {reason}", received=f"{len(rows.items)} rows", hint=hint
    )


class Encoder:
    """Tokenizes the rows of a file, one at a time; arguments and errors are those of `encode`.

    Args:
        rows: facts about all rows; its `items` are not read.
        first: the first row, which decides how all are framed.
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
    ) -> None:
        if max_length_tokens < 2:
            raise ConfigError(
                "max_length_tokens is too small", expected="at least 2", received=max_length_tokens
            )
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                "a slow tokenizer cannot say which text a token covers",
                expected="a fast tokenizer",
                received=type(tokenizer).__name__,
                hint="save it with a tokenizer.json",
            )
        # A base model has no template; rows of one question and one answer do without.
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        if first.messages and not first.pairs and not self.has_template:
            raise DataError(
                f"{rows.file} has chat rows, and the tokenizer has no chat template",
                expected="a tokenizer with a chat template, as instruction-tuned models have",
                received=getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__,
                hint="use an instruction-tuned model, or write rows of prompt and completion",
            )
        self.template = rows.task or ""
        if rows.format == "instruct":
            self.template = "instruction prompt"
        if first.messages and self.has_template:
            self.template = "chat template"
        self.folder = rows.file if os.path.isdir(rows.file) else os.path.dirname(rows.file)
        self.format: Format = rows.format
        self.tokenizer = tokenizer
        self.classes = classes
        self.max_length_tokens = max_length_tokens
        self.train_on_prompt = train_on_prompt
        self.report = Report()
        self._chat: ChatEncoder | None = None

    def encoded(self, row: Row) -> list[Item | BadRow]:
        """Tokenize a row: one item for each sequence, and a reason for each that cannot be one."""
        try:
            if row.images and (self.classes or not self.has_template):
                raise BadRow(FIELD, "pictures need a model with a chat template")
            if row.messages and self.has_template and not self.classes:
                self._chat = self._chat or ChatEncoder(
                    self.tokenizer,
                    self.max_length_tokens,
                    self.train_on_prompt,
                    self.report,
                    rated=self.format == "thumbs",
                    folder=self.folder,
                )
                return [self._judged(row, one) for one in self._chat.encode(row)]
            return [self._judged(row, one) for one in self._encode_texts(row)]
        except BadRow as bad:
            return [bad]

    def _judged(self, row: Row, one: Item | BadRow) -> Item | BadRow:
        """Return an item with its rating, or the reason if a pair has nothing to tell apart."""
        if not isinstance(one, Item):
            return one
        if self.format == "thumbs":
            return replace(one, liked=row.label == "up")
        if self.format == "preference" and len({text.ids for text in one.candidates}) < 2:
            return BadRow("rejected", "is the same as the chosen answer")
        return one

    def _encode_texts(self, row: Row) -> list[Item]:
        """Encode a row that is not a conversation, or whose tokenizer has no chat template."""
        tokenizer, limit = self.tokenizer, self.max_length_tokens
        if self.classes:
            items = [_class_item(row, tokenizer, limit, self.classes)]
        elif self.format == "text":
            items = list(_windows(row, tokenizer, limit))
        else:
            items = [_pair_item(row, tokenizer, limit, self.train_on_prompt)]
        self.report.unread.update(row.rest.keys())
        if row.rest:
            items = [replace(item, unread=tuple(row.rest)) for item in items]
        if row.end and not self.classes and row.gold is None:
            last = items[-1].example.ids[-1]
            end = ""
            if last == tokenizer.eos_token_id or _is_end_mark(tokenizer, last):
                end = str(tokenizer.convert_ids_to_tokens(last))
            self.report.ends[end] += 1
        return items


def is_dated(tokenizer: Any) -> bool:
    """Return True if the tokenizer's chat template writes the date."""
    return CLOCK in json.dumps(getattr(tokenizer, "chat_template", None))


def dated(tokenizer: Any, when: datetime | None) -> Any:
    """Return a copy of the tokenizer whose chat template sees `when` as the present.

    So a run renders all rows at its start's date, also for templates that write it, as Llama 3.2's.
    """
    if when is None or not is_dated(tokenizer):
        return tokenizer
    template: Any = tokenizer.chat_template
    result = copy.copy(tokenizer)
    if isinstance(template, dict):
        result.chat_template = {name: clock(when, text) + text for name, text in template.items()}
    else:
        result.chat_template = clock(when, template) + template
    return result


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens that end a turn in the chat template; no other end follows one."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
    return tuple(tokenizer.convert_tokens_to_ids(mark) for mark in end_marks(tokenizer))


def _tokenize(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return a text's token ids, and the characters of each token as (start, end).

    A tokenizer's own special tokens stand in front, unless the text brings its BOS, and none at the
    end. Their span is empty, which tells them from marks that the text itself writes.
    """
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids, spans = list(encoded["input_ids"]), list(encoded["offset_mapping"])
    while ids and ids[-1] == tokenizer.eos_token_id and spans[-1][0] == spans[-1][1]:
        del ids[-1], spans[-1]
    bos = tokenizer.bos_token
    if bos and text.startswith(bos) and spans[0][0] == spans[0][1]:
        return ids[1:], spans[1:]
    return ids, spans


def _pair_item(row: Row, tokenizer: Any, limit: int, train_on_prompt: bool) -> Item:
    """Encode a row of pairs: every format but chat and text.

    All candidates lose as many prompt tokens as the one with the longest answer needs.
    """
    if not row.pairs:
        raise BadRow("messages", "the tokenizer has no chat template")
    # Prompt and answer as one text, as a model would have seen them.
    pair_ids = [_tokenize(tokenizer, prompt + answer)[0] for prompt, answer in row.pairs]
    shared: dict[str, list[int]] = {}  # candidates of one prompt share their context
    for (prompt, _), ids in zip(row.pairs, pair_ids, strict=True):
        if prompt not in shared:
            shared[prompt] = _tokenize(tokenizer, prompt)[0]
        shared[prompt] = shared[prompt][: common_length(shared[prompt], ids)]
    starts = [len(shared[prompt]) for prompt, _ in row.pairs]
    for ids, start in zip(pair_ids, starts, strict=True):
        if row.end and not _ends(tokenizer, ids):
            ids.append(tokenizer.eos_token_id)
        if len(ids) - max(start, 1) < 1:
            raise BadRow("", "the answer has no token that can be trained on")
    longest = max(len(ids) - start for ids, start in zip(pair_ids, starts, strict=True))
    check_fit(longest, limit, min(starts))
    # Cut all prompts at the front to one length, so that candidates have the same context.
    bos = int(starts[0] > 0 and pair_ids[0][0] == tokenizer.bos_token_id)
    dropped = 0
    for number, start in enumerate(starts):
        lost = max(0, start - (limit - longest))
        if lost:
            pair_ids[number] = pair_ids[number][:bos] + pair_ids[number][bos + lost :]
            starts[number] = start - lost
        dropped = max(dropped, lost)
    candidates: tuple[Example, ...] = ()
    if row.gold is not None:
        candidates = tuple(map(_example, pair_ids, starts))
    gold = row.gold or 0
    return Item(
        _example(pair_ids[gold], starts[gold] * (not train_on_prompt)),
        candidates,
        row.gold,
        row.answers,
        row.line,
        row.file,
        row.value,
        prompt_tokens=starts[gold],
        dropped_tokens=dropped,
    )


def _class_item(row: Row, tokenizer: Any, limit: int, classes: int) -> Item:
    """Encode a row for a classification head; a long prompt loses tokens after its first one."""
    if row.gold is None or len({prompt for prompt, _ in row.pairs}) != 1:
        raise BadRow("label", "a classification head needs a text and a label")
    if len(row.pairs) != classes:
        reason = f"the task has {len(row.pairs)} labels, and the model's head {classes}"
        raise BadRow("label", reason)
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
        dropped_tokens=dropped,
    )


def _ends(tokenizer: Any, ids: list[int]) -> bool:
    """Return whether the ids end with an end token, or the tokenizer has none to append."""
    eos = tokenizer.eos_token_id
    return eos is None or ids[-1:] == [eos] or _is_end_mark(tokenizer, ids[-1])


def _is_end_mark(tokenizer: Any, token: int) -> bool:
    """Return whether a token ends a turn; the template is rendered only for special tokens."""
    return token in _marks(tokenizer, len(tokenizer)) and token in end_ids(tokenizer)


@lru_cache(maxsize=8)
def _marks(tokenizer: Any, size: int) -> frozenset[int]:
    """Return the ids of all special and added tokens; `size` changes if one is added."""
    return frozenset([*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()])


def _example(ids: list[int], start: int) -> Example:
    return Example(tuple(ids), (IGNORE,) * start + tuple(ids[start:]))


def _windows(row: Row, tokenizer: Any, limit: int) -> Iterator[Item]:
    """Cut text into windows of at most `limit` tokens that overlap by one token."""
    text = row.pairs[0][1]
    ids, spans = _tokenize(tokenizer, text)
    if row.end and not _ends(tokenizer, ids):
        ids.append(tokenizer.eos_token_id)
    if len(ids) < 2:
        raise BadRow("text", "has fewer than two tokens")
    newlines = [index for index, character in enumerate(text) if character == "\n"]
    for begin in range(0, len(ids) - 1, limit - 1):
        line = row.line
        if not row.end:  # running text, not a document of one line
            line += bisect_right(newlines, spans[begin][0] - 1)
        yield Item(_example(ids[begin : begin + limit], 0), line=line, file=row.file)
