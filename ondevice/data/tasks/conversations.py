"""Conversations in the shapes that people have them, as turns: ChatML, ShareGPT, tool calls, content parts, preference
pairs and thumbs.

A turn is (role, content), with a third part where it has other keys: every one of them goes to the chat template. Tool
calls are OpenAI's, with arguments as an object, as chat templates take them.
"""

from __future__ import annotations

from typing import Any

from ondevice.core.untrusted import parse_row
from ondevice.data.rows import BadRow, Row, Turn, check_text, describe, keys_of
from ondevice.data.tasks.turn_weights import ROW_MASKS, check_weights, flag

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""Names of roles in data files, and what chat templates call them."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys under which rows keep what the model thought before its answer; chat templates read one of them."""

_CALLS = ("function_call", "tool_call")
_LAST_TURN = "\n\nAssistant:"
"""Before the last answer of a conversation that is one text (Anthropic's HH)."""


def chat_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read `messages` or `conversations`; turns after the last of the assistant are left out.

    Raises:
        BadRow: a turn is not one, or none is the assistant's.
    """
    name = "messages" if "messages" in record else "conversations"
    turns = _weighted(turns_of(record.get(name), name), record)
    turns, rest = _answered(turns, name)
    if turns[0][0] != "system" and (system := system_of(record)):
        turns = (("system", system), *turns)
    return Row(line, messages=turns, tools=_tools(record), file=file, rest=rest)


SYSTEM = ("system", "system_prompt", "system_message")
"""Columns that hold what a system turn says."""


def system_of(record: dict[str, Any]) -> str:
    """Return what a row's column says as the system, or ""."""
    for key in SYSTEM:
        if key in record and record[key] is not None:
            return check_text(record[key], key, empty=True).strip() and record[key]
    return ""


def history_of(record: dict[str, Any]) -> tuple[Turn, ...]:
    """Return the earlier turns of a row's `history`: pairs of question and answer, or turns. They are context, which
    is said by a weight of 0.

    Raises:
        BadRow: the history is neither.
    """
    if not (value := record.get("history")):
        return ()
    value = _parsed(value, "history")
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        turns = turns_of(value, "history")
    elif isinstance(value, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in value
    ):
        turns: tuple[Turn, ...] = ()
        for index, (asked, answered) in enumerate(value):
            turns += (("user", check_text(asked, f"history.{index}.0")),)
            turns += (("assistant", check_text(answered, f"history.{index}.1")),)
    else:
        raise BadRow("history", "expected a list of [question, answer], or of turns")
    return tuple(_with_weight(turn, 0) if turn[0] == "assistant" else turn for turn in turns)


def _with_weight(turn: Turn, weight: Any) -> Turn:
    return turn[0], turn[1], {**keys_of(turn), "weight": weight}


def _weighted(turns: tuple[Turn, ...], record: dict[str, Any]) -> tuple[Turn, ...]:
    """Give turns the weights that a column of the row holds, one a turn."""
    for name in ROW_MASKS:
        if record.get(name) is None:
            continue
        weights = _parsed(record[name], name)
        if not isinstance(weights, list) or len(weights) != len(turns):
            raise BadRow(
                name,
                f"expected a list of {len(turns)} numbers, one a turn: 1 is trained on, 0 is context",
            )
        for number, weight in enumerate(weights):
            flag(weight, f"{name}.{number}")
        return tuple(
            _with_weight(turn, weight) for turn, weight in zip(turns, weights, strict=True)
        )
    return turns


def prompt_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read a prompt and a completion that are lists of turns."""
    prompt = record.get("prompt")
    turns = (
        turns_of(prompt, "prompt")
        if isinstance(prompt, list)
        else (("user", check_text(prompt, "prompt")),)
    )
    completion = record.get("completion")
    answer = turns_of(completion, "completion") if isinstance(completion, list) else (
        ("assistant", check_text(completion, "completion")),)  # fmt: skip
    if turns[0][0] != "system" and (system := system_of(record)):
        turns = (("system", system), *turns)
    turns, rest = _answered((*turns, *answer), "completion")
    return Row(line, messages=turns, tools=_tools(record), file=file, rest=rest)


def preference_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read `chosen` and `rejected`, texts or lists of turns, behind the `prompt` if there is one; the first pair is the
    chosen one."""
    prompt = next(
        (record[key] for key in ("prompt", "question", "instruction") if key in record), None
    )
    pair = {name: record.get(name) for name in ("chosen", "rejected")}
    if all(isinstance(value, str) for value in pair.values()) and (
        prompt is None or isinstance(prompt, str)
    ):
        texts = {name: check_text(value, name) for name, value in pair.items()}
        if prompt is None:
            cut = [text.rpartition(_LAST_TURN) for text in texts.values()]
            pairs = tuple((before + mark, after) for before, mark, after in cut)
            if any(not after.strip() for _, after in pairs):
                raise BadRow("chosen", "has no answer behind its last 'Assistant:'")
            return Row(line, pairs, 0, file=file)
        asked = check_text(prompt, "prompt")
        pairs = tuple((f"{asked.rstrip()}\n", text) for text in texts.values())
        chosen, rejected = ((("user", asked), ("assistant", text)) for text in texts.values())
        return Row(line, pairs, 0, chosen, rejected=rejected, file=file)
    before: tuple[Turn, ...] = ()
    if prompt is not None:
        before = (
            turns_of(prompt, "prompt")
            if isinstance(prompt, list)
            else (("user", check_text(prompt, "prompt")),)
        )
    both = []
    for name, value in pair.items():
        one = isinstance(value, str | dict)
        answer = turns_of([{"role": "assistant", "content": value} if isinstance(value, str) else value], name) if one \
            else turns_of(value, name)  # fmt: skip
        # Data sets repeat the prompt at the head of both conversations, or they do not.
        both.append(
            _answered(answer if answer[: len(before)] == before else (*before, *answer), name)[0]
        )
    return Row(line, gold=0, messages=both[0], rejected=both[1], tools=_tools(record), file=file)


def thumbs_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read a `completion` of a `prompt` with what a person thought of it: `label` or `thumbs`; or an `answer` that was
    `liked`, as the phone app keeps them."""
    name = next((name for name in ("label", "liked") if name in record), "thumbs")
    value, answered = record.get(name), "answer" if name == "liked" else "completion"
    text = str(value).strip().lower()
    if text not in THUMBS:
        raise BadRow(name, f"expected true or false, up or down; received {describe(value)}")
    label = THUMBS[text]
    if name != "liked" and (
        isinstance(record.get("prompt"), list) or isinstance(record.get("completion"), list)
    ):
        row = prompt_row(line, record, file)
        return Row(
            line, messages=row.messages, label=label, file=file, tools=row.tools, rest=row.rest
        )
    prompt, answer = (
        check_text(record.get("prompt"), "prompt"),
        check_text(record.get(answered), answered),
    )
    messages = (("user", prompt), ("assistant", answer))
    return Row(line, ((f"{prompt.rstrip()}\n", answer),), messages=messages, label=label, file=file)


THUMBS = {"true": "up", "false": "down", "up": "up", "down": "down", "thumbs_up": "up", "thumbs_down": "down",
          "\N{THUMBS UP SIGN}": "up", "\N{THUMBS DOWN SIGN}": "down"}  # fmt: skip


def turns_of(value: Any, name: str) -> tuple[Turn, ...]:
    """Read a list of turns, which a cell of a table holds as JSON: `role` and `content`, or `from` and `value`.

    Raises:
        BadRow: not a list, or a turn of it is not one.
    """
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = parse_row(value)
        except ValueError:
            raise BadRow(name, "expected a JSON list of turns in the cell") from None
    if not isinstance(value, list) or not value:
        raise BadRow(name, f"expected a list of turns, received {describe(value)}")
    return tuple(_turn(turn, f"{name}.{index}") for index, turn in enumerate(value))


def _turn(turn: Any, where: str) -> Turn:
    """Read a turn; keys other than its role and its content are kept as they are, without those that are null."""
    if not isinstance(turn, dict):
        raise BadRow(where, f"expected an object with role and content, received {describe(turn)}")
    key, said = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    known = turn.get(key)
    role = ROLES.get(known.lower()) if isinstance(known, str) else None
    if role is None:
        raise BadRow(
            f"{where}.{key}",
            f"expected system, user, assistant or tool; received {describe(known)}",
        )
    content = turn.get(said)
    extra = {name: value for name, value in turn.items()
             if name not in (key, said, "tool_calls", "function_call") and value is not None}  # fmt: skip
    if known == "developer":
        extra["role"] = known
    check_weights(extra, where, role)
    if str(known).lower() in _CALLS:
        return role, "", {**extra, "tool_calls": _calls(content, f"{where}.{said}")}
    calls = turn.get("tool_calls") or (
        [turn["function_call"]] if turn.get("function_call") else None
    )
    if calls and role != "assistant":
        raise BadRow(
            f"{where}.tool_calls",
            f"expected tool calls in turns of the assistant only, received role {role}",
        )
    if calls:
        extra["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if content is None and (calls or any(extra.get(name) for name in REASONING)):
        content = ""
    text = _joined(content, f"{where}.{said}") if isinstance(content, list) else content
    text = check_text(
        text,
        f"{where}.{said}",
        empty=bool(calls) or role == "tool" or bool(set(REASONING) & set(extra)),
    )
    return (role, text, extra) if extra else (role, text)


def _joined(parts: list[Any], where: str) -> str:
    """Join the text parts of a content; parts of another kind cannot be trained on."""
    texts = []
    for index, part in enumerate(parts):
        kind = (
            part.get("type", "text")
            if isinstance(part, dict)
            else "text"
            if isinstance(part, str)
            else None
        )
        if kind not in ("text", "input_text", "output_text"):
            shown = describe(part) if kind is None else describe(kind)
            raise BadRow(
                f"{where}.{index}.type",
                f"expected a text part, received {shown}; models here read text alone",
            )
        texts.append(
            check_text(
                part if isinstance(part, str) else part.get("text"),
                f"{where}.{index}.text",
                empty=True,
            )
        )
    return "".join(texts)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Read tool calls: a list or one, as objects or as JSON; arguments become an object."""
    value = _parsed(value, where)
    calls = []
    for index, item in enumerate(value if isinstance(value, list) else [value]):
        call = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow(
                f"{where}.{index}",
                f"expected a call with name and arguments, received {describe(item)}",
            )
        named = "arguments" if "arguments" in call else "parameters"
        arguments = _parsed(call.get(named) or {}, f"{where}.{index}.arguments")
        if not isinstance(arguments, dict):
            raise BadRow(
                f"{where}.{index}.arguments", f"expected an object, received {describe(arguments)}"
            )
        # A call that is not wrapped keeps its own keys outside, where an id stands.
        outer = {
            key: value
            for key, value in item.items()
            if key not in ("function", "name", "arguments", "parameters")
        }
        inner = (
            {key: value for key, value in call.items() if key not in outer and key != named}
            if call is not item
            else {}
        )
        function = {**inner, "name": call["name"], "arguments": arguments}
        calls.append({**outer, "type": item.get("type", "function"), "function": function})
    return calls


def _tools(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Read `tools`, or `functions`, as OpenAI called them first."""
    name = "tools" if record.get("tools") else "functions"
    tools = _parsed(record[name], name) if record.get(name) else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(name, f"expected a list of objects, received {describe(tools)}")
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    )


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_row(value)
    except ValueError:
        raise BadRow(where, f"expected JSON, received {describe(value)}") from None


def _answered(turns: tuple[Turn, ...], name: str) -> tuple[tuple[Turn, ...], dict[str, Any]]:
    """Return the turns up to the assistant's last one, before which somebody else has to speak; and, as what is not
    read, those behind it: they are neither trained on nor context."""
    count = len(turns)
    while turns and turns[-1][0] != "assistant":
        turns = turns[:-1]
    if not turns:
        raise BadRow(name, "has no assistant turn to train on")
    if turns[0][0] == "assistant":
        raise BadRow(f"{name}.0.role", "expected system or user first, received assistant")
    return turns, {f"{name} behind the last answer": True} if len(turns) < count else {}
