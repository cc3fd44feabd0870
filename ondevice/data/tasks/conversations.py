"""Conversations in the usual shapes, as turns: ChatML, ShareGPT, tool calls, content parts,
preference pairs and thumbs.

A turn is (role, content), with a third part if it has other keys, which all go to the chat
template. Tool calls are OpenAI's, with arguments as an object, as chat templates take them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ondevice.core.untrusted import parse_row
from ondevice.data.pictures import MARK, placed
from ondevice.data.rows import BadRow, Row, Turn, check_text, describe, keys_of
from ondevice.data.tasks.turn_weights import ROW_MASKS, check_weights, flag

_NAMES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt model bot function_call tool_call",
    "tool": "tool observation function function_response tool_response",
}
ROLES = {name: role for role, names in _NAMES.items() for name in names.split()}
"""Roles of chat templates, by their names in data files."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys for the model's reasoning before its answer; chat templates read one of them."""

_CALLS = ("function_call", "tool_call")
_LAST_TURN = "\n\nAssistant:"
"""Before the last answer of a conversation that is one text (Anthropic's HH)."""


def chat_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read `messages` or `conversations`; turns after the assistant's last one are left out.

    Raises:
        BadRow: a turn is not valid, or none is the assistant's.
    """
    name = "messages" if "messages" in record else "conversations"
    turns = _weighted(turns_of(record.get(name), name), record)
    turns, rest = _answered(turns, name)
    if turns[0][0] != "system" and (system := system_of(record)):
        turns = (("system", system), *turns)
    return _with_images(
        Row(line, messages=turns, tools=_tools(record), file=file, rest=rest), record
    )


def _with_images(row: Row, record: dict[str, Any]) -> Row:
    """Return a conversation with the pictures of its column `images`, each at its place."""
    values = record.get("images")
    if values is None and not any(MARK in turn[1] for turn in row.messages):
        return row
    values = _parsed(values or [], "images")
    return replace(row, messages=placed(row.messages, values), images=tuple(values))


SYSTEM = ("system", "system_prompt", "system_message")
"""Columns with the content of a system turn."""


def system_of(record: dict[str, Any]) -> str:
    """Return the content of a row's system column, or ""."""
    for key in SYSTEM:
        if key in record and record[key] is not None:
            return check_text(record[key], key, empty=True).strip() and record[key]
    return ""


def history_of(record: dict[str, Any]) -> tuple[Turn, ...]:
    """Return the turns of a row's `history`, from pairs of question and answer or from turns.

    They are context: each answer has a weight of 0.

    Raises:
        BadRow: the history is neither.
    """
    if not (value := record.get("history")):
        return ()
    value = _parsed(value, "history")
    items = value if isinstance(value, list) else [None]
    if all(isinstance(turn, dict) for turn in items):
        turns = turns_of(value, "history")
    elif all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in items):
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
    """Give turns the weights of a column, one for each turn."""
    for name in ROW_MASKS:
        if record.get(name) is None:
            continue
        weights = _parsed(record[name], name)
        if not isinstance(weights, list) or len(weights) != len(turns):
            reason = f"expected a list of {len(turns)} numbers, one a turn: "
            raise BadRow(name, reason + "1 is trained on, 0 is context")
        for number, weight in enumerate(weights):
            flag(weight, f"{name}.{number}")
        return tuple(map(_with_weight, turns, weights))
    return turns


def prompt_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read a prompt and a completion that are lists of turns, or one of them a text."""
    turns = _turns_or_text(record.get("prompt"), "prompt", "user")
    answer = _turns_or_text(record.get("completion"), "completion", "assistant")
    if turns[0][0] != "system" and (system := system_of(record)):
        turns = (("system", system), *turns)
    turns, rest = _answered((*turns, *answer), "completion")
    return _with_images(
        Row(line, messages=turns, tools=_tools(record), file=file, rest=rest), record
    )


def _turns_or_text(value: Any, name: str, role: str) -> tuple[Turn, ...]:
    if isinstance(value, list):
        return turns_of(value, name)
    return ((role, check_text(value, name)),)


def preference_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read `chosen` and `rejected`, texts or lists of turns, after the `prompt` if there is one.

    The first pair is the chosen one.
    """
    prompts = (record[key] for key in ("prompt", "question", "instruction") if key in record)
    prompt = next(prompts, None)
    pair = {name: record.get(name) for name in ("chosen", "rejected")}
    for name, value in pair.items():
        if value is None:
            raise BadRow(name, "is missing")
    are_texts = all(isinstance(value, str) for value in pair.values())
    if are_texts and isinstance(prompt, str | None):
        texts = {name: check_text(value, name) for name, value in pair.items()}
        if prompt is None:
            cut = [text.rpartition(_LAST_TURN) for text in texts.values()]
            pairs = tuple((before + mark, after) for before, mark, after in cut)
            if any(not after.strip() for _, after in pairs):
                raise BadRow("chosen", "has no answer after its last 'Assistant:'")
            return Row(line, pairs, 0, file=file)
        asked = check_text(prompt, "prompt")
        pairs = tuple((f"{asked.rstrip()}\n", text) for text in texts.values())
        chosen, rejected = ((("user", asked), ("assistant", text)) for text in texts.values())
        return Row(line, pairs, 0, chosen, rejected=rejected, file=file)
    before: tuple[Turn, ...] = ()
    if prompt is not None:
        before = _turns_or_text(prompt, "prompt", "user")
    both = []
    for name, value in pair.items():
        if isinstance(value, str):
            value = {"role": "assistant", "content": value}
        if isinstance(value, dict):
            value = [value]
        answer = turns_of(value, name)
        # Some data sets repeat the prompt at the head of both conversations.
        if answer[: len(before)] != before:
            answer = (*before, *answer)
        both.append(_answered(answer, name)[0])
    return Row(line, gold=0, messages=both[0], rejected=both[1], tools=_tools(record), file=file)


def thumbs_row(line: int, record: dict[str, Any], file: str = "") -> Row:
    """Read a `completion` of a `prompt` with a person's verdict, `label` or `thumbs`.

    The phone app writes an `answer` that was `liked` instead.
    """
    name = next((name for name in ("label", "liked") if name in record), "thumbs")
    value = record.get(name)
    label = THUMBS.get(str(value).strip().lower())
    if label is None:
        raise BadRow(name, f"expected true or false, up or down; received {describe(value)}")
    completion = "completion"
    if name == "liked":
        completion = "answer"
    elif isinstance(record.get("prompt"), list) or isinstance(record.get("completion"), list):
        return replace(prompt_row(line, record, file), label=label)
    prompt = check_text(record.get("prompt"), "prompt")
    answer = check_text(record.get(completion), completion)
    messages = (("user", prompt), ("assistant", answer))
    return Row(line, ((f"{prompt.rstrip()}\n", answer),), messages=messages, label=label, file=file)


THUMBS = {
    **dict.fromkeys(("true", "up", "thumbs_up", "\N{THUMBS UP SIGN}"), "up"),
    **dict.fromkeys(("false", "down", "thumbs_down", "\N{THUMBS DOWN SIGN}"), "down"),
}


def turns_of(value: Any, name: str) -> tuple[Turn, ...]:
    """Read a list of turns with `role` and `content`, or `from` and `value`; a cell holds JSON.

    Raises:
        BadRow: it is not a list, or one of its turns is not valid.
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
    """Read a turn, with its other keys as they are unless they are null."""
    if not isinstance(turn, dict):
        raise BadRow(where, f"expected an object with role and content, received {describe(turn)}")
    key, content_key = "role", "content"
    if "from" in turn and "role" not in turn:
        key, content_key = "from", "value"
    path = f"{where}.{content_key}"
    known = turn.get(key)
    role = ROLES.get(str(known).lower())
    if role is None:
        reason = f"expected system, user, assistant or tool; received {describe(known)}"
        raise BadRow(f"{where}.{key}", reason)
    content = turn.get(content_key)
    read = (key, content_key, "tool_calls", "function_call")
    extra = {name: value for name, value in turn.items() if name not in read and value is not None}
    if known == "developer":
        extra["role"] = known
    check_weights(extra, where, role)
    if str(known).lower() in _CALLS:
        return role, "", {**extra, "tool_calls": _calls(content, path)}
    calls = turn.get("tool_calls")
    if not calls and turn.get("function_call"):
        calls = [turn["function_call"]]
    if calls and role != "assistant":
        reason = f"expected tool calls in turns of the assistant only, received role {role}"
        raise BadRow(f"{where}.tool_calls", reason)
    if calls:
        extra["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if content is None and (calls or any(extra.get(name) for name in REASONING)):
        content = ""
    if isinstance(content, list):
        content = _joined(content, path)
    may_be_empty = bool(calls) or role == "tool" or bool(set(REASONING) & set(extra))
    text = check_text(content, path, empty=may_be_empty)
    if extra:
        return role, text, extra
    return role, text


def _joined(parts: list[Any], where: str) -> str:
    """Join the text parts of a content, with a mark for a picture; other parts are refused."""
    texts = []
    for index, part in enumerate(parts):
        kind, text = None, part
        if isinstance(part, str):
            kind = "text"
        elif isinstance(part, dict):
            kind, text = part.get("type", "text"), part.get("text")
            if kind == "image" and _is_mark(part):
                texts.append(MARK)
                continue
        if kind not in ("text", "input_text", "output_text"):
            shown = describe(part if kind is None else kind)
            reason = f"expected a text part, received {shown}; a picture of the column images is "
            raise BadRow(f"{where}.{index}.type", f'{reason}{{"type": "image"}}')
        texts.append(check_text(text, f"{where}.{index}.text", empty=True))
    return "".join(texts)


def _is_mark(part: dict[str, Any]) -> bool:
    """Return True for the place of a picture that the column images holds."""
    return set(part) <= {"type", "text", "image"} and not (part.get("text") or part.get("image"))


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Read one tool call or a list, as objects or as JSON; arguments become an object."""
    value = _parsed(value, where)
    calls = []
    for index, item in enumerate(value if isinstance(value, list) else [value]):
        path = f"{where}.{index}"
        call = item.get("function", item) if isinstance(item, dict) else item
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            reason = f"expected a call with name and arguments, received {describe(item)}"
            raise BadRow(path, reason)
        key = "arguments" if "arguments" in call else "parameters"
        arguments = _parsed(call.get(key) or {}, f"{path}.arguments")
        if not isinstance(arguments, dict):
            reason = f"expected an object, received {describe(arguments)}"
            raise BadRow(f"{path}.arguments", reason)
        # The other keys of a call that is not wrapped go outside, next to its id.
        known = ("function", "name", "arguments", "parameters")
        outer = {name: value for name, value in item.items() if name not in known}
        function = {"name": call["name"], "arguments": arguments}
        if call is not item:
            inner = {name: call[name] for name in call if name not in outer and name != key}
            function = {**inner, **function}
        calls.append({**outer, "type": item.get("type", "function"), "function": function})
    return calls


def _tools(record: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Read `tools`, or `functions`, OpenAI's earlier name."""
    name = "tools" if record.get("tools") else "functions"
    tools = _parsed(record.get(name) or [], name)
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
    """Return the turns up to the assistant's last one, and a note if there are turns after it.

    Turns after it are neither trained on nor context. Somebody else has to speak first.
    """
    count = len(turns)
    while turns and turns[-1][0] != "assistant":
        turns = turns[:-1]
    if not turns:
        raise BadRow(name, "has no assistant turn to train on")
    if turns[0][0] == "assistant":
        raise BadRow(f"{name}.0.role", "expected system or user first, received assistant")
    if len(turns) < count:
        return turns, {f"{name} after the last answer": True}
    return turns, {}
