"""The columns and keys of a row that a chat template reads, and the turns that it drops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ondevice.core.untrusted import Refused, parse_json
from ondevice.data.rows import BadRow, Row
from ondevice.data.tasks.chat_template import ChatTemplate, Message
from ondevice.data.tasks.conversations import REASONING
from ondevice.data.tasks.turn_weights import OBEYED

_KNOWN = {"role", "content", "tool_calls", *REASONING}
_KWARGS = "chat_template_kwargs"


_PLAIN_TYPES = (("type", "function"), ("type", "object"))
"""Say of a tool and of its parameters only what they are anyway."""
MOST_PATHS = 200
"""Kinds of keys in a conversation's tools that are tried."""
TRIES = 8
"""Conversations in which a key must change nothing before it counts as unread."""


class Reads:
    """Finds what one template reads, by rendering conversations with and without it."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._reads: set[tuple[str, str]] = set()
        self._misses = Counter[tuple[str, str]]()
        self._dropped: dict[tuple[Any, ...], tuple[int | None, Counter[str]]] = {}

    def context(self, row: Row) -> tuple[dict[str, Any], Counter[str]]:
        """Return the values of a row's other columns for the template, and the unread columns.

        Raises:
            BadRow: `chat_template_kwargs` is not an object.
        """
        values = {}
        unread = Counter[str]()
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
        variables = set(self.template.variables)
        if self.template.takes_documents:
            variables.add("documents")
        for shown, name, value in columns:
            if name in variables:
                values[name] = value
            else:
                unread[shown] += 1
        return values, unread

    def check(self, turns: Sequence[Message], text: str, context: Mapping[str, Any]) -> None:
        """Refuse a conversation if the template drops one of its turns.

        Raises:
            BadRow: the template does not write a turn.
        """
        dropped, _ = self._written(turns, context)
        if dropped is not None and not _words_in(turns[dropped], text):
            role = turns[dropped]["role"]
            reason = f"the tokenizer's chat template drops a turn of the role {role}"
            raise BadRow("messages", reason)

    def unread(
        self, turns: Sequence[Message], texts: Sequence[str], context: Mapping[str, Any]
    ) -> Counter[str]:
        """Count keys of turns, calls and tools that change nothing in what the template writes."""
        counts = Counter(self._written(turns, context)[1])
        for turn in turns:
            paths = []
            for key, value in turn.items():
                if key in _KNOWN or value in (None, "", [], {}):
                    continue
                if key not in OBEYED or not _obeyed(turn, key):
                    paths.append((turn["role"], key))
            for call in turn.get("tool_calls", ()):
                others = set(call["function"]) - {"name", "arguments"}
                keys = [f"tool_calls[].{key}" for key in set(call) - {"type", "function"}]
                keys += [f"tool_calls[].function.{key}" for key in others - set(call)]
                paths += [("assistant", key) for key in keys]
            for role, path in paths:
                is_unread = self._is_unread(turns, role, path, texts[-1], context)
                counts[f"messages[].{path}"] += is_unread
            thought = next((key for key in REASONING if turn.get(key)), None)
            if thought and turn["role"] == "assistant":
                shown = str(turn[thought]).strip()
                # Earlier reasoning may go: its own answer was trained on in a text of its own.
                counts[f"messages[].{thought}"] += not any(shown in text for text in texts)
        paths = dict.fromkeys(_schema_paths(context.get("tools", ())))
        for path in islice(paths, MOST_PATHS):
            within = any(counts[path[:end]] for end, one in enumerate(path) if one == ".")
            if not within and self._is_unread(turns, "tools", path, texts[-1], context):
                counts[path] += 1
        return +counts

    def _is_unread(
        self, turns: Sequence[Message], role: str, path: str, text: str, context: Mapping[str, Any]
    ) -> bool:
        if (role, path) in self._reads or self._misses[role, path] >= TRIES:
            return (role, path) not in self._reads
        without = [_without(turn, role, path) for turn in turns]
        if role == "tools":
            context = {**context, "tools": _without_schema(context["tools"], path)}
        try:
            other = self.template.render(without, False, context)
        except BadRow:  # it needs the key
            other = None
        if other != text:
            self._reads.add((role, path))
        self._misses[role, path] += other == text
        return other == text

    def _written(
        self, turns: Sequence[Message], context: Mapping[str, Any]
    ) -> tuple[int | None, Counter[str]]:
        """Return the first turn that the template drops, or None, and dropped texts next to calls."""
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
        except BadRow:  # it reads the words themselves, which cannot be replaced then
            return None, counts
        for number, turn in enumerate(turns):
            count = len(turn.get("tool_calls", ()))
            calls = [f"Qz{number}qf{index}" in text for index in range(count)]
            if not all(calls) or (_has_text(turn) and not calls and f"Qz{number}q" not in text):
                return number, counts
            if calls and _has_text(turn) and f"Qz{number}q." not in text:
                counts["messages[].content of a turn with tool_calls"] += 1
        return None, counts


def _marked(turn: Message, word: str) -> Message:
    marked = dict(turn)
    if _has_text(turn):
        marked["content"] = f"{word}."
        if not isinstance(turn["content"], str):
            marked["content"] = [{"type": "text", "text": f"{word}."}]
    if turn.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "name": f"{word}f{index}"}}
            for index, call in enumerate(turn["tool_calls"])
        ]
    return marked


def _has_text(turn: Message) -> bool:
    content = turn.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content)


def _words_in(turn: Message, text: str) -> bool:
    """Return whether a turn's text occurs unchanged: then it is not dropped, unlike the probe."""
    content = turn.get("content")
    if not isinstance(content, str) or turn.get("tool_calls"):
        return False
    return len(content.strip()) > 3 and content.strip() in text


def _obeyed(turn: Message, key: str) -> bool:
    """Return whether a weight is obeyed: an answer's, or that of a turn that is context anyway."""
    return turn["role"] == "assistant" or turn[key] in (0, False, "false") or key == "masked"


def _without(turn: Message, role: str, path: str) -> Message:
    """Return the turn without one key of itself, its calls or their functions."""
    if turn["role"] != role:
        return turn
    key = path.rpartition(".")[2]
    if path == key:
        return {name: value for name, value in turn.items() if name != key}
    if "tool_calls" not in turn:
        return turn
    calls = []
    for call in turn["tool_calls"]:
        if ".function." in path:
            function = {name: value for name, value in call["function"].items() if name != key}
            calls.append({**call, "function": function})
        else:
            calls.append({name: value for name, value in call.items() if name != key})
    return {**turn, "tool_calls": calls}


def _schema_keys(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield key, path and value of an object in a tool; properties have the path `*`."""
    for key, value in schema.items():
        shown = "*" if path.endswith(".properties") else key
        yield key, f"{path}.{shown}", value


def _schema_paths(value: Any, path: str = "tools[]") -> Iterator[str]:
    """Yield the paths of the keys that hold something, outer ones first, but for plain types."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _schema_paths(item, path)
    elif isinstance(value, dict):
        for key, inner, item in _schema_keys(value, path):
            if item not in (None, "", [], {}) and (key, item) not in _PLAIN_TYPES:
                yield inner
                yield from _schema_paths(item, inner)


def _without_schema(value: Any, removed: str, path: str = "tools[]") -> Any:
    """Return tools without the keys of one path."""
    if isinstance(value, list | tuple):
        return [_without_schema(item, removed, path) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_schema(item, removed, inner)
        for key, inner, item in _schema_keys(value, path)
        if inner != removed
    }
