"""What a tokenizer's chat template takes, found by asking it: probes with words that no template has.

A template drops in silence what it does not know: a tool's turn, a call, the text of a content that it wants as a list
of parts. So nothing is guessed from its name. Each form is rendered once with marked words, and the words that come out
say what the template reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from ondevice.core.errors import DataError, MissingPackageError, ModelError
from ondevice.data.rows import BadRow
from ondevice.data.tasks.conversations import REASONING

Message = dict[str, Any]

_THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)
_OWN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template",
        "conversation", "tokenize", "tokenizer_kwargs", "return_dict", "return_tensors", "return_assistant_tokens_mask",
        "padding", "truncation", "max_length", "sanitize_control_tokens"}  # fmt: skip
"""Names in a template, or of `apply_chat_template`, that a row's column cannot set."""

_CALL_ID = "abcdefgh1"  # nine letters and digits, as Mistral's templates demand
_USER, _ANSWER = {"role": "user", "content": "Qzuser"}, {"role": "assistant", "content": "Qzanswer"}
_TOOL = {"type": "function", "function": {"name": "Qztool", "description": "Qzsays", "parameters": {
    "type": "object", "properties": {"Qzkey": {"type": "string", "description": "a word"}}}}}  # fmt: skip
_RESULT = {"role": "tool", "name": "Qzcall", "tool_call_id": _CALL_ID, "content": "Qzresult"}


def apply_template(tokenizer: Any, turns: Sequence[Any], **named: Any) -> str:
    """Render turns by the tokenizer's chat template, under the limits of `sandbox`; whoever renders calls this.

    Args:
        named: as for `apply_chat_template`.

    Raises:
        MissingPackageError: jinja2 is not installed.
        ModelError: the template would take too much memory or time.
    """
    try:
        from ondevice.data.tasks import sandbox

        sandbox.install()
    except ImportError:
        raise _no_jinja() from None
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **named))
    except sandbox.TemplateLimitError as error:
        raise ModelError(
            "the model's chat template takes too much to render",
            expected="a template that writes the turns",
            received=str(error),
            hint="take the tokenizer of the model's own publisher",
        ) from None


class ChatTemplate:
    """The chat template of a tokenizer, and what it reads.

    Args:
        tokenizer: of transformers, with a chat template.
        tools: True for conversations with tools, for which some tokenizers have a template of its own.
    """

    def __init__(self, tokenizer: Any, tools: bool = False) -> None:
        self.tokenizer = tokenizer
        try:
            self.source: str = tokenizer.get_chat_template(None, [_TOOL] if tools else None)
        except ValueError as error:
            raise DataError(
                str(error).strip().partition("\n")[0], hint="name one of them 'default'"
            ) from None
        variables = _variables_of(self.source)
        self.takes_documents = "documents" in variables
        """True if a conversation may have documents."""
        self.variables = variables - _OWN - set(tokenizer.special_tokens_map)
        """What a row's column may set: `enable_thinking`, `date_string`."""

    def render(
        self, turns: Sequence[Message], ask: bool, context: Mapping[str, Any] | None = None
    ) -> str:
        """Render turns as text; with `ask` the template asks for the next answer.

        Raises:
            BadRow: the template refuses them.
            MissingPackageError: jinja2 is not installed.
        """
        try:
            return apply_template(
                self.tokenizer, list(turns), add_generation_prompt=ask, **(context or {})
            )
        except (MissingPackageError, ModelError):
            raise
        except Exception as error:  # a template is a program of its own and raises what it likes
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise BadRow(
                "messages", f"the tokenizer's chat template refuses the turns: {reason}"
            ) from None

    def shows(
        self, turns: Sequence[Message], *words: str, ask: bool = False, **context: Any
    ) -> bool:
        """Return True if the template renders the turns with all of the words."""
        try:
            text = self.render(turns, ask, context)
        except BadRow:
            return False
        return all(word in text for word in words)

    @cached_property
    def wants_parts(self) -> bool:
        """True if it writes a content that is a list of parts, but not one that is a text."""
        words = ("Qzuser", "Qzanswer")
        return not self.shows([_USER, _ANSWER], *words) and self.shows(
            [_parts(_USER), _parts(_ANSWER)], *words
        )

    @cached_property
    def shows_system(self) -> bool:
        """True if it writes a system turn."""
        return self._shows([{"role": "system", "content": "Qzsystem"}, _USER, _ANSWER], "Qzsystem")

    @cached_property
    def shows_tools(self) -> bool:
        """True if it writes the tools that a conversation names."""
        return self._shows([_USER], "Qztool", ask=True, tools=[_TOOL])

    @cached_property
    def call_arguments(self) -> str | None:
        """How it takes the arguments of a tool call: as an "object" or as "text"; None if it writes no calls."""
        for form in ("object", "text"):
            arguments = {"Qzkey": "Qzvalue"}
            turn = _call_turn(json.dumps(arguments) if form == "text" else arguments)
            # A dictionary that is written with Python's quotes is not what a model calls a tool with.
            shown = self._shows([_USER, turn], "Qzcall", tools=[_TOOL])
            if shown and not self._shows([_USER, turn], "'Qzkey'", tools=[_TOOL]):
                return form
        return None

    @cached_property
    def shows_results(self) -> bool:
        """True if it writes the turn in which a tool answers."""
        called = _ANSWER
        if self.call_arguments:
            arguments = {"Qzkey": "Qzvalue"}
            called = _call_turn(
                json.dumps(arguments) if self.call_arguments == "text" else arguments
            )
        return self._shows([_USER, called, _RESULT, _ANSWER], "Qzresult", tools=[_TOOL])

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key under which it writes an answer's reasoning; "content" if only between <think> marks in it."""
        for key in REASONING:
            if self._shows([_USER, {**_ANSWER, key: "Qzthought"}], "Qzthought"):
                return key
        inside = {**_ANSWER, "content": "<think>\nQzthought\n</think>\n\nQzanswer"}
        return (
            "content"
            if "</think>" in self.source and self._shows([_USER, inside], "Qzthought")
            else None
        )

    @cached_property
    def marks(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """What it writes before and behind the text of a user's turn and of an answer, each in the forms that rows have
        it: with and without what stands around the whole conversation."""
        turns = [_USER, _ANSWER, {"role": "user", "content": "Qzagain"}]
        try:
            text = self.render([self.formed(turn) for turn in turns], False)
            before, between, again, _ = re.split("Qzuser|Qzanswer|Qzagain", text)
            _, _, behind = re.split(
                "Qzuser|Qzanswer", self.render([self.formed(turn) for turn in turns[:2]], False)
            )
        except (BadRow, ValueError):  # refused, or one of the words is not there once
            return {"user": ((), ()), "assistant": ((), ())}
        end = next(iter(self._special.findall(between)), "")
        asked = again.removeprefix(behind) if again.startswith(behind) else again
        stop = next(iter(self._special.findall(behind)), "")
        return {
            "user": (
                (before, before.removeprefix(self.tokenizer.bos_token or ""), asked),
                (between, end),
            ),
            "assistant": (
                (between, between.removeprefix(end)),
                (behind, stop, self.tokenizer.eos_token or ""),
            ),
        }

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokens = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        return re.compile(
            "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token)
            or r"\Z."
        )

    def without_marks(self, turn: Message) -> Message:
        """Return a turn without the marks that its text holds already and the template writes around it."""
        content = turn.get("content")
        if (
            not isinstance(content, str)
            or turn["role"] not in ("user", "assistant")
            or not self._special.search(content)
        ):
            return turn
        opens, ends = self.marks[turn["role"]]
        text = content
        for mark in (one.strip() for one in (*opens, self.tokenizer.bos_token or "")):
            if mark and self._special.search(mark) and text.lstrip().startswith(mark):
                text = text.lstrip().removeprefix(mark).lstrip()
        for mark in (one.strip() for one in ends):
            if mark and self._special.search(mark) and text.rstrip().endswith(mark):
                text = text.rstrip().removesuffix(mark).rstrip()
        return {**turn, "content": text} if text else turn

    def formed(self, turn: Message) -> Message:
        """Return a turn in the form that the template takes: its content, its reasoning, its calls' arguments."""
        turn = self._with_reasoning(turn)
        if self.call_arguments == "text" and turn.get("tool_calls"):
            turn = {
                **turn,
                "tool_calls": [_with_text_arguments(call) for call in turn["tool_calls"]],
            }
        return _parts(turn) if self.wants_parts and isinstance(turn.get("content"), str) else turn

    def _with_reasoning(self, turn: Message) -> Message:
        """Return an answer with its reasoning where the template looks for it."""
        wanted, content = self.reasoning_key, turn.get("content")
        if turn["role"] != "assistant" or wanted is None or not isinstance(content, str):
            return turn
        key = next((key for key in REASONING if isinstance(turn.get(key), str) and turn[key]), None)
        if key is None:
            thought = _THOUGHT.fullmatch(content)
            if thought is None or wanted == "content" or "</think>" in self.source:
                return turn  # the template takes <think> marks apart itself
            return {**turn, wanted: thought[1], "content": thought[2]}
        if turn.get(wanted) and wanted != "content":
            return turn
        rest = {name: value for name, value in turn.items() if name != key}
        if wanted == "content":
            return {**rest, "content": f"<think>\n{turn[key]}\n</think>\n\n{content}"}
        return {**rest, wanted: turn[key]}

    def _shows(
        self, turns: Sequence[Message], *words: str, ask: bool = False, **context: Any
    ) -> bool:
        if self.wants_parts:
            turns = [_parts(turn) for turn in turns]
        return self.shows(turns, *words, ask=ask, **context)


@lru_cache(maxsize=8)
def _end_marks(tokenizer: Any, source: str) -> tuple[str, ...]:
    try:
        _, ends = ChatTemplate(tokenizer).marks["assistant"]
    except (DataError, MissingPackageError):  # it is refused where it is needed
        return ()
    return tuple(end for end in ends[1:2] if end)


def end_marks(tokenizer: Any) -> tuple[str, ...]:
    """Return the special tokens with which the tokenizer's chat template ends an answer."""
    return _end_marks(tokenizer, str(tokenizer.chat_template))


def _parts(turn: Message) -> Message:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def _call_turn(arguments: Any) -> Message:
    call = {
        "id": _CALL_ID,
        "type": "function",
        "function": {"name": "Qzcall", "arguments": arguments},
    }
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        **call,
        "function": {
            **function,
            "arguments": json.dumps(function["arguments"], ensure_ascii=False),
        },
    }


def _variables_of(source: str) -> frozenset[str]:
    """Return the variables of a template that whoever renders it may set."""
    try:
        from jinja2 import Environment, TemplateError, meta, nodes
        from jinja2.ext import Extension
    except ImportError:
        raise _no_jinja() from None

    class Generation(Extension):
        """`{% generation %}`, with which training templates mark answers, as the body that it holds."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(
        extensions=["jinja2.ext.loopcontrols", Generation]
    )  # parsed, never rendered
    try:
        tree = environment.parse(source)
    except TemplateError as error:
        raise DataError(f"the tokenizer's chat template cannot be read: {error}",
                        hint="correct chat_template.jinja beside the model's tokenizer.json") from None  # fmt: skip
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    asked = {test.node.name for test in tree.find_all(nodes.Test)
             if test.name == "defined" and isinstance(test.node, nodes.Name)}  # fmt: skip
    # A name that the template sets itself is its own, unless it first asks whether somebody else did.
    return frozenset(meta.find_undeclared_variables(tree) - (stored - asked))


def _no_jinja() -> MissingPackageError:
    return MissingPackageError(
        "chat templates need the package 'jinja2'", hint="pip install jinja2"
    )
