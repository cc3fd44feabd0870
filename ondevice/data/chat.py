"""Chat rows through the tokenizer's own template, with the tokens of the assistant's turns marked."""

from __future__ import annotations

from typing import Any

from ondevice.core.errors import MissingPackageError
from ondevice.data.rows import BadRow

Turns = list[tuple[str, str]]


def render_chat(tokenizer: Any, messages: Turns) -> tuple[list[int], list[bool], int]:
    """Tokenize a conversation that ends with an assistant turn and begins with another one; return (ids, trained,
    start).

    `trained[t]` is True for the tokens of every assistant turn: from where the template asks for the
    answer to the end-of-turn token. `start` is the first token of the last assistant turn.

    The template is rendered up to each assistant turn and including it; both texts have to be beginnings
    of the whole conversation, which also is what a model sees when it answers.

    Raises:
        BadRow: the template refuses the turns, or rewrites earlier turns when later ones follow.
        MissingPackageError: jinja2 is not installed.
    """
    text = _render(tokenizer, messages, False)
    spans = []
    for index, (role, _) in enumerate(messages):
        if role == "assistant":
            before = _render(tokenizer, messages[:index], True)
            after = text if index == len(messages) - 1 else _render(tokenizer, messages[: index + 1], False)
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


def _render(tokenizer: Any, messages: Turns, ask: bool) -> str:
    turns = [{"role": role, "content": content} for role, content in messages]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=ask)
    except ImportError:
        hint = "pip install jinja2"
        raise MissingPackageError("chat templates need the package 'jinja2'", hint=hint) from None
    except Exception as error:  # a template is a program of its own and raises what it likes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BadRow("messages", f"the tokenizer's chat template refuses the turns: {reason}") from None
