"""The forms that a tokenizer's chat template takes, found with probes: words that no template has.

A template silently drops unknown parts: a tool's turn, a call, the text of a content that should be
a list of parts. So nothing is guessed from its name. Each form is rendered once with marked words,
and the words in the output show what the template reads.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from ondevice.core.errors import DataError, MissingPackageError, ModelError
from ondevice.data.pictures import MARK, in_parts
from ondevice.data.rows import BadRow
from ondevice.data.tasks.conversations import REASONING

Message = dict[str, Any]

_THOUGHT = re.compile(r"\s*<think>\n?(.*?)\n?</think>\s*(.*)", re.DOTALL)
_OWN = {
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "conversation", "tokenize", "tokenizer_kwargs", "return_dict"),
    *("return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length"),
    "sanitize_control_tokens",
}
"""Names in a template, or of `apply_chat_template`, that a row's column cannot set."""

_CALL_ID = "abcdefgh1"  # nine letters and digits, as Mistral's templates demand
_USER = {"role": "user", "content": "Qzuser"}
_ANSWER = {"role": "assistant", "content": "Qzanswer"}
_PROPERTIES = {"Qzkey": {"type": "string", "description": "a word"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "Qztool",
        "description": "Qzsays",
        "parameters": {"type": "object", "properties": _PROPERTIES},
    },
}
_RESULT = {"role": "tool", "name": "Qzcall", "tool_call_id": _CALL_ID, "content": "Qzresult"}


def apply_template(tokenizer: Any, turns: Sequence[Any], **named: Any) -> str:
    """Render turns by the tokenizer's chat template, under the limits of `sandbox`.

    All rendering goes through this function.

    Args:
        named: as for `apply_chat_template`.

    Raises:
        MissingPackageError: jinja2 is not installed.
        ModelError: the template would take too much memory or time.
    """
    sandbox = _sandbox()
    sandbox.install()
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **named))
    except sandbox.TemplateLimitError as error:
        raise ModelError(
            "the model's chat template takes too much to render",
            expected="a template that only writes the turns",
            received=str(error),
            hint="use the tokenizer of the model's own publisher",
        ) from None


class ChatTemplate:
    """The chat template of a tokenizer, and the forms that it reads.

    Args:
        tokenizer: of transformers, with a chat template.
        tools: True for conversations with tools, for which some tokenizers have a separate template.
    """

    def __init__(self, tokenizer: Any, tools: bool = False) -> None:
        self.tokenizer = tokenizer
        try:
            self.source: str = tokenizer.get_chat_template(None, [_TOOL] * tools or None)
        except ValueError as error:
            message = str(error).strip().partition("\n")[0]
            raise DataError(message, hint="name one of them 'default'") from None
        variables = _sandbox().variables_of(self.source)
        self.takes_documents = "documents" in variables
        """True if a conversation may have documents."""
        self.variables = variables - _OWN - set(tokenizer.special_tokens_map)
        """Variables that a row's column may set, such as `enable_thinking` or `date_string`."""

    def render(
        self, turns: Sequence[Message], ask: bool, context: Mapping[str, Any] | None = None
    ) -> str:
        """Render turns as text; with `ask` the template asks for the next answer.

        Raises:
            BadRow: the template refuses them.
            MissingPackageError: jinja2 is not installed.
        """
        named = context or {}
        try:
            return apply_template(self.tokenizer, list(turns), add_generation_prompt=ask, **named)
        except (MissingPackageError, ModelError):
            raise
        except Exception as error:  # a template is a program, and may raise anything
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            reason = f"the tokenizer's chat template refuses the turns: {reason}"
            raise BadRow("messages", reason) from None

    def shows(
        self, turns: Sequence[Message], *words: str, ask: bool = False, **context: Any
    ) -> bool:
        """Return whether the template renders the turns with all of the words."""
        try:
            text = self.render(turns, ask, context)
        except BadRow:
            return False
        return all(word in text for word in words)

    @cached_property
    def wants_parts(self) -> bool:
        """True if it writes a content that is a list of parts, but not one that is a text."""
        words = ("Qzuser", "Qzanswer")
        if self.shows([_USER, _ANSWER], *words):
            return False
        return self.shows([_parts(_USER), _parts(_ANSWER)], *words)

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
        """The form of a tool call's arguments, "object" or "text"; None if it writes no calls."""
        for form in ("object", "text"):
            turn = _call_turn(form)
            # Models do not call tools with dictionaries in Python's quotes.
            shown = self._shows([_USER, turn], "Qzcall", tools=[_TOOL])
            if shown and not self._shows([_USER, turn], "'Qzkey'", tools=[_TOOL]):
                return form
        return None

    @cached_property
    def shows_results(self) -> bool:
        """True if it writes the turn with a tool's result."""
        called = _call_turn(self.call_arguments) if self.call_arguments else _ANSWER
        return self._shows([_USER, called, _RESULT, _ANSWER], "Qzresult", tools=[_TOOL])

    @cached_property
    def reasoning_key(self) -> str | None:
        """The key of an answer's reasoning; "content" if it is between <think> marks in that."""
        for key in REASONING:
            if self._shows([_USER, {**_ANSWER, key: "Qzthought"}], "Qzthought"):
                return key
        inside = {**_ANSWER, "content": "<think>\nQzthought\n</think>\n\nQzanswer"}
        if "</think>" in self.source and self._shows([_USER, inside], "Qzthought"):
            return "content"
        return None

    @cached_property
    def marks(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """The marks before and after the text of a user's turn and of an answer.

        Each has the forms that occur in rows: with and without the marks of the conversation.
        """
        turns = [
            self.formed(turn) for turn in (_USER, _ANSWER, {"role": "user", "content": "Qzagain"})
        ]
        try:
            text = self.render(turns, False)
            before, between, again, _ = re.split("Qzuser|Qzanswer|Qzagain", text)
            _, _, after = re.split("Qzuser|Qzanswer", self.render(turns[:2], False))
        except (BadRow, ValueError):  # refused, or one of the words does not occur exactly once
            return {"user": ((), ()), "assistant": ((), ())}
        end = next(iter(self._special.findall(between)), "")
        stop = next(iter(self._special.findall(after)), "")
        bos, eos = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
        user_opens = (before, before.removeprefix(bos), again.removeprefix(after))
        answer_opens = (between, between.removeprefix(end))
        return {
            "user": (user_opens, (between, end)),
            "assistant": (answer_opens, (after, stop, eos)),
        }

    @cached_property
    def _special(self) -> re.Pattern[str]:
        tokens = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()} - {""}
        longest_first = sorted(tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"\Z.")

    def without_marks(self, turn: Message) -> Message:
        """Return a turn without marks in its text that the template writes around it, too."""
        content = turn.get("content")
        if not isinstance(content, str) or turn["role"] not in ("user", "assistant"):
            return turn
        if not self._special.search(content):
            return turn
        opens, ends = self.marks[turn["role"]]
        text = content
        for mark in (one.strip() for one in (*opens, self.tokenizer.bos_token or "")):
            if mark and self._special.search(mark) and text.lstrip().startswith(mark):
                text = text.lstrip().removeprefix(mark).lstrip()
        for mark in (one.strip() for one in ends):
            if mark and self._special.search(mark) and text.rstrip().endswith(mark):
                text = text.rstrip().removesuffix(mark).rstrip()
        return {**turn, "content": text or content}

    def formed(self, turn: Message) -> Message:
        """Return a turn in the form that the template takes: its content, its reasoning, its calls' arguments."""
        turn = self._with_reasoning(turn)
        if self.call_arguments == "text" and turn.get("tool_calls"):
            calls = [_with_text_arguments(call) for call in turn["tool_calls"]]
            turn = {**turn, "tool_calls": calls}
        content = turn.get("content")
        if isinstance(content, str) and MARK in content:
            return {**turn, "content": in_parts(content)}
        if self.wants_parts and isinstance(content, str):
            return _parts(turn)
        return turn

    def _with_reasoning(self, turn: Message) -> Message:
        """Return an answer with its reasoning under the key that the template reads."""
        expected, content = self.reasoning_key, turn.get("content")
        if turn["role"] != "assistant" or expected is None or not isinstance(content, str):
            return turn
        key = next((key for key in REASONING if isinstance(turn.get(key), str) and turn[key]), None)
        if key is None:
            thought = _THOUGHT.fullmatch(content)
            if thought is None or expected == "content" or "</think>" in self.source:
                return turn  # the template takes <think> marks apart itself
            return {**turn, expected: thought[1], "content": thought[2]}
        if turn.get(expected) and expected != "content":
            return turn
        rest = {name: value for name, value in turn.items() if name != key}
        if expected == "content":
            return {**rest, "content": f"<think>\n{turn[key]}\n</think>\n\n{content}"}
        return {**rest, expected: turn[key]}

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
    except (DataError, MissingPackageError):  # the error is raised when the template is needed
        return ()
    return tuple(end for end in ends[1:2] if end)


def end_marks(tokenizer: Any) -> tuple[str, ...]:
    """Return the special tokens with which the tokenizer's chat template ends an answer."""
    return _end_marks(tokenizer, str(tokenizer.chat_template))


def _parts(turn: Message) -> Message:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def _call_turn(form: str) -> Message:
    """Return a turn with a tool call whose arguments are an "object" or "text"."""
    function = {"name": "Qzcall", "arguments": {"Qzkey": "Qzvalue"}}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    if form == "text":
        call = _with_text_arguments(call)
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _sandbox() -> Any:
    """Import `sandbox`, which imports jinja2."""
    try:
        from ondevice.data.tasks import sandbox
    except ImportError:
        raise _no_jinja() from None
    return sandbox


def _no_jinja() -> MissingPackageError:
    return MissingPackageError(
        "chat templates need the package 'jinja2'", hint="pip install jinja2"
    )


CLOCK = "strftime_now"
"""The function by which transformers gives templates the clock."""
_PERCENT = "\x00"
_FORMAT = re.compile(r"""(["'])([^"'\\\n]*%[^"'\\\n]*)\1""")


_CALL = re.compile(CLOCK + r"""\(\s*(["'])([^"'\\\n]*)\1\s*\)""")


def with_date(template: str, when: datetime) -> str:
    """Return a template with a text in place of each call of its clock that names its format.

    For readers with a Jinja of their own, which may not take the macro of `clock`.
    """
    return _CALL.sub(lambda call: json.dumps(when.strftime(call[2])), template)


def clock(when: datetime, template: str) -> str:
    """Write a macro that stands before the template's own clock.

    transformers turns a function that is given to a template into a text, so the clock has to be
    a part of it. The macro knows the value of every text in the template that may be a format. In
    another one, which the template composes, it replaces each directive of strftime, with or
    without glibc's `-`.
    """
    values = [["%%", _PERCENT]]
    for letter in string.ascii_letters:
        for directive in (f"%{letter}", f"%-{letter}"):
            value = when.strftime(directive)
            if value != directive:
                values.append([directive, value.replace("%", _PERCENT)])
    values.append([_PERCENT, "%"])
    known = {text: when.strftime(text) for _, text in _FORMAT.findall(template)}
    return (
        f"{{%- macro {CLOCK}(format) -%}}{{%- set known = {json.dumps(known)} -%}}"
        "{%- if format in known -%}{{- known[format] -}}{%- else -%}"
        "{%- set now = namespace(text=format) -%}"
        f"{{%- for directive, value in {json.dumps(values)} -%}}"
        "{%- set now.text = now.text | replace(directive, value) -%}{%- endfor -%}"
        "{{- now.text -}}{%- endif -%}{%- endmacro +%}"
    )
