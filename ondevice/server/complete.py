"""Generate in the helper that holds the model: parts with text, and with probabilities on
request."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError
from ondevice.generation.prompt import prompt_ids
from ondevice.generation.text import Ending, parts
from ondevice.server import interrupt
from ondevice.server.generate import hold, trained_generator

if TYPE_CHECKING:
    from ondevice.generation.sample import Token
    from ondevice.models import LoadedModel


def complete(
    model: str | None,
    adapter: str | None,
    prompt: str | list[dict[str, str]] | list[int],
    max_new_tokens: int | None,
    temperature: float,
    top_p: float,
    seed: int | None,
    stop: list[str],
    top: int | None,
    artifact: str | None = None,
    job: dict[str, Any] | None = None,
) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Generate; yield `{"prompt_tokens": n}`, then parts with `text` and `tokens`, and return how
    it ended.

    Args:
        prompt: text to continue, the messages of a chat, or token ids.
        max_new_tokens: None for as many as the model takes.
        stop: texts that end the generated text, and are not part of it.
        top: how many likeliest tokens to report with each; None for no probabilities at all.
        model, adapter, artifact, job: as for `server.generate.generate_both`.

    Returns:
        `finish` ("stop", "length", or "cancelled"), `completion_tokens`.

    Raises:
        BusyError: the model does not fit next to the job.
        ConfigError: the prompt and the completion are longer than the model takes.
        ModelError: messages for a model without a chat template.
    """
    interrupt.stopped = False
    loaded = hold(model, artifact, len(str(prompt)) + (max_new_tokens or 0), job)
    place = adapter or artifact or model
    generator = trained_generator(loaded, None if place is None else Path(place))
    ids = _prompt_ids(loaded, generator.tokenizer, prompt)
    room = loaded.dims.max_positions - len(ids)
    if room < (max_new_tokens or 1):
        raise ConfigError(
            "the prompt and its completion are longer than the model takes",
            expected=f"at most {loaded.dims.max_positions} tokens",
            received=f"{len(ids)} tokens of prompt and {max_new_tokens or 1} of completion",
            hint="shorten the prompt, or lower max_tokens",
        )
    yield {"prompt_tokens": len(ids)}
    ending = Ending()
    if adapter is not None:
        generator.use(Path(adapter))
    try:
        drawn = generator.tokens(
            ids, max_new_tokens=max_new_tokens or room, temperature=temperature, top_p=top_p,
            seed=seed, top=top or 0,
        )  # fmt: skip
        unstopped = itertools.takewhile(lambda token: not interrupt.stopped, drawn)
        for part in parts(unstopped, loaded.tokenizer, stop, ending):
            if interrupt.stopped:
                break
            entries = []
            if top is not None:
                entries = [_entry(loaded, token) for token in part.tokens]
            if part.text or entries:
                yield {"text": part.text, "tokens": entries}
    finally:
        generator.use(None)  # the model stays loaded for the next request
    finish = ending.finish
    if interrupt.stopped:
        finish = "cancelled"
    return {"finish": finish, "completion_tokens": ending.tokens}


def _prompt_ids(loaded: LoadedModel, tokenizer: Any, prompt: Any) -> list[int]:
    """Return the prompt's token ids; ConfigError if ids are given that the model does not have."""
    if not isinstance(prompt, list) or not all(isinstance(item, int) for item in prompt):
        return list(prompt_ids(tokenizer, prompt, loaded.source.source))
    if not prompt or not all(0 <= number < loaded.dims.vocab for number in prompt):
        expected = f"ids from 0 to {loaded.dims.vocab - 1}"
        raise ConfigError("a prompt of token ids", expected=expected, received=str(prompt)[:80])
    return prompt


def _entry(loaded: LoadedModel, token: Token) -> dict[str, Any]:
    """Return a token's probability as OpenAI's clients read it."""

    def named(number: int, value: float) -> dict[str, Any]:
        text = str(loaded.tokenizer.decode([number]))
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}

    likeliest = [named(number, value) for number, value in token.top]
    return named(token.id, token.log_probability) | {"top_logprobs": likeliest}
