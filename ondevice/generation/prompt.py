"""The tokens of a prompt, and the tokens that end the generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError, ModelError
from ondevice.data.rows import BadRow
from ondevice.data.tasks import literal
from ondevice.data.tasks.chat_template import apply_template

if TYPE_CHECKING:
    from ondevice.models import LoadedModel

Messages = list[dict[str, str]]
_MARK = "\u2603"
"""Stands for a reply when the template is asked what follows one."""


def prompt_ids(
    tokenizer: Any, prompt: str | Messages | tuple[int, ...], source: str
) -> Sequence[int]:
    """Tokenize a text, or a chat up to where the reply begins; a tuple of tokens stays.

    Special tokens in a text are special tokens; in a message they are text.

    Args:
        prompt: plain text, or `[{"role": "user", "content": "..."}, ...]` for the chat template.
        source: names the model in errors.

    Raises:
        ModelError: messages for a model without a chat template.
        ConfigError: the prompt is empty, or a text of it cannot be encoded.
    """
    ids: Sequence[int]
    if isinstance(prompt, tuple):
        ids = prompt
    elif isinstance(prompt, str):
        _check_unicode(prompt)
        ids = tokenizer(prompt)["input_ids"]
    elif not tokenizer.chat_template:
        raise ModelError(
            f"{source} has no chat template",
            received="messages",
            hint="give the prompt as plain text",
        )
    else:
        try:
            turns = literal.hide(tokenizer, prompt)
            text = apply_template(tokenizer, turns, add_generation_prompt=True)
            _check_unicode(text)
            ids = literal.encode(tokenizer, text).ids
        except BadRow as error:
            raise ConfigError("messages", received=error.reason) from None
    if not ids:
        raise ConfigError("the prompt is empty", expected="at least one token")
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            "a text holds half a surrogate pair",
            expected="valid UTF-8; JSON has two \\u escapes for a character beyond U+FFFF",
            received=ascii(text[max(0, error.start - 10) : error.end + 10]),
        ) from None


def model_end_tokens(loaded: LoadedModel) -> frozenset[int]:
    """Return the tokens at which the model's own generation stops."""
    stops: Any = loaded.model.generation_config.eos_token_id
    if stops is None:
        stops = loaded.tokenizer.eos_token_id
    if isinstance(stops, int):
        stops = [stops]
    return frozenset(stops or ())


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the end of a text, and the special token that the chat template puts after a reply."""
    ends = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}]
        text = apply_template(tokenizer, turns)
        after = tokenizer(text.rpartition(_MARK)[2], add_special_tokens=False)["input_ids"]
        ends |= set(after[:1]) & set(tokenizer.all_special_ids)
    return frozenset(ends)
