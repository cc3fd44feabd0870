"""Chat rows as examples, through the tokenizer's own template: the tokens of the assistant's turns are trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ondevice.core.errors import MissingPackageError, ModelError
from ondevice.data.encode import IGNORE, Example, Item, check_fit
from ondevice.data.rows import AnswerTooLong, BadRow, Row, Turn


def chat_item(row: Row, tokenizer: Any, limit: int, train_on_prompt: bool) -> Item:
    """Encode a chat row. To fit, whole turns go, from the oldest after the system turn; the last exchange stays whole.
    The rejected answer of a preference pair is a candidate, behind the same turns."""
    system, begin = int(row.messages[0][0] == "system"), 0
    users = [index for index, turn in enumerate(row.messages) if turn[0] == "user" and index > system]
    both = [row.messages, row.rejected] if row.rejected else [row.messages]
    rendered = [render_chat(tokenizer, turns, row.tools) for turns in both]
    full = max(len(ids) for ids, _, _ in rendered)
    while max(len(ids) for ids, _, _ in rendered) > limit:
        begin = next((index for index in users if index > begin), 0)
        if not begin:
            ids, _, start = rendered[0]
            check_fit(len(ids) - start, limit, start, full)
            reason = f"the last turns have {len(ids)} tokens; with max_length_tokens={limit} they do not fit whole"
            raise AnswerTooLong(reason, full)
        rendered = [render_chat(tokenizer, turns[:system] + turns[begin:], row.tools) for turns in both]
    examples = []
    for ids, trained, _ in rendered:
        if not any(trained[1:]):
            raise BadRow("messages", "no assistant turn has a token that can be trained on")
        labels = ids if train_on_prompt else [i if t else IGNORE for i, t in zip(ids, trained, strict=True)]
        examples.append(Example(tuple(ids), tuple(labels)))
    lost = full - max(len(example) for example in examples)
    candidates, gold = (tuple(examples), 0) if row.rejected else ((), None)
    return Item(examples[0], candidates, gold, line=row.line, file=row.file, prompt_tokens=rendered[0][2],
                dropped_tokens=lost)  # fmt: skip


def render_chat(
    tokenizer: Any, messages: Sequence[Turn], tools: Sequence[dict[str, Any]] = ()
) -> tuple[list[int], list[bool], int]:
    """Tokenize a conversation that ends with an assistant turn and begins with another one; return (ids, trained,
    start).

    Tools and their calls go to the template. To one that knows none, they are written as text: the tools in the system
    turn, a call as JSON between <tool_call> tags (Hermes' form, which Qwen and SmolLM2 were trained on).

    `trained[t]` is True for the tokens of every assistant turn: from where the template asks for the
    answer to the end-of-turn token. `start` is the first token of the last assistant turn.

    The template is rendered up to each assistant turn and including it; both texts have to be beginnings
    of the whole conversation, which also is what a model sees when it answers.

    Raises:
        BadRow: the template refuses the turns, or rewrites earlier turns when later ones follow.
        MissingPackageError: jinja2 is not installed.
    """
    turns = [{"role": turn[0], "content": turn[1], **(turn[2] if len(turn) > 2 else {})} for turn in messages]
    if tools or any(len(turn) > 2 for turn in messages):
        turns, tools = _tool_turns(tokenizer, turns, list(tools))
    text = _render(tokenizer, turns, tools, False)
    spans = []
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            before = _render(tokenizer, turns[:index], tools, True)
            after = text if index == len(turns) - 1 else _render(tokenizer, turns[: index + 1], tools, False)
            if not (after.startswith(before) and text.startswith(after)):
                reason = "the tokenizer's chat template rewrites earlier turns; write one answer a row"
                raise BadRow("messages", reason)
            spans.append((len(before), _answer_end(tokenizer, after)))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    trained = [any(_covers(left, right, span) for span in spans) for left, right in offsets]
    last = [index for index, (left, right) in enumerate(offsets) if _covers(left, right, spans[-1])]
    if not last:
        raise BadRow("messages", "the tokenizer's chat template drops the last assistant turn")
    end = last[-1] + 1  # what templates put behind the last end-of-turn token teaches nothing
    return list(encoded["input_ids"])[:end], trained[:end], last[0]


def _covers(left: int, right: int, span: tuple[int, int]) -> bool:
    """True if the token at text[left:right] overlaps the span; one without width has the width of its place."""
    return left < span[1] and max(right, left + 1) > span[0]


def _answer_end(tokenizer: Any, text: str) -> int:
    """Return the end of the turn without the white space that templates put behind the end-of-turn token."""
    bare = text.rstrip()
    ends = (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab())
    return len(bare) if bare.endswith(ends) else len(text)


def _tool_turns(
    tokenizer: Any, turns: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return turns and tools as the template takes them: as they are, or written out."""
    template = tokenizer.chat_template
    template = "".join(template.values()) if isinstance(template, dict) else template
    if "tool_calls" in template and (not tools or "tools" in template):
        return turns, tools
    written = []
    for turn in turns:
        calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn.get("tool_calls", ())]
        parts = [turn["content"], *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        written.append({"role": turn["role"], "content": "\n".join(part for part in parts if part)})
    if tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        named = f"You may call these functions:\n<tools>\n{listed}\n</tools>"
        if written[0]["role"] == "system":
            written[0]["content"] += f"\n\n{named}"
        else:
            written.insert(0, {"role": "system", "content": named})
    return written, []


def apply_template(tokenizer: Any, turns: Sequence[Any], **named: Any) -> str:
    """Render turns by the tokenizer's chat template, under the limits of `sandbox`; whoever renders calls this.

    Args:
        named: as for `apply_chat_template`.

    Raises:
        MissingPackageError: jinja2 is not installed.
        ModelError: the template would take too much memory or time.
    """
    try:
        from ondevice.data import sandbox

        sandbox.install()
    except ImportError:
        hint = "pip install jinja2"
        raise MissingPackageError("chat templates need the package 'jinja2'", hint=hint) from None
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **named))
    except sandbox.TemplateLimitError as error:
        raise ModelError(
            "the model's chat template takes too much to render", expected="a template that writes the turns",
            received=str(error), hint="take the tokenizer of the model's own publisher",
        ) from None  # fmt: skip


def _render(tokenizer: Any, turns: list[dict[str, Any]], tools: Sequence[dict[str, Any]], ask: bool) -> str:
    named = {"tools": list(tools)} if tools else {}
    try:
        return apply_template(tokenizer, turns, add_generation_prompt=ask, **named)
    except (MissingPackageError, ModelError):
        raise
    except Exception as error:  # a template is a program of its own and raises what it likes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BadRow("messages", f"the tokenizer's chat template refuses the turns: {reason}") from None
