"""Rows as token ids with label masks: only the answer is trained on, and the answer is never cut."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ondevice.core.errors import ConfigError, DataError
from ondevice.core.session import IGNORE
from ondevice.data.examples import Dataset, Example, Item, Report, check_fit, refuse_unread
from ondevice.data.rows import AnswerTooLong, BadRow, Format, Row, RowProblem, Rows
from ondevice.data.tasks.chat import ChatEncoder
from ondevice.data.tasks.chat_template import end_marks


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


def end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the special tokens with which the chat template ends a turn: behind one of them no other end follows."""
    if not getattr(tokenizer, "chat_template", None):
        return ()
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
