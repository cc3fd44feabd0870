"""A completion in the process that holds the model: its row of the batch, and parts with text, and
with probabilities on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ondevice.core.errors import ConfigError
from ondevice.generation.batch import Row, Step
from ondevice.generation.generator import Generator
from ondevice.generation.prompt import prompt_ids
from ondevice.generation.sample import Sampler, Sampling, Token
from ondevice.generation.text import Part, Text
from ondevice.generation.token_bytes import TokenBytes, token_bytes
from ondevice.server.engine.echo import echoed

LEAST = -9999.0
"""The least logarithm that JSON is told, as in OpenAI's API."""

ASSUMED_TOKENS = 2048
"""Tokens of a text without a limit of its own, when memory is shared out."""


class Completion:
    """A text that is generated, and how it ends.

    Args:
        generator: of the model; it frames prompts and ends texts as the training did.
        vocab: how many tokens the model has.
        prompt: text to continue, the messages of a chat, or token ids.
        max_new_tokens: None for as many as the model takes; 0 only reads the prompt.
        stop: texts that end the generated text, and are not part of it.
        top: how many likeliest tokens to report with each; None for no probabilities at all.
        echo: return the prompt, too, and its probabilities if `top` is not None.
        stop_token_ids: tokens that end the text, in addition to the model's own.
        ignore_eos: the model's own do not end it.
        logit_bias: added to logits, by token id.
        sampling: other fields of `Sampling`.

    Attributes:
        row: of the batch that generates it.
        tokens: that it is expected to have at most, with its prompt.

    Raises:
        ConfigError: the prompt and the completion are longer than the model takes, or it does not
            have a token.
        ModelError: messages for a model without a chat template.
    """

    def __init__(
        self,
        generator: Generator,
        vocab: int,
        *,
        prompt: str | list[dict[str, str]] | list[int],
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        top: int | None = None,
        echo: bool = False,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logit_bias: Mapping[str, float] | None = None,
        **sampling: Any,
    ) -> None:
        self.top = top
        self._bytes = token_bytes(generator.tokenizer)
        ids = _prompt_ids(generator, vocab, prompt)
        context = generator.model.context_tokens
        room = context - len(ids)
        wanted = max_new_tokens
        if wanted is None:
            wanted = max(1, room)
        if room < wanted:
            raise ConfigError(
                "the prompt and its completion are longer than the model takes",
                expected=f"at most {context} tokens",
                received=f"{len(ids)} tokens of prompt and {wanted} of completion",
                hint="shorten the prompt, or lower max_tokens",
            )
        _check_ids(vocab, "stop_token_ids", stop_token_ids)
        bias = {int(number): value for number, value in (logit_bias or {}).items()}
        _check_ids(vocab, "logit_bias", [*bias])
        ends = frozenset(stop_token_ids)
        if not ignore_eos:
            ends |= generator.end_tokens
        self.tokens = len(ids) + wanted
        if max_new_tokens is None:
            self.tokens = len(ids) + min(wanted, ASSUMED_TOKENS)
        sampler = Sampler(Sampling(logit_bias=bias, **sampling), ids, ends, top or 0)
        self.row = Row(ids, sampler, wanted, top if echo else None)
        self.text = Text(generator.tokenizer, stop)
        self._echo: str | None = None
        self._offsets: list[int] = []
        if echo:
            self._echo, self._offsets = echoed(generator.tokenizer, prompt, ids)
        self._reported = 0

    def first(self) -> dict[str, Any]:
        """Return the first part."""
        first: dict[str, Any] = {"prompt_tokens": len(self.row.prompt)}
        if self._echo is not None:
            first["echo"] = self._echo
        return first

    def take(self, step: Step) -> Iterator[dict[str, Any]]:
        """Yield the parts that a step has made certain; `text.is_done` after the last one."""
        if step.prompt:
            begin = self._reported
            self._reported += len(step.prompt)
            offsets = self._offsets[begin : self._reported]
            yield {"prompt": self._entries(step.prompt, offsets)}
        if step.token is not None:
            yield from self._shown(self.text.take(step.token))
        if step.row.is_done and not self.text.is_done:
            yield from self._shown(self.text.rest())

    def end(self) -> dict[str, Any]:
        """Return how it ended."""
        ending = self.text.ending
        return {"finish": ending.finish, "completion_tokens": ending.tokens}

    def _shown(self, part: Part) -> Iterator[dict[str, Any]]:
        entries = []
        if self.top is not None:
            begin = len(self._echo or "")
            entries = self._entries(part.tokens, [begin + offset for offset in part.offsets])
        if part.text or entries:
            yield {"text": part.text, "tokens": entries}

    def _entries(self, tokens: Sequence[Token], offsets: Sequence[int]) -> list[dict[str, Any]]:
        return [
            entry(self._bytes, token) | {"offset": offset}
            for token, offset in zip(tokens, offsets, strict=True)
        ]


def _prompt_ids(generator: Generator, vocab: int, prompt: Any) -> list[int]:
    """Return the prompt's token ids; ConfigError if ids are given that the model does not have."""
    if not isinstance(prompt, list) or not all(isinstance(item, int) for item in prompt):
        return list(prompt_ids(generator.tokenizer, prompt, generator.source))
    _check_ids(vocab, "prompt", prompt)
    if not prompt:
        raise ConfigError("'prompt' is empty", expected="at least one token")
    return prompt


def _check_ids(vocab: int, name: str, ids: Sequence[int]) -> None:
    wrong = [number for number in ids if not 0 <= number < vocab]
    if wrong:
        expected = f"token ids from 0 to {vocab - 1}"
        raise ConfigError(f"'{name}'", expected=expected, received=wrong[0])


def entry(own: TokenBytes, token: Token) -> dict[str, Any]:
    """Return a token with its probability and the likeliest ones.

    `token` is its text, or `bytes:\\xe9...` if its bytes are not complete characters.
    """

    def named(number: int, value: float | None) -> dict[str, Any]:
        content = own.of(number)
        try:
            text = content.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
        if value is not None:
            value = max(value, LEAST)
        return {"id": number, "token": text, "logprob": value, "bytes": [*content]}

    likeliest = [named(number, value) for number, value in token.top]
    return named(token.id, token.log_probability) | {"top_logprobs": likeliest}
