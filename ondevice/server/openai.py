"""Requests and responses in OpenAI's format: bodies of requests, and the pieces of responses.

A field that would change the generated text but is not supported is refused. Other unknown fields
are ignored, because clients send many.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.server.schemas import ErrorResponse

TOP = 20
"""Most alternatives reported for a token."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "echo": (None, False),
}
"""Unsupported fields, with the values that mean nothing."""


class StreamOptions(BaseModel):
    """Options of a streamed response."""

    include_usage: bool = False


class CompletionRequest(Documented):
    """The fields of both kinds of request."""

    model_config = ConfigDict(extra="allow")

    model: str = Field(min_length=1, max_length=200)
    """A model, adapter or artifact of GET /v1/models. An adapter is used with its base model."""
    adapter: str | None = Field(default=None, max_length=64)
    """An adapter for a base model in `model`; not in OpenAI's API."""
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 always takes the likeliest token; None is 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = Field(default=None, max_length=1000)
    """Texts that end the generation, at most four."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Raise ConfigError for an unsupported field."""
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value not in _REFUSED[name]:
                raise ConfigError(
                    f"'{name}' is not supported", expected=_REFUSED[name][-1], received=value
                )
        if len(self.stops) > 4 or not all(self.stops):
            raise ConfigError(
                "'stop'", expected="at most four texts, none empty", received=self.stop
            )

    @property
    def stops(self) -> list[str]:
        """Texts that end the generation."""
        if isinstance(self.stop, str):
            return [self.stop]
        return list(self.stop or ())

    def options(self) -> dict[str, Any]:
        """Return the arguments of `server.complete.complete`, without the prompt and the model."""
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "seed": self.seed if self.seed is None else self.seed % 2**63,
            "stop": self.stops,
        }


class Part(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str = Field(max_length=100_000)


class ChatMessage(BaseModel):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] = Field(max_length=100_000)

    def plain(self) -> dict[str, str]:
        """Return the turn for a chat template."""
        if isinstance(self.content, str):
            text = self.content
        else:
            text = "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(CompletionRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """The newer name of `max_tokens`; None for both means as many as the model takes."""
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP)

    def asked(self) -> dict[str, Any]:
        """Return the arguments of `server.complete.complete`, without the model."""
        self.check()
        top = None
        if self.logprobs:
            top = self.top_logprobs or 0
        most = self.max_completion_tokens or self.max_tokens
        messages = [message.plain() for message in self.messages]
        return {"prompt": messages, "max_new_tokens": most, "top": top, **self.options()}


class TextRequest(CompletionRequest):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(max_length=100_000)
    """A text or its token ids; several prompts are refused."""
    max_tokens: int | None = Field(default=16, ge=1, le=1 << 20)
    logprobs: int | None = Field(default=None, ge=0, le=TOP)

    def asked(self) -> dict[str, Any]:
        """Return the arguments of `server.complete.complete`, without the model."""
        self.check()
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) != 1:
                raise ConfigError(
                    "'prompt'", expected="one prompt per request", received=f"{len(prompt)} prompts"
                )
            prompt = prompt[0]
        return {
            "prompt": prompt,
            "max_new_tokens": self.max_tokens or 16,
            "top": self.logprobs,
            **self.options(),
        }


class Completion:
    """The pieces of one response, complete or streamed.

    Args:
        chat: True for a conversation, False for a text.
        model: the name in the request.
        prompt_tokens: number of tokens of the prompt.
        probabilities: report those of the tokens.
    """

    def __init__(self, chat: bool, model: str, prompt_tokens: int, probabilities: bool) -> None:
        self.chat = chat
        self.prompt_tokens = prompt_tokens
        self.probabilities = probabilities
        self.offset = 0
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = {"id": name, "created": int(time.time()), "model": model}

    def whole(self, parts: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
        """Build the response to a request that does not stream."""
        text = "".join(part["text"] for part in parts)
        tokens = [token for part in parts for token in part["tokens"]]
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self.chat
            else {"text": text}
        )
        choice = {
            "index": 0,
            **content,
            "logprobs": self._logprobs(tokens),
            "finish_reason": end["finish"],
        }
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion"
        return {**self.head, "object": kind, "choices": [choice], "usage": self._usage(end)}

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the start of a streamed response: whose turn it is."""
        if self.chat:
            yield self._chunk(
                {"delta": {"role": "assistant", "content": ""}, "logprobs": None}, None
            )

    def part(self, part: dict[str, Any]) -> dict[str, Any]:
        """Build the piece for a part."""
        content = {"delta": {"content": part["text"]}} if self.chat else {"text": part["text"]}
        return self._chunk({**content, "logprobs": self._logprobs(part["tokens"])}, None)

    def last(self, end: dict[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
        """Yield why the generation ended, and its counts if requested."""
        content = {"delta": {}} if self.chat else {"text": ""}
        yield self._chunk({**content, "logprobs": None}, end["finish"])
        if usage:
            yield {**self._chunk({}, None), "choices": [], "usage": self._usage(end)}

    def _chunk(self, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk"
        return {
            **self.head,
            "object": kind,
            "choices": [{"index": 0, **content, "finish_reason": finish}],
        }

    def _usage(self, end: dict[str, Any]) -> dict[str, int]:
        generated = end["completion_tokens"]
        total = self.prompt_tokens + generated
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": total,
        }

    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not self.probabilities:
            return None
        if self.chat:
            return {"content": tokens, "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self.offset)
            self.offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens
            ],
            "text_offset": offsets,
        }


class Refusal(ErrorResponse):
    """An `ErrorResponse` in OpenAI's format."""

    type: Literal["invalid_request_error", "server_error"]
    code: str
    param: None = None


class RefusalResponse(BaseModel):
    """The body of a refused request."""

    error: Refusal


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": RefusalResponse, "description": "Refused, in OpenAI's format."}
}
"""The responses of all paths in OpenAI's format."""
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/files",
    "/v1/fine_tuning",
    "/v1/predict",
    "/v1/responses",
)
"""Paths whose errors have OpenAI's format, with all paths below them."""


def error_fields(error: OndeviceError) -> dict[str, Any]:
    """Convert an error to the fields of `ErrorResponse`."""
    values = error.to_dict()
    public = (kind for kind in type(error).__mro__ if kind.__module__ == OndeviceError.__module__)
    values["error"] = next(public).__name__
    values["hint"] = values.pop("try")
    del values["exit_code"]
    if problems := getattr(error, "problems", None):
        values["problems"] = problems[:100]
    return values


def error_body(
    status: int, values: dict[str, Any], missing: str = "model_not_found"
) -> dict[str, Any]:
    """Convert an `ErrorResponse` to OpenAI's format; `missing` is the code of a status 404."""
    kind = "invalid_request_error"
    if status >= 500:
        kind = "server_error"
    code = missing
    if status != 404:
        code = values["error"]
    parts = [str(values["message"])]
    for word in ("expected", "received"):
        if values.get(word) is not None:
            parts.append(f"{word}: {values[word]}")
    if values.get("hint"):
        parts.append(f"try: {values['hint']}")
    own = {"message": "; ".join(parts), "type": kind, "code": code, "param": None}
    return {"error": {**values, **own}}


def error_for(path: str, status: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return an `ErrorResponse` in the format that the clients of a path read."""
    if path not in PATHS and not path.startswith(tuple(f"{start}/" for start in PATHS)):
        return values
    missing = "model_not_found"
    if path.startswith(("/v1/files", "/v1/fine_tuning")):
        missing = "not_found"
    return error_body(status, values, missing)
