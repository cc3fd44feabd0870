"""The bodies of requests for completions, in OpenAI's format.

Every field is obeyed or refused by its name. A field that nobody knows is refused, too, unless the
daemon allows it: a client that sends one believes that it is obeyed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ondevice.core.config import Documented
from ondevice.core.errors import ConfigError
from ondevice.server.fields import AT_ONCE, at_most

TOP = 20
"""Most alternatives reported for a token."""
CHOICES = 128
"""Most texts of one request: its prompts times `n`."""
MOST_PROBABILITIES = 1 << 18
"""Most probabilities in a response that is not streamed, alternatives included: some 100 MiB."""
ALLOW = "--allow-unknown-fields"
_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "reasoning_effort": (),
    "verbosity": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "min_tokens": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "add_special_tokens": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "echo": (False,),
}
"""Fields that are not supported, with the values other than null that change nothing."""
_HARMLESS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("prompt_cache_retention", "parallel_tool_calls"),
}
"""Fields of OpenAI's API that do not change an answer."""

BIASES = 1024
"""Most tokens of `logit_bias`."""
Texts = Annotated[list[str], AT_ONCE]
Ids = Annotated[list[int], AT_ONCE]


def too_many_probabilities(received: object) -> ConfigError:
    """Build the error for a response that would take too much memory."""
    return ConfigError(
        "'logprobs' of a response that is not streamed",
        expected=f"at most {MOST_PROBABILITIES} probabilities, alternatives included",
        received=received,
        hint="set stream, or ask for fewer tokens, texts or alternatives",
    )


def _unknown(name: str, value: Any) -> ConfigError:
    return ConfigError(
        f"'{name}' is not a known field",
        received=str(value)[:200],
        hint=f"leave it out (a daemon that is started with {ALLOW} ignores it)",
    )


def check_fields(part: BaseModel, place: str) -> None:
    """Raise ConfigError for a field of a part that is not known and holds something.

    Clients send an answer back with all of its fields, most of them empty.
    """
    for name, value in (part.model_extra or {}).items():
        empty = value is None or value is False or value in ("", [], {})
        if not empty:
            raise _unknown(f"{place}.{name}", value)


class Strict(Documented):
    """A part of a request whose fields are checked by `check_fields`."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool = False
    """Count tokens in a last piece."""
    include_obfuscation: bool = False
    """Ignored: pieces have no padding."""


class CompletionRequest(Strict):
    """The fields of both kinds of request."""

    model: str = Field(min_length=1, max_length=200)
    """A model, adapter or artifact of GET /v1/models. An adapter is used with its base model."""
    adapter: str | None = Field(default=None, max_length=64)
    """An adapter for a base model in `model`; not in OpenAI's API."""
    max_tokens: int | None = Field(default=None, ge=0, le=1 << 20)
    n: int | None = Field(default=None, ge=1, le=CHOICES)
    """Texts for each prompt."""
    temperature: float | None = Field(default=None, ge=0, le=2)
    """0 always takes the likeliest token; None is 1."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw among the likeliest tokens whose probabilities reach this sum."""
    top_k: int | None = Field(default=None, ge=-1, le=1 << 20)
    """Draw among so many likeliest tokens; 0 or -1 for all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Draw among tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    """Divides the positive logits of the prompt's and the text's tokens; negative ones it multiplies."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logits of the text's tokens."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted as often as a token occurs in the text."""
    logit_bias: Annotated[dict[str, float] | None, at_most(BIASES)] = Field(
        default=None,
        max_length=BIASES,
        json_schema_extra={
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
    )
    """Added to logits, -100 to 100 by token id."""
    seed: int | None = Field(
        default=None, ge=-(2**63), lt=2**63,
        json_schema_extra={"minimum": -(2**53), "maximum": 2**53},
    )  # fmt: skip
    """Gives the same texts on the same machine; the n-th text takes the n-th seed from it."""
    stop: str | Texts | None = Field(
        default=None,
        max_length=1000,
        json_schema_extra={
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4},
                {"type": "null"},
            ]
        },
    )
    """Texts that end the generation, at most four."""
    stop_token_ids: list[int] | None = Field(default=None, max_length=256)
    """Tokens that end the generation, too."""
    ignore_eos: bool | None = None
    """Go on after the model's own end."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None

    def check(self, allows_unknown: bool = False) -> None:
        """Raise ConfigError for a field that is not supported or not known."""
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED:
                if value is not None and value not in _REFUSED[name]:
                    expected = "null"
                    if _REFUSED[name]:
                        expected = _REFUSED[name][0]
                    raise ConfigError(
                        f"'{name}' is not supported", expected=expected, received=str(value)[:200]
                    )
            elif name not in _HARMLESS and not allows_unknown:
                raise _unknown(name, value)
        if self.stream_options is not None and not allows_unknown:
            check_fields(self.stream_options, "stream_options")
        if len(self.stops) > 4 or not all(self.stops):
            raise ConfigError(
                "'stop'", expected="at most four texts, none empty", received=self.stop
            )
        for token, value in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdigit()) or not -100 <= value <= 100:
                expected = "numbers from -100 to 100 by token id"
                raise ConfigError("'logit_bias'", expected=expected, received=f"{token}: {value}")

    @property
    def stops(self) -> list[str]:
        """Texts that end the generation."""
        if isinstance(self.stop, str):
            return [self.stop]
        return list(self.stop or ())

    def check_size(self, asked: list[dict[str, Any]]) -> None:
        """Refuse a response that would take too much memory.

        Args:
            asked: what `asked` gave.
        """
        if self.stream:
            return
        texts = [one for one in asked if one["top"] is not None]
        count = sum((one["max_new_tokens"] or 0) * (1 + one["top"]) for one in texts)
        if count > MOST_PROBABILITIES:
            raise too_many_probabilities(count)

    def choices(self, prompts: list[Any], **fields: Any) -> list[dict[str, Any]]:
        """Return the arguments of the engine's `Completion` for each text, without the model."""
        count = self.n or 1
        if len(prompts) * count > CHOICES:
            raise ConfigError(
                "'n'",
                expected=f"at most {CHOICES} texts in one request",
                received=f"{len(prompts)} prompts, {count} of each",
            )
        own = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p or 1.0,
            "top_k": max(0, self.top_k or 0),
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": self.logit_bias or {},
            "stop": self.stops,
            "stop_token_ids": self.stop_token_ids or [],
            "ignore_eos": bool(self.ignore_eos),
        }
        texts = []
        for prompt in prompts:
            for number in range(count):
                seed = self.seed if self.seed is None else (self.seed + number) % 2**63
                texts.append({"prompt": prompt, "seed": seed, **own, **fields})
        return texts


class Part(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str = Field(max_length=100_000)


class ChatMessage(Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], AT_ONCE] = Field(max_length=100_000)

    @property
    def parts(self) -> list[Part]:
        """The parts of the content; empty if it is a text."""
        if isinstance(self.content, str):
            return []
        return self.content

    def plain(self) -> dict[str, str]:
        """Return the turn for a chat template."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in self.parts)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(CompletionRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1000)
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1 << 20)
    """The newer name of `max_tokens`; None for both means as many as the model takes."""
    logprobs: bool | None = False
    top_logprobs: int | None = Field(default=None, ge=0, le=TOP)

    def asked(self, allows_unknown: bool = False) -> list[dict[str, Any]]:
        """Return the arguments of the engine's `Completion` for each text, without the model."""
        self.check(allows_unknown)
        if not allows_unknown:
            for number, message in enumerate(self.messages):
                check_fields(message, f"messages.{number}")
                for part in message.parts:
                    check_fields(part, f"messages.{number}.content")
        top = None
        if self.logprobs:
            top = self.top_logprobs or 0
        elif self.top_logprobs:
            raise ConfigError("'top_logprobs'", expected="logprobs: true with it", received="none")
        most = self.max_completion_tokens or self.max_tokens
        messages = [message.plain() for message in self.messages]
        return self.choices([messages], max_new_tokens=most, top=top)


class TextRequest(CompletionRequest):
    """The body of POST /v1/completions."""

    prompt: str | Texts | Ids | Annotated[list[Ids], AT_ONCE] = Field(
        max_length=100_000, json_schema_extra={"minItems": 1}
    )
    """A text or its token ids, or a list of either."""
    max_tokens: int | None = Field(default=16, ge=0, le=1 << 20)
    """0 only reads the prompt."""
    logprobs: int | None = Field(default=None, ge=0, le=TOP)
    """Report each token's probability, and so many likeliest tokens."""
    echo: bool | None = False
    """Return the prompt before the text, with its probabilities if `logprobs` is set. They are
    computed in float32 if that fits, as an evaluation computes."""

    def asked(self, allows_unknown: bool = False) -> list[dict[str, Any]]:
        """Return the arguments of the engine's `Completion` for each text, without the model."""
        self.check(allows_unknown)
        prompts: list[Any] = [self.prompt]
        if isinstance(self.prompt, list) and not (self.prompt and isinstance(self.prompt[0], int)):
            prompts = self.prompt
        if not prompts:
            raise ConfigError("'prompt'", expected="at least one prompt", received="none")
        most = 16 if self.max_tokens is None else self.max_tokens
        return self.choices(
            prompts,
            max_new_tokens=most,
            top=self.logprobs,
            echo=bool(self.echo),
            precise=bool(self.echo) and self.logprobs is not None,
        )
