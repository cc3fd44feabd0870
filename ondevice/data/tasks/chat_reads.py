"""What a chat template does with a row: which of its columns and keys it reads, and which turns it drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ondevice.core.untrusted import Refused, parse_json
from ondevice.data.rows import BadRow, Row
from ondevice.data.tasks.chat_template import ChatTemplate, Message
from ondevice.data.tasks.conversations import REASONING
from ondevice.data.tasks.turn_weights import OBEYED

_KNOWN = {"role", "content", "tool_calls", *REASONING}
_KWARGS = "chat_template_kwargs"


TRIES = 8
"""Conversations in which a key changes nothing, until it is taken for one that the template does not read."""


class Reads:
    """Answers for one template, by rendering a conversation with and without; the answers are kept."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._reads: set[tuple[str, str]] = set()
        self._misses = Counter[tuple[str, str]]()
        self._dropped: dict[tuple[Any, ...], tuple[int | None, Counter[str]]] = {}

    def context(self, row: Row) -> tuple[dict[str, Any], Counter[str]]:
        """Return what the template takes of a row's other columns, and those that it does not read.

        Raises:
            BadRow: `chat_template_kwargs` is not an object.
        """
        values, unread = {}, Counter[str]()
        kwargs = row.rest.get(_KWARGS)
        if isinstance(kwargs, str):
            try:
                kwargs = parse_json(kwargs)
            except Refused:
                kwargs = 0
        if not isinstance(kwargs, dict | None):
            raise BadRow(_KWARGS, "expected an object with the chat template's own settings")
        columns = [(name, name, value) for name, value in row.rest.items() if name != _KWARGS]
        columns += [(f"{_KWARGS}.{name}", name, value) for name, value in (kwargs or {}).items()]
        for shown, name, value in columns:
            if name in self.template.variables or (
                name == "documents" and self.template.takes_documents
            ):
                values[name] = value
            else:
                unread[shown] += 1
        return values, unread

    def check(self, turns: Sequence[Message], text: str, context: Mapping[str, Any]) -> None:
        """Refuse a conversation of which the template drops a turn.

        Raises:
            BadRow: it does not write the turn.
        """
        dropped, _ = self._written(turns, context)
        if dropped is not None and not _words_in(turns[dropped], text):
            role = turns[dropped]["role"]
            raise BadRow(
                "messages", f"the tokenizer's chat template drops a turn of the role {role}"
            )

    def unread(
        self, turns: Sequence[Message], texts: Sequence[str], context: Mapping[str, Any]
    ) -> Counter[str]:
        """Count the keys of turns and calls that change nothing in what the template writes."""
        counts = Counter(self._written(turns, context)[1])
        for turn in turns:
            others = [
                key
                for key, value in turn.items()
                if key not in _KNOWN and value not in (None, "", [], {})
            ]
            others = [key for key in others if not (key in OBEYED and _obeyed(turn, key))]
            for key in others:
                counts[f"messages[].{key}"] += self._is_unread(
                    turns, turn["role"], key, texts[-1], context
                )
            for call in turn.get("tool_calls", ()):
                for key in [
                    *(set(call) - {"type", "function"}),
                    *(set(call["function"]) - {"name", "arguments"}),
                ]:
                    path = f"tool_calls[].{key}" if key in call else f"tool_calls[].function.{key}"
                    counts[f"messages[].{path}"] += self._is_unread(
                        turns, "assistant", path, texts[-1], context
                    )
            thought = next((key for key in REASONING if turn.get(key)), None)
            if thought and turn["role"] == "assistant":
                shown = str(turn[thought]).strip()
                # Earlier reasoning may go: its own answer was trained on in a text of its own.
                counts[f"messages[].{thought}"] += not any(shown in text for text in texts)
        return +counts

    def _is_unread(
        self, turns: Sequence[Message], role: str, path: str, text: str, context: Mapping[str, Any]
    ) -> bool:
        if (role, path) in self._reads or self._misses[role, path] >= TRIES:
            return (role, path) not in self._reads
        try:
            other = self.template.render(
                [_without(turn, role, path) for turn in turns], False, context
            )
        except BadRow:  # it cannot do without
            other = None
        if other != text:
            self._reads.add((role, path))
        self._misses[role, path] += other == text
        return other == text

    def _written(
        self, turns: Sequence[Message], context: Mapping[str, Any]
    ) -> tuple[int | None, Counter[str]]:
        """Return the first turn that the template drops, or None, and texts beside calls that it drops."""
        shape = tuple(
            (turn["role"], _has_text(turn), len(turn.get("tool_calls", ()))) for turn in turns
        )
        if shape not in self._dropped:
            self._dropped[shape] = self._mark(turns, context)
        return self._dropped[shape]

    def _mark(
        self, turns: Sequence[Message], context: Mapping[str, Any]
    ) -> tuple[int | None, Counter[str]]:
        marked = [_marked(turn, f"Qz{number}q") for number, turn in enumerate(turns)]
        counts = Counter[str]()
        try:
            text = self.template.render(marked, False, context)
        except BadRow:  # it reads the words themselves, and they cannot be replaced
            return None, counts
        for number, turn in enumerate(turns):
            calls = [
                f"Qz{number}qf{index}" in text for index in range(len(turn.get("tool_calls", ())))
            ]
            if not all(calls) or (_has_text(turn) and not calls and f"Qz{number}q" not in text):
                return number, counts
            if calls and _has_text(turn) and f"Qz{number}q." not in text:
                counts["messages[].content of a turn with tool_calls"] += 1
        return None, counts


def _marked(turn: Message, word: str) -> Message:
    marked = dict(turn)
    if _has_text(turn):
        marked["content"] = (
            f"{word}."
            if isinstance(turn["content"], str)
            else [{"type": "text", "text": f"{word}."}]
        )
    if turn.get("tool_calls"):
        marked["tool_calls"] = [{**call, "function": {**call["function"], "name": f"{word}f{index}"}}
                                for index, call in enumerate(turn["tool_calls"])]  # fmt: skip
    return marked


def _has_text(turn: Message) -> bool:
    content = turn.get("content")
    return bool(content.strip()) if isinstance(content, str) else bool(content)


def _words_in(turn: Message, text: str) -> bool:
    """Return True if a turn's text is there as it is: then it was not dropped, whatever other words would be."""
    content = turn.get("content")
    return (
        isinstance(content, str)
        and len(content.strip()) > 3
        and content.strip() in text
        and not turn.get("tool_calls")
    )


def _obeyed(turn: Message, key: str) -> bool:
    """Return True if a weight decides: an answer's, or that of a turn which is context anyway."""
    return turn["role"] == "assistant" or turn[key] in (0, False, "false") or key == "masked"


def _without(turn: Message, role: str, path: str) -> Message:
    """Return the turn without a key of it, or of its calls or their functions."""
    if turn["role"] != role:
        return turn
    key = path.rpartition(".")[2]
    if path == key:
        return {name: value for name, value in turn.items() if name != key}
    if "tool_calls" not in turn:
        return turn
    calls = [
        {name: value for name, value in call.items() if name != key} for call in turn["tool_calls"]
    ]
    if ".function." in path:
        calls = [{**call, "function": {name: value for name, value in call["function"].items() if name != key}}
                 for call in turn["tool_calls"]]  # fmt: skip
    return {**turn, "tool_calls": calls}
