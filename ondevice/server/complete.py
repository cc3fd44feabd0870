"""An answer as it grows, in the helper that holds the model: whole characters, stop words, probabilities."""

from __future__ import annotations

import signal
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError
from ondevice.generation.text import Text

if TYPE_CHECKING:
    from ondevice.generation.sample import Token
    from ondevice.models import LoadedModel

_stopped = False
"""Set by the signal that the daemon sends when nobody reads the answer any more."""


def listen_for_stop() -> None:
    """Take `STOP` as the end of the present answer, not of the process."""

    def stop(number: int, frame: object) -> None:
        global _stopped
        _stopped = True

    signal.signal(STOP, stop)


STOP = signal.SIGUSR1


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
    """Answer; yield `{"prompt_tokens": n}`, then parts with `text` and `tokens`, and return how it ended.

    Args:
        prompt: text to continue, the messages of a chat, or token ids.
        max_new_tokens: None for as many as the model takes.
        stop: texts that end the answer, and are no part of it.
        top: how many likeliest tokens to report with each; None for no probabilities at all.
        model, adapter, artifact, job: as `server.generate.answer` takes them.

    Returns:
        `finish` ("stop", "length", or "cancelled"), `completion_tokens`.

    Raises:
        BusyError: the model does not fit beside the job.
        ConfigError: the prompt and the answer are longer than the model takes.
        ModelError: messages for a model without a chat template.
    """
    global _stopped
    from ondevice.artifact.adapter import load_adapter
    from ondevice.generation.generate import prompt_ids
    from ondevice.generation.sample import sample
    from ondevice.nn.adapters import adapted
    from ondevice.server.generate import hold

    _stopped = False
    loaded = hold(model, artifact, len(str(prompt)) + (max_new_tokens or 0), job)
    is_ids = isinstance(prompt, list) and all(isinstance(item, int) for item in prompt)
    ids: list[int] = _checked(loaded, prompt) if is_ids else list(prompt_ids(loaded, prompt))  # type: ignore[arg-type]
    room = loaded.dims.max_positions - len(ids)
    if room < (max_new_tokens or 1):
        raise ConfigError(
            "the prompt and its answer are longer than the model takes",
            expected=f"at most {loaded.dims.max_positions} tokens",
            received=f"{len(ids)} tokens of prompt and {max_new_tokens or 1} of answer",
            hint="ask less, or lower max_tokens",
        )
    yield {"prompt_tokens": len(ids)}
    parts, count = _Parts(loaded, stop, top is not None), 0
    with nullcontext() if adapter is None else adapted(loaded, load_adapter(Path(adapter))):
        for token in sample(
            loaded, ids, max_new_tokens=max_new_tokens or room, temperature=temperature, top_p=top_p, seed=seed,
            top=top or 0,
        ):  # fmt: skip
            count += 1
            if token.ends or _stopped:
                break
            if part := parts.add(token):
                yield part
            if parts.text.stopped:
                break
        else:
            yield parts.rest()
            return {"finish": "length", "completion_tokens": count}
    if _stopped:
        return {"finish": "cancelled", "completion_tokens": count}
    if not parts.text.stopped:
        yield parts.rest()
    return {"finish": "stop", "completion_tokens": count}


def _checked(loaded: LoadedModel, ids: Any) -> list[int]:
    if not ids or not all(0 <= number < loaded.dims.vocab for number in ids):
        expected = f"ids from 0 to {loaded.dims.vocab - 1}"
        raise ConfigError("a prompt of token ids", expected=expected, received=str(ids)[:80])
    return list(ids)


class _Parts:
    """The parts of an answer: its text as it becomes certain, and the tokens that end in it."""

    def __init__(self, loaded: LoadedModel, stop: Sequence[str], probabilities: bool) -> None:
        self.tokenizer, self.text, self.probabilities = (
            loaded.tokenizer,
            Text(loaded.tokenizer, stop),
            probabilities,
        )
        self.waiting: list[tuple[int, dict[str, Any]]] = []

    def add(self, token: Token) -> dict[str, Any] | None:
        """Take a token; return a part to send, or None while nothing is certain."""
        new = self.text.add(token.id)
        if self.probabilities:
            self.waiting.append((len(self.text.decode()), self._entry(token)))
        part = self._part(new)
        return part if part["text"] or part["tokens"] else None

    def rest(self) -> dict[str, Any]:
        """Return what was held back."""
        return self._part(self.text.rest(), every=True)

    def _part(self, new: str, every: bool = False) -> dict[str, Any]:
        tokens = [entry for end, entry in self.waiting if every or end <= self.text.given]
        self.waiting = self.waiting[len(tokens) :]
        return {"text": new, "tokens": tokens}

    def _entry(self, token: Token) -> dict[str, Any]:
        """Return a token's probability as OpenAI's clients read it."""
        own = self._named(token.id, token.log_probability)
        return own | {"top_logprobs": [self._named(number, value) for number, value in token.top]}

    def _named(self, number: int, value: float) -> dict[str, Any]:
        text = str(self.tokenizer.decode([number]))
        return {"token": text, "logprob": value, "bytes": list(text.encode("utf-8", "replace"))}
