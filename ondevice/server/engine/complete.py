"""A completion in the process that holds the model: its row of the batch, and parts with text, and
with probabilities on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ondevice.core.errors import ConfigError
from ondevice.generation.batch import Row, Step
from ondevice.generation.generator import Generator
from ondevice.generation.prompt import prompt_ids
from ondevice.generation.sample import Sampler, Sampling, Token
from ondevice.generation.text import Part, Text
from ondevice.models import LoadedModel


class Completion:
    """A text that is generated, and how it ends.

    Args:
        generator: of the model; it frames prompts and ends texts as the training did.
        prompt: text to continue, the messages of a chat, or token ids.
        max_new_tokens: None for as many as the model takes; 0 only reads the prompt.
        stop: texts that end the generated text, and are not part of it.
        top: how many likeliest tokens to report with each; None for no probabilities at all.
        prompt_top: the same for the tokens of the prompt.
        sampling: fields of `Sampling`.

    Attributes:
        row: of the batch that generates it.

    Raises:
        ConfigError: the prompt and the completion are longer than the model takes.
        ModelError: messages for a model without a chat template.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        generator: Generator,
        *,
        prompt: str | list[dict[str, str]] | list[int],
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        top: int | None = None,
        prompt_top: int | None = None,
        **sampling: Any,
    ) -> None:
        self.loaded = loaded
        self.top = top
        ids = _prompt_ids(loaded, generator.tokenizer, prompt)
        room = loaded.dims.max_positions - len(ids)
        wanted = max_new_tokens
        if wanted is None:
            wanted = max(1, room)
        if room < wanted:
            raise ConfigError(
                "the prompt and its completion are longer than the model takes",
                expected=f"at most {loaded.dims.max_positions} tokens",
                received=f"{len(ids)} tokens of prompt and {wanted} of completion",
                hint="shorten the prompt, or lower max_tokens",
            )
        sampler = Sampler(Sampling(**sampling), ids, generator.end_tokens, top or 0)
        self.row = Row(ids, sampler, wanted, prompt_top)
        self.text = Text(loaded.tokenizer, stop)

    @property
    def tokens(self) -> int:
        """Tokens that it may still add to the cache, at most."""
        return len(self.row.prompt) + self.row.max_new_tokens - self.row.read

    def first(self) -> dict[str, Any]:
        """Return the first part."""
        return {"prompt_tokens": len(self.row.prompt)}

    def take(self, step: Step) -> Iterator[dict[str, Any]]:
        """Yield the parts that a step has made certain; `text.is_done` after the last one."""
        if step.prompt:
            yield {"prompt": [entry(self.loaded, token) for token in step.prompt]}
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
            entries = [entry(self.loaded, token) for token in part.tokens]
        if part.text or entries:
            yield {"text": part.text, "tokens": entries}


def _prompt_ids(loaded: LoadedModel, tokenizer: Any, prompt: Any) -> list[int]:
    """Return the prompt's token ids; ConfigError if ids are given that the model does not have."""
    if not isinstance(prompt, list) or not all(isinstance(item, int) for item in prompt):
        return list(prompt_ids(tokenizer, prompt, loaded.source.source))
    if not prompt or not all(0 <= number < loaded.dims.vocab for number in prompt):
        expected = f"ids from 0 to {loaded.dims.vocab - 1}"
        raise ConfigError("a prompt of token ids", expected=expected, received=str(prompt)[:80])
    return prompt


def entry(loaded: LoadedModel, token: Token) -> dict[str, Any]:
    """Return a token's probability as OpenAI's clients read it."""

    def named(number: int, value: float | None) -> dict[str, Any]:
        text = str(loaded.tokenizer.decode([number]))
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}

    likeliest = [named(number, value) for number, value in token.top]
    return named(token.id, token.log_probability) | {"top_logprobs": likeliest}
