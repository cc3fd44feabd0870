"""Conversations as examples, through the tokenizer's own template: each answer as the model sees it.

The template renders a conversation up to an answer; the answer's context is the template's request
for it after the turns before. A template that only appends gives one text for all answers: one
example with several trained spans. One that rewrites history, for example by dropping earlier
reasoning, gives one text and one example for each answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ondevice.core.session import IGNORE
from ondevice.data.examples import Example, Item, Report, check_fit
from ondevice.data.pictures import FIELD, FIRST_ID, MARK, Picture
from ondevice.data.rows import AnswerTooLong, BadRow, Row, Turn, keys_of
from ondevice.data.tasks import literal
from ondevice.data.tasks.chat_reads import Reads
from ondevice.data.tasks.chat_template import ChatTemplate, Message, end_marks
from ondevice.data.tasks.turn_weights import is_trained

_MARKED = "turns that held the chat template's own marks, which are written once"
_AS_TEXT = "turns that mention special tokens, which are encoded as text"
_TOOLS_AS_TEXT = "conversations with tools as text, which the chat template does not write"


class Span(NamedTuple):
    """The characters of one answer, with its end-of-turn token."""

    start: int
    end: int
    trained: bool
    unanswered: str = ""
    """The part of the template's request that it does not write before the answer."""


@dataclass(frozen=True, slots=True)
class Text:
    """A conversation up to turn `last`, as the template writes it, and its answers."""

    text: str
    spans: tuple[Span, ...]
    last: int
    shared: int = 0
    """Characters that it shares with the previous text."""


class ChatEncoder:
    """Encodes conversations.

    Args:
        tokenizer: with a chat template.
        limit: most tokens of an example. To fit, complete turns are dropped, from the oldest after
            the system turn; the last exchange is never cut.
        train_on_prompt: label the turns of others, too, once each.
        report: counts what encoding does in addition to examples.
        rated: rows are rated answers; a rating is of what comes after the last turn of the user.
        folder: of the data, in which the paths of pictures lead.
    """

    def __init__(
        self,
        tokenizer: Any,
        limit: int,
        train_on_prompt: bool,
        report: Report,
        rated: bool = False,
        folder: str = ".",
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.limit = limit
        self.train_on_prompt = train_on_prompt
        self.report = report
        self.rated = rated
        self._templates: dict[bool, tuple[ChatTemplate, Reads]] = {}
        marks = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        self._ends = tuple(sorted(marks, key=len, reverse=True))
        self._stops = end_marks(tokenizer)

    def encode(self, row: Row) -> Iterator[Item | BadRow]:
        """Yield the examples of a row, and a reason for each answer that cannot be one.

        Raises:
            BadRow: nothing of the row can be encoded.
        """
        self._answered: list[tuple[str, Span]] = []
        self._images = self._pictures(row)
        template, reads = self._template(bool(row.tools))
        context, unread = reads.context(row)
        context = literal.hide(self.tokenizer, context)
        turns = self._turns(template, row.messages, row.tools, context)
        trained = [is_trained(turn) for turn in turns]
        if self.rated:
            trained = _from(_after_user(turns), trained)
        if template.call_arguments is None:  # a call is written by its name and its arguments
            calls = [call for turn in row.messages for call in keys_of(turn).get("tool_calls", ())]
            unread.update(
                f"messages[].tool_calls[].{key}"
                for call in calls
                for key in set(call) - {"type", "function"}
            )
        if not any(trained):
            reason = "no turn is to be trained on: all answers have weight 0 or train: false"
            raise BadRow("messages", reason)
        if row.rejected:
            other = self._turns(template, row.rejected, row.tools, context)
            both = (turns, other)
            # What both say is their prompt: it counts for neither.
            first = min(common_length(turns, other), len(turns) - 1, len(other) - 1)
            weights = (_from(first, trained), _from(first, [is_trained(turn) for turn in other]))
            pair = self._pair(row, template, context, both, weights)
            reads.check(turns, "", context)
            unread += reads.unread(turns, [template.render(turns, False, context)], context)
            yield replace(pair, unread=tuple(+unread))
        else:
            texts = self._texts(template, turns, trained, context)
            items = [self._item(row, template, context, turns, trained, text) for text in texts]
            used = turns[: texts[-1].last + 1]
            reads.check(used, texts[-1].text, context)
            unread += reads.unread(used, [text.text for text in texts], context)
            if sum(turn["role"] == "assistant" for turn in turns) > 1:
                kind = "several" if len(items) > 1 else "one"
                self.report.conversations.update({kind: 1, f"{kind} sequences": len(items)})
            names = tuple(+unread)
            for item in items:
                if isinstance(item, Item):
                    item = replace(item, unread=names)
                yield item
        self.report.unread.update(unread)
        for text, span in self._answered:
            self.report.ends[_end_mark(self._ends, self._stops, text[span.start : span.end])] += 1
            if span.unanswered:
                note = f"answers without {span.unanswered!r}, "
                note += "with which the chat template asks for them"
                self.report.notes[note] += 1

    def _pictures(self, row: Row) -> list[Picture]:
        """Return the row's pictures; BadRow if the model reads none."""
        if not row.images:
            return []
        pictures = getattr(self.tokenizer, "pictures", None)
        if pictures is None:
            reason = "the model reads only text; leave the column out, "
            reason += "or choose a checkpoint that reads images, such as SmolVLM2 or Qwen3.5"
            raise BadRow(FIELD, reason)
        return pictures.read(row.images, os.path.join(self.folder, row.file or "_"), self.tokenizer)

    def _template(self, tools: bool) -> tuple[ChatTemplate, Reads]:
        if tools not in self._templates:
            template = ChatTemplate(self.tokenizer, tools)
            self._templates[tools] = template, Reads(template)
        return self._templates[tools]

    def _turns(
        self,
        template: ChatTemplate,
        messages: Sequence[Turn],
        tools: Sequence[Mapping[str, Any]],
        context: dict[str, Any],
    ) -> list[Message]:
        """Return turns as the template takes them; tools that it takes go into `context`."""
        turns = []
        for message in messages:
            if MARK in message[1] and not self._images:
                raise BadRow(FIELD, "only conversations have pictures, in the column images")
            turn = {"role": message[0], "content": message[1], **keys_of(message)}
            if "developer" not in template.source:
                turn["role"] = message[0]
            plain = template.without_marks(turn)
            hidden = literal.hide(self.tokenizer, plain)
            self.report.notes[_MARKED] += plain != turn
            self.report.notes[_AS_TEXT] += hidden != plain
            turns.append(hidden)
        tools = literal.hide(self.tokenizer, tools)
        if tools and template.shows_tools:
            context["tools"] = list(tools)
        written = written_tools(template, turns, tools)
        self.report.notes[_TOOLS_AS_TEXT] += written != turns
        return [template.formed(turn) for turn in written]

    def _texts(
        self,
        template: ChatTemplate,
        turns: list[Message],
        trained: list[bool],
        context: Mapping[str, Any],
    ) -> list[Text]:
        """Render each answer, and merge answers whose text is the beginning of the next one's.

        Raises:
            BadRow: the template refuses the turns, or changes the history before an answer.
        """
        texts: list[Text] = []
        for number, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            text, start, unanswered = self._answer(template, turns[: number + 1], context)
            span = Span(start, _answer_end(self._ends, text), trained[number], unanswered)
            before = [Text("", (), -1), *texts][-1]
            if before.spans and text.startswith(before.text[: before.spans[-1].end]):
                texts[-1] = replace(before, text=text, spans=(*before.spans, span), last=number)
            else:
                texts.append(Text(text, (span,), number, common_length(before.text, text)))
        are_trained = all(span.trained for text in texts for span in text.spans)
        if self.train_on_prompt and len(texts) > 1 and not are_trained:
            reason = (
                "train_on_prompt cannot leave out a turn of weight 0 that the template rewrites"
            )
            raise BadRow("messages", reason)
        answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        used = []
        for text in texts:  # turns after the last trained answer are not context either
            spans = text.spans
            while spans and not spans[-1].trained:
                spans = spans[:-1]
            if spans:
                last = answers[answers.index(text.last) + len(spans) - len(text.spans)]
                used.append(replace(text, spans=spans, last=last))
        return used

    def _answer(
        self, template: ChatTemplate, turns: list[Message], context: Mapping[str, Any]
    ) -> tuple[str, int, str]:
        """Render the turns up to an answer.

        Returns:
            The text, the index of the answer in it, and the part of the template's request that is
            not written before the answer.
        """
        asked = template.render(turns[:-1], True, context)
        text = template.render(turns, False, context)
        if text.startswith(asked):
            return text, len(asked), ""
        history = common_length(asked, template.render(turns[:-1], False, context))
        # Another answer shows where their common head ends: an answer may begin like the request.
        probe = template.formed({"role": "assistant", "content": "Qz"})
        other = template.render([*turns[:-1], probe], False, context)
        start = min(common_length(asked, text), common_length(text, other))
        if start < history:
            reason = "the tokenizer's chat template rewrites earlier turns before an answer"
            raise BadRow("messages", reason)
        return text, start, asked[start:].strip() or asked[start:]

    def _item(
        self,
        row: Row,
        template: ChatTemplate,
        context: Mapping[str, Any],
        turns: list[Message],
        trained: list[bool],
        text: Text,
    ) -> Item | BadRow:
        used = [turns[: text.last + 1]]
        try:
            (example,), prompt, lost = self._fit(template, context, used, [trained], [text])
        except AnswerTooLong as problem:
            return problem
        return Item(
            example, line=row.line, file=row.file, prompt_tokens=prompt, dropped_tokens=lost
        )

    def _pair(
        self,
        row: Row,
        template: ChatTemplate,
        context: Mapping[str, Any],
        both: Sequence[list[Message]],
        trained: Sequence[list[bool]],
    ) -> Item:
        """Encode the two answers of a preference pair after the same turns."""
        texts = [
            self._texts(template, *one, context)[-1] for one in zip(both, trained, strict=True)
        ]
        examples, prompt, lost = self._fit(template, context, both, trained, texts)
        return Item(
            examples[0],
            tuple(examples),
            0,
            line=row.line,
            file=row.file,
            prompt_tokens=prompt,
            dropped_tokens=lost,
        )

    def _fit(
        self,
        template: ChatTemplate,
        context: Mapping[str, Any],
        both: Sequence[list[Message]],
        trained: Sequence[list[bool]],
        texts: list[Text],
    ) -> tuple[list[Example], int, int]:
        """Return the examples of the texts, the first one's prompt tokens, and the dropped tokens."""
        system = int(both[0][0]["role"] == "system")
        roles = [turn["role"] for turn in both[0]]
        users = [number for number, role in enumerate(roles) if role == "user" and number > system]
        begin = 0
        examples = [self._example(text) for text in texts]
        full = max(len(example) for example, _ in examples)
        while max(len(example) for example, _ in examples) > self.limit:
            begin = next((number for number in users if number > begin), 0)
            if not begin:
                example, start = examples[0]
                check_fit(len(example) - start, self.limit, start, full)
                reason = f"the last turns have {len(example)} tokens; "
                reason += f"with max_length_tokens={self.limit} they do not fit whole"
                raise AnswerTooLong(reason, full)
            texts = []
            for turns, weights in zip(both, trained, strict=True):
                weights = weights[:system] + weights[begin : len(turns)]
                cut = turns[:system] + turns[begin:]
                texts.append(self._texts(template, cut, weights, context)[-1])
            examples = [self._example(replace(text, shared=0)) for text in texts]
        for text in texts:
            self._answered += [(text.text, span) for span in text.spans if span.trained]
        lost = full - max(len(example) for example, _ in examples)
        return [example for example, _ in examples], examples[0][1], lost

    def _example(self, text: Text) -> tuple[Example, int]:
        """Tokenize a text up to its last answer; return the example and that answer's index."""
        ids, offsets = self._encode(text.text)
        covered = [
            next((span for span in text.spans if _covers(left, right, span)), None)
            for left, right in offsets
        ]
        last = [number for number, span in enumerate(covered) if span == text.spans[-1]]
        if not last:
            raise BadRow("messages", "the tokenizer's chat template drops the last assistant turn")
        end = last[-1] + 1  # text after the last end-of-turn token teaches nothing
        trained = [span is not None and span.trained for span in covered[:end]]
        if not any(trained[1:]):
            raise BadRow("messages", "no assistant turn has a token that can be trained on")
        if self.train_on_prompt:
            is_new = [right > text.shared or not text.shared for _, right in offsets[:end]]
            trained = [
                span.trained if span else new
                for span, new in zip(covered[:end], is_new, strict=True)
            ]
        ids = ids[:end]
        labels = [
            token if flag and token < FIRST_ID else IGNORE
            for token, flag in zip(ids, trained, strict=True)
        ]
        return Example(tuple(ids), tuple(labels)), last[0]

    def _encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Tokenize a text; each picture's mark becomes the picture's own tokens.

        Of fewer marks than pictures, as turns were dropped from the front, the last count.
        """
        ids, offsets = literal.encode(self.tokenizer, text)
        if not self._images:
            return ids, offsets
        mark = self.tokenizer.pictures.mark_id(self.tokenizer)
        count = ids.count(mark)
        if not 0 < count <= len(self._images):
            reason = f"the chat template writes {count} of {len(self._images)} pictures"
            raise BadRow(FIELD, reason)
        left = iter(self._images[-count:])
        both = []
        for token, place in zip(ids, offsets, strict=True):
            own = next(left).ids if token == mark else (token,)
            both += [(one, place) for one in own]
        return [token for token, _ in both], [place for _, place in both]


def _from(first: int, trained: list[bool]) -> list[bool]:
    """Return which turns are trained on if those before `first` are not."""
    return [flag and number >= first for number, flag in enumerate(trained)]


def _after_user(turns: Sequence[Message]) -> int:
    """Return the index of the turn after the last one of the user."""
    users = (number for number, turn in enumerate(turns) if turn["role"] == "user")
    return max(users, default=-1) + 1


def written_tools(
    template: ChatTemplate, turns: list[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Return turns with the parts of tools that the template does not write as text.

    The form is Hermes', which Qwen and SmolLM2 learned: tools are listed in the system turn, a call
    is JSON between <tool_call> tags, and a result stands between <tool_response> tags.
    """
    written = []
    for turn in turns:
        if turn.get("tool_calls") and template.call_arguments is None:
            calls = [
                json.dumps(call["function"], ensure_ascii=False) for call in turn["tool_calls"]
            ]
            parts = [turn["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
            turn = {key: value for key, value in turn.items() if key != "tool_calls"}
            turn["content"] = "\n".join(part for part in parts if part)
        elif turn["role"] == "tool" and not template.shows_results:
            text = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if written and written[-1].get("content", "").endswith("</tool_response>"):
                # Results of several calls are one turn of the user.
                written[-1]["content"] += f"\n{text}"
                continue
            turn = {**turn, "role": "user", "content": text}
        written.append(turn)
    if tools and not template.shows_tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        named = f"You may call these functions:\n<tools>\n{listed}\n</tools>"
        role = "system" if template.shows_system else "user"
        if written[0]["role"] in ("system", role):
            both = [written[0]["content"], named]
            if written[0]["role"] != "system":
                both.reverse()
            written[0] = {**written[0], "content": "\n\n".join(both)}
        else:
            written.insert(0, {"role": role, "content": named})
    return written


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common beginning of two texts or lists."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return min(len(first), len(second))


def _covers(left: int, right: int, span: Span) -> bool:
    """Return whether the token at text[left:right] overlaps the span; an empty one counts as one."""
    return left < span.end and max(right, left + 1) > span.start


def _answer_end(ends: tuple[str, ...], text: str) -> int:
    """Return the end of the turn, without white space after the end-of-turn token."""
    bare = text.rstrip()
    if bare.endswith(ends):
        return len(bare)
    return len(text)


def _end_mark(ends: tuple[str, ...], stops: tuple[str, ...], answer: str) -> str:
    """Return the special tokens that end an answer, from the template's own end on, or ""."""
    marks: list[str] = []
    while mark := next((end for end in ends if end and answer.endswith(end)), ""):
        marks.insert(0, mark)
        answer = answer.removesuffix(mark).rstrip()
    first = next((index for index, mark in enumerate(marks) if mark in stops), len(marks) - 1)
    return " ".join(marks[max(first, 0) :])
