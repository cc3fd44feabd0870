"""Talk to a model in PyTorch, or to an artifact in the runtime that it was made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.manifest import MANIFEST_NAME, read_manifest
from ondevice.core.errors import ArtifactError, ConfigError, ModelError
from ondevice.data.tasks.chat_template import apply_template
from ondevice.generation.sample import draw, sample
from ondevice.generation.text import Ending, pieces
from ondevice.planning.devices import resolve_device

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.generation.generate import Messages
    from ondevice.generation.sample import Token
    from ondevice.models import LoadedModel

STOPS = 4
"""Most texts that end an answer, as in the daemon's API."""


class Chat:
    """Something that answers: a model in PyTorch, or a program in its runtime.

    Attributes:
        templated: it takes the messages of a conversation; else a text to continue.
        ending: of the last answer.
    """

    tokenizer: Any
    ending: Ending

    @property
    def templated(self) -> bool:
        """True where the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def use(self, adapter: Path | None) -> None:
        """Answer with another adapter from now on, or without one; nothing is loaded or exported again.

        Raises:
            ArtifactError: it is damaged, or of another model; the one before stays.
        """
        raise NotImplementedError

    def stream(
        self, prompt: str | Messages, *, max_new_tokens: int = 64, temperature: float = 0.0, top_p: float = 1.0,
        seed: int | None = 0, stop: Sequence[str] = (),
    ) -> Iterator[str]:  # fmt: skip
        """Yield the answer as it is written: whole characters, and nothing of a text in `stop`, which ends it.

        Args:
            prompt: messages for the chat template, or a text to continue.
            temperature, top_p, seed: as `generation.sample.draw` takes them.

        Raises:
            ConfigError: a number is out of range, or the conversation is longer than what answers takes.
        """
        if len(stop) > STOPS or not all(stop):
            raise ConfigError(
                "stop", expected=f"at most {STOPS} texts, none empty", received=list(stop)
            )
        self.ending = Ending()
        options = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
        }
        yield from pieces(self._tokens(prompt, options), self.tokenizer, stop, self.ending)

    def answer(self, prompt: str | Messages, **options: Any) -> str:
        """Return the whole answer; arguments as for `stream`."""
        return "".join(self.stream(prompt, **options))

    def _tokens(self, prompt: str | Messages, options: dict[str, Any]) -> Iterator[Token]:
        raise NotImplementedError


def open_chat(
    source: str, adapter: Path | None = None, *, revision: str | None = None, dtype: str = "float32"
) -> Chat:
    """Open a model, or an artifact that was exported with `export.context_tokens`, with or without an adapter.

    Args:
        revision, dtype: of a model, as `load_model`'s; an artifact has its own.

    Raises:
        ArtifactError: the artifact's program cannot write, or the adapter does not fit.
        ModelError: the model cannot be read.
    """
    from ondevice.exporters.executorch.packed import has_answers

    if (Path(source) / MANIFEST_NAME).is_file() or has_answers(Path(source)):
        chat: Chat = _ProgramChat(Path(source))
    else:
        from ondevice.models import load_model

        loaded = load_model(source, revision=revision, dtype=dtype, device=resolve_device("auto"))
        if loaded.dims.classes:
            raise ModelError(
                f"{source} classifies, and writes no text",
                hint="`ondevice eval` says how well it does",
            )
        chat = _ModelChat(loaded)
    if adapter is not None:
        chat.use(adapter)
    return chat


class _ModelChat(Chat):
    """A model, with an adapter beside its layers."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.tokenizer, self.ending = loaded, loaded.tokenizer, Ending()
        self._adapted = ExitStack()
        self._adapter: Adapter | None = None

    def use(self, adapter: Path | None) -> None:
        new, before = None if adapter is None else load_adapter(adapter), self._adapter
        try:
            self._put(new)
        except ArtifactError:
            self._put(before)
            raise

    def _put(self, adapter: Adapter | None) -> None:
        from ondevice.nn.adapters import adapted

        self._adapted.close()
        if adapter is not None:
            self._adapted.enter_context(adapted(self.loaded, adapter))
        self._adapter = adapter

    def _tokens(self, prompt: str | Messages, options: dict[str, Any]) -> Iterator[Token]:
        from ondevice.generation.generate import prompt_ids

        ids, most = list(prompt_ids(self.loaded, prompt)), self.loaded.dims.max_positions
        if most:
            options = options | {"max_new_tokens": _room(len(ids), most, options["max_new_tokens"])}
        return sample(self.loaded, ids, **options)


class _ProgramChat(Chat):
    """A program that keeps keys and values; what a prompt begins with and was read already is not read again."""

    def __init__(self, folder: Path) -> None:
        from ondevice.models.open import artifact_tokenizer

        self.where, self.known = str(folder), list[int]()
        self.session, self.writer = _writer(folder)
        self.tokenizer, self.ending = artifact_tokenizer(folder), Ending()
        self.ends = end_tokens(self.tokenizer)

    def use(self, adapter: Path | None) -> None:
        new: Adapter | None = None if adapter is None else load_adapter(adapter)
        if self.session is None:
            self.writer.use(new)
        elif new is None:
            self.session.restart()
        else:
            self.session.load_adapter(new)
        self.known = []  # keys and values are those of the adapter that read

    def _tokens(self, prompt: str | Messages, options: dict[str, Any]) -> Iterator[Token]:
        from ondevice.generation.generate import tokenize

        ids = list(tokenize(self.tokenizer, prompt, self.where))
        same = next(
            (n for n, pair in enumerate(zip(ids, self.known)) if pair[0] != pair[1]),
            len(self.known),
        )
        same = min(same, len(ids) - 1)
        room = _room(len(ids), self.writer.context_tokens, options["max_new_tokens"])
        self.writer.read, self.known = same, ids[:same]
        options = options | {"max_new_tokens": room}
        return draw(self._feed, ids[same:], self.ends, **options)

    def _feed(self, ids: Sequence[int]) -> Any:
        logits = self.writer.feed(ids)
        self.known += ids
        return logits


def _writer(folder: Path) -> tuple[Any, Any]:
    """Open what answers: the session of a program over shared weights, or None, and the writer."""
    from ondevice.exporters.executorch.packed import ANSWERS, PackedWriter, has_answers

    if has_answers(folder):
        return None, PackedWriter(folder)
    if has_answers(folder / ANSWERS):
        read_manifest(folder)  # its files are whole
        return None, PackedWriter(folder / ANSWERS)
    from ondevice.exporters.executorch.writer import Writer, can_write

    session: Any = open_artifact(folder)
    if not can_write(session):
        raise ArtifactError(
            f"{folder}: the program cannot write",
            expected="an artifact that was exported with --set export.context_tokens=512 --set export.answers=packed",
            received=f"one for {session.manifest.target}",
            hint=f"chat with the model that it was made of: {session.manifest.model.source}",
        )
    return session, Writer(session)


def _room(prompt: int, most: int, wanted: int) -> int:
    """Return how many tokens an answer may have, at least one: the last that is drawn is not read."""
    if prompt > most:
        raise ConfigError(
            "the conversation is longer than what answers takes",
            expected=f"at most {most} tokens",
            received=f"{prompt} tokens",
            hint="begin a new one, or export with a larger export.context_tokens",
        )
    return min(wanted, most - prompt + 1)


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the end of a text, and the special token that a chat puts behind one."""
    ends = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        mark = "\u2603"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        text = apply_template(tokenizer, turns)
        behind = tokenizer(text.rpartition(mark)[2], add_special_tokens=False)["input_ids"]
        ends |= set(behind[:1]) & set(tokenizer.all_special_ids)
    return frozenset(ends)
