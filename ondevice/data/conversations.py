"""Conversations in the shapes that people have them, as turns: ChatML, ShareGPT, tool calls, content parts, preference
pairs and thumbs.

A turn is (role, content), with a third part where it has tool calls or answers one. Tool calls are OpenAI's, with
arguments as an object, as chat templates take them.
"""

from __future__ import annotations

from typing import Any

from ondevice.core.untrusted import parse_row
from ondevice.data.records import check_text, describe
from ondevice.data.rows import BadRow, Row, Turn

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
"""Names of roles in data files, and what chat templates call them."""

_CALLS = ("function_call", "tool_call")
_LAST_TURN = "\n\nAssistant:"
"""Before the last answer of a conversation that is one text (Anthropic's HH)."""


def chat_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read `messages` or `conversations`; turns after the last of the assistant are left out.

    Raises:
        BadRow: a turn is not one, or none is the assistant's.
    """
    name = "messages" if "messages" in record else "conversations"
    turns = _answered(turns_of(record.get(name), name), name)
    system = record.get("system")
    if isinstance(system, str) and system.strip() and turns[0][0] != "system":
        turns = (("system", check_text(system, "system")), *turns)
    return Row(line, messages=turns, tools=_tools(record.get("tools")), file=file)


def prompt_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read a prompt and a completion that are lists of turns."""
    prompt = record.get("prompt")
    turns = turns_of(prompt, "prompt") if isinstance(prompt, list) else (("user", check_text(prompt, "prompt")),)
    completion = record.get("completion")
    answer = turns_of(completion, "completion") if isinstance(completion, list) else (
        ("assistant", check_text(completion, "completion")),)  # fmt: skip
    return Row(line, messages=_answered((*turns, *answer), "completion"), tools=_tools(record.get("tools")), file=file)


def preference_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read `chosen` and `rejected`, texts or lists of turns, behind the `prompt` if there is one; the first pair is the
    chosen one."""
    prompt = record.get("prompt", record.get("question", record.get("instruction")))
    pair = {name: record.get(name) for name in ("chosen", "rejected")}
    if all(isinstance(value, str) for value in pair.values()) and (prompt is None or isinstance(prompt, str)):
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
        before = turns_of(prompt, "prompt") if isinstance(prompt, list) else (("user", check_text(prompt, "prompt")),)
    both = []
    for name, value in pair.items():
        one = isinstance(value, str | dict)
        answer = turns_of([{"role": "assistant", "content": value} if isinstance(value, str) else value], name) if one \
            else turns_of(value, name)  # fmt: skip
        # Data sets repeat the prompt at the head of both conversations, or they do not.
        both.append(_answered(answer if answer[: len(before)] == before else (*before, *answer), name))
    return Row(line, gold=0, messages=both[0], rejected=both[1], tools=_tools(record.get("tools")), file=file)


def thumbs_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read a `completion` of a `prompt` with what a person thought of it: `label` or `thumbs`; or an `answer` that was
    `liked`, as the phone app keeps them."""
    name = next((name for name in ("label", "liked") if name in record), "thumbs")
    if name == "liked":
        record = {**record, "completion": record.get("answer")}
    value = record.get(name)
    text = str(value).strip().lower()
    if text not in THUMBS:
        raise BadRow(name, f"expected true or false, up or down; received {describe(value)}")
    label = THUMBS[text]
    if isinstance(record.get("prompt"), list) or isinstance(record.get("completion"), list):
        row = prompt_row(line, record, file)
        return Row(line, messages=row.messages, label=label, file=file, tools=row.tools)
    prompt, answer = check_text(record.get("prompt"), "prompt"), check_text(record.get("completion"), "completion")
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
    if not isinstance(turn, dict):
        raise BadRow(where, f"expected an object with role and content, received {describe(turn)}")
    key, said = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    known = turn.get(key)
    role = ROLES.get(known.lower()) if isinstance(known, str) else None
    if role is None:
        raise BadRow(f"{where}.{key}", f"expected system, user, assistant or tool; received {describe(known)}")
    content, extra = turn.get(said), {}
    if str(known).lower() in _CALLS:
        return role, "", {"tool_calls": _calls(content, f"{where}.{said}")}
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else None)
    if calls and role == "assistant":
        extra["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if role == "tool":
        extra |= {other: turn[other] for other in ("name", "tool_call_id") if isinstance(turn.get(other), str)}
    if content is None and extra.get("tool_calls"):
        content = ""
    text = _joined(content, f"{where}.{said}") if isinstance(content, list) else content
    text = check_text(text, f"{where}.{said}", empty=bool(extra) or role == "tool")
    return (role, text, extra) if extra else (role, text)


def _joined(parts: list[Any], where: str) -> str:
    """Join the text parts of a content; parts of another kind cannot be trained on."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        if kind not in ("text", "input_text", "output_text"):
            shown = describe(part) if kind is None else describe(kind)
            raise BadRow(
                f"{where}.{index}.type", f"expected a text part, received {shown}; models here read text alone"
            )
        texts.append(
            check_text(part if isinstance(part, str) else part.get("text"), f"{where}.{index}.text", empty=True)
        )
    return "".join(texts)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Read tool calls: a list or one, as objects or as JSON; arguments become an object."""
    value = _parsed(value, where)
    calls = []
    for index, item in enumerate(value if isinstance(value, list) else [value]):
        call = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow(f"{where}.{index}", f"expected a call with name and arguments, received {describe(item)}")
        arguments = _parsed(call.get("arguments", call.get("parameters", {})), f"{where}.{index}.arguments")
        if not isinstance(arguments, dict):
            raise BadRow(f"{where}.{index}.arguments", f"expected an object, received {describe(arguments)}")
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": arguments}})
    return calls


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    tools = _parsed(value, "tools") if value else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("tools", f"expected a list of objects, received {describe(tools)}")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in tools)


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_row(value)
    except ValueError:
        raise BadRow(where, f"expected JSON, received {describe(value)}") from None


def _answered(turns: tuple[Turn, ...], name: str) -> tuple[Turn, ...]:
    """Return the turns up to the assistant's last one, before which somebody else has to speak."""
    while turns and turns[-1][0] != "assistant":
        turns = turns[:-1]  # nothing after the last assistant turn is trained on or needed as context
    if not turns:
        raise BadRow(name, "has no assistant turn to train on")
    if turns[0][0] == "assistant":
        raise BadRow(f"{name}.0.role", "expected system or user first, received assistant")
    return turns
