"""The one way to generate text: the command line, the daemon, evaluation and exported programs use
`Generator`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.adapter import load_adapter
from ondevice.core.errors import ConfigError
from ondevice.generation.prompt import Messages, model_end_tokens, prompt_ids
from ondevice.generation.sample import Token, TokenModel, draw
from ondevice.generation.text import Ending, parts
from ondevice.generation.torch_model import TorchModel

if TYPE_CHECKING:
    from ondevice.models import LoadedModel

MAX_STOPS = 4
"""Most stop texts, as in the daemon's API."""


class Generator:
    """Generates text.

    Args:
        model: predicts the next token.
        tokenizer: of the model.
        end_tokens: tokens that end a text.
        source: names the model in errors.

    Attributes:
        ending: how the last text of `stream` ended.
    """

    def __init__(
        self, model: TokenModel, tokenizer: Any, end_tokens: frozenset[int], source: str
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.end_tokens = end_tokens
        self.source = source
        self.ending = Ending()
        self._read: list[int] = []

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has a chat template: `stream` takes messages then."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def use(self, adapter: Path | None) -> None:
        """Generate with another adapter from now on, or without one; nothing else is loaded again.

        Raises:
            ArtifactError: it is damaged, or belongs to another model; the previous one stays.
        """
        self.model.use(None if adapter is None else load_adapter(adapter))
        self._read = []

    def tokens(self, ids: Sequence[int], **options: Any) -> Iterator[Token]:
        """Draw tokens after a prompt; options as for `sample.draw`.

        A program does not read the tokens again that the previous prompt began with.
        """
        ids = list(ids)
        same = 0
        while same < min(len(ids) - 1, len(self._read)) and ids[same] == self._read[same]:
            same += 1
        same = self.model.rewind(same)
        self._read = ids[:same]
        return draw(self._feed, ids[same:], self.end_tokens, prompt=ids, **options)

    def stream(
        self, prompt: str | Messages | tuple[int, ...], *, max_new_tokens: int = 64, temperature: float = 0.0,
        top_p: float = 1.0, seed: int | None = 0, stop: Sequence[str] = (),
    ) -> Iterator[str]:  # fmt: skip
        """Yield the text while it is generated: complete characters, up to the first of `stop`.

        Args:
            prompt: messages for the chat template, or a text or tokens to continue.
            temperature, top_p, seed: as for `sample.draw`.

        Raises:
            ConfigError: a number is out of range, or the prompt is longer than the context.
        """
        if len(stop) > MAX_STOPS or not all(stop):
            raise ConfigError(
                "stop", expected=f"at most {MAX_STOPS} texts, none empty", received=list(stop)
            )
        self.ending = Ending()
        ids = prompt_ids(self.tokenizer, prompt, self.source)
        tokens = self.tokens(
            ids, max_new_tokens=self.room(len(ids), max_new_tokens), temperature=temperature,
            top_p=top_p, seed=seed,
        )  # fmt: skip
        for part in parts(tokens, self.tokenizer, stop, self.ending):
            if part.text:
                yield part.text

    def generate(self, prompt: str | Messages, **options: Any) -> str:
        """Return the whole text; arguments as for `stream`."""
        return "".join(self.stream(prompt, **options))

    def _feed(self, ids: Sequence[int]) -> Any:
        logits = self.model.feed(ids)
        self._read += ids
        return logits

    def room(self, prompt_tokens: int, max_new_tokens: int) -> int:
        """Return how many tokens fit, at least one: the last one drawn is not read."""
        context = self.model.context_tokens
        if not context:
            return max_new_tokens
        if prompt_tokens > context:
            raise ConfigError(
                "the conversation is longer than the context",
                expected=f"at most {context} tokens",
                received=f"{prompt_tokens} tokens",
                hint="begin a new one, or export with a larger export.context_tokens",
            )
        return min(max_new_tokens, context - prompt_tokens + 1)


def generator_of(loaded: LoadedModel) -> Generator:
    """Return a generator over a loaded model; adapters that are applied to it take part."""
    source = loaded.source.source
    return Generator(TorchModel(loaded), loaded.tokenizer, model_end_tokens(loaded), source)


def generate(
    loaded: LoadedModel,
    prompt: str | Messages,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    *,
    seed: int = 0,
) -> str:
    """Continue a text, or reply to a chat; return only the new text, without special tokens.

    Args:
        prompt: plain text, or `[{"role": "user", "content": "..."}, ...]` for the model's chat
            template.
        max_new_tokens: stop after so many tokens if the model does not stop by itself.
        temperature: 0 takes the most likely token each time; above, sampling with `seed`.

    Raises:
        ModelError: messages for a model without a chat template.
        ConfigError: an empty prompt, or a number out of range.
    """
    ids = prompt_ids(loaded.tokenizer, prompt, loaded.source.source)
    return continue_ids(loaded, ids, max_new_tokens, temperature, seed=seed)


def continue_ids(
    loaded: LoadedModel,
    ids: Sequence[int],
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    *,
    seed: int = 0,
) -> str:
    """Continue a prompt of token ids; arguments as for `generate`."""
    options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    tokens = generator_of(loaded).tokens(ids, **options)
    return str(
        loaded.tokenizer.decode(
            [token.id for token in tokens if not token.ends], skip_special_tokens=True
        )
    )
