"""The responses to requests for completions, in OpenAI's format, complete or in pieces."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any


class Built:
    """The pieces of one response, with one or several choices.

    Args:
        chat: True for a conversation, False for texts.
        model: the name in the request.
        choices: texts of each prompt.
        probabilities: report those of the tokens.

    Attributes:
        texts: what each choice generated, by its index, as far as it was built.
    """

    def __init__(self, chat: bool, model: str, choices: int, probabilities: bool) -> None:
        self.chat = chat
        self.choices = choices
        self.probabilities = probabilities
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": name, "created": int(time.time()), "model": model}
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.texts: dict[int, str] = {}

    def count(self, index: int, first: dict[str, Any], end: dict[str, Any]) -> None:
        """Count the tokens of a choice by its first part and its end; each prompt counts once."""
        if index % self.choices == 0:
            self.prompt_tokens += first["prompt_tokens"]
        self.completion_tokens += end["completion_tokens"]

    @property
    def usage(self) -> dict[str, int]:
        """The counts."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Build the response to a request that does not stream."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage}

    def choice(
        self, index: int, first: dict[str, Any], text: str, tokens: list[dict[str, Any]],
        end: dict[str, Any],
    ) -> dict[str, Any]:  # fmt: skip
        """Build a choice from its text and the probabilities of its tokens."""
        self.texts[index] = text
        text = first.get("echo", "") + text
        if self.chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            content = {"text": text}
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs(tokens),
            "finish_reason": end["finish"],
        }

    def first(self, index: int, first: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the start of a streamed choice: whose turn it is, or the prompt."""
        if self.chat:
            delta = {"role": "assistant", "content": ""}
            yield self._chunk(index, {"delta": delta, "logprobs": None})
        elif first.get("echo"):
            yield self._chunk(index, {"text": first["echo"], "logprobs": None})

    def part(self, index: int, part: dict[str, Any]) -> dict[str, Any]:
        """Build the piece for a part."""
        text = part.get("text", "")
        self.texts[index] = self.texts.get(index, "") + text
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        return self._chunk(index, {**content, "logprobs": self._logprobs(tokens_of(part))})

    def last(self, index: int, end: dict[str, Any]) -> dict[str, Any]:
        """Build the piece that says why a choice ended."""
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk(index, {**content, "logprobs": None}, end["finish"])

    def counts(self) -> dict[str, Any]:
        """Build the piece with the counts."""
        return {**self._chunk(0, {}), "choices": [], "usage": self.usage}

    def _chunk(
        self, index: int, content: dict[str, Any], finish: str | None = None
    ) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk"
        choice = {"index": index, **content, "finish_reason": finish}
        return {**self.head, "object": kind, "choices": [choice]}

    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not self.probabilities:
            return None
        if self.chat:
            content = [
                {**_named(token), "top_logprobs": [_named(top) for top in token["top_logprobs"]]}
                for token in tokens
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [_by_text(token) for token in tokens],
            "text_offset": [token["offset"] for token in tokens],
        }


def tokens_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the tokens of a part, which are the prompt's or the text's."""
    return part.get("prompt") or part.get("tokens") or []


def _named(token: dict[str, Any]) -> dict[str, Any]:
    return {key: token[key] for key in ("token", "logprob", "bytes")}


def _by_text(token: dict[str, Any]) -> dict[str, float] | None:
    """Return the likeliest tokens and the token itself, as {text: probability}.

    Of two tokens with the same text the less likely one is named by its id, as in vLLM. The first
    token of a prompt has no probability.
    """
    if token["logprob"] is None:
        return None
    found: dict[str, float] = {}
    ids = set()
    for one in [*token["top_logprobs"], token]:
        if one["id"] not in ids:
            name = one["token"]
            if name in found:
                name = f"token_id:{one['id']}"
            found[name] = one["logprob"]
            ids.add(one["id"])
    return found
