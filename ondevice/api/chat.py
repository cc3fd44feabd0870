"""Talk to a model in PyTorch, or to an artifact in the runtime that it was made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.core.errors import ArtifactError
from ondevice.planning.devices import resolve_device

if TYPE_CHECKING:
    from ondevice.models.generate import Messages


@dataclass(frozen=True)
class Chat:
    """Something that answers.

    Attributes:
        templated: it takes the messages of a conversation; else a text to continue.
        answer: takes messages or a text, `max_new_tokens`, `temperature` and `seed`, and gives the new text.
    """

    templated: bool
    answer: Callable[..., str]


def open_chat(source: str, adapter: Path | None = None) -> Chat:
    """Open a model, or an artifact that was exported with `export.context_tokens`, with or without an adapter.

    Raises:
        ArtifactError: the artifact's program cannot write, or the adapter does not fit.
        ModelError: the model cannot be read.
    """
    if (Path(source) / MANIFEST_NAME).is_file():
        return _open_program(Path(source), adapter)
    from ondevice.models import load_model
    from ondevice.models.generate import generate
    from ondevice.training.fuse import apply_adapter

    loaded = load_model(source, device=resolve_device("auto"))
    if adapter is not None:
        apply_adapter(loaded, load_adapter(adapter))
    return Chat(getattr(loaded.tokenizer, "chat_template", None) is not None, partial(generate, loaded))


def _open_program(folder: Path, adapter: Path | None) -> Chat:
    from ondevice.exporters.executorch.writer import Writer
    from ondevice.models.load import artifact_tokenizer

    session = open_artifact(folder)
    if not hasattr(session, "head"):
        raise ArtifactError(
            f"{folder}: the program cannot write",
            expected="a program of functions of one block, with --set export.context_tokens=512",
            received=f"one for {session.manifest.target}",
            hint=f"chat with the model that it was made of: {session.manifest.model.source}",
        )
    if adapter is not None:
        session.load_adapter(load_adapter(adapter))
    tokenizer = artifact_tokenizer(folder)
    told = _Conversation(Writer(session), tokenizer, str(folder))
    return Chat(bool(tokenizer.chat_template), told.answer)


class _Conversation:
    """Answers of a writer; what a prompt begins with and was read already is not read again."""

    def __init__(self, writer: Any, tokenizer: Any, where: str) -> None:
        self.writer, self.tokenizer, self.where = writer, tokenizer, where
        self.ends = end_tokens(tokenizer)
        self.known: list[int] = []

    def answer(
        self, prompt: str | Messages, max_new_tokens: int = 64, temperature: float = 0.0, *, seed: int = 0
    ) -> str:
        from ondevice.models.generate import tokenize
        from ondevice.models.sample import draw

        ids = list(tokenize(self.tokenizer, prompt, self.where))
        same = next((n for n, pair in enumerate(zip(ids, self.known)) if pair[0] != pair[1]), len(self.known))
        same = min(same, len(ids) - 1)
        self.writer.read, self.known = same, ids[:same]
        room = self.writer.context_tokens - len(ids)
        answered = []
        options = {"max_new_tokens": max(1, min(max_new_tokens, room)), "temperature": temperature, "seed": seed}
        for token in draw(self._feed, ids[same:], self.ends, **options):
            if not token.ends:
                answered.append(token.id)
        return str(self.tokenizer.decode(answered, skip_special_tokens=True))

    def _feed(self, ids: Sequence[int]) -> Any:
        logits = self.writer.feed(ids)
        self.known += ids
        return logits


def end_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the end of a text, and the special token that a chat puts behind one."""
    ends = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        mark = "\u2603"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        behind = tokenizer(text.rpartition(mark)[2], add_special_tokens=False)["input_ids"]
        ends |= set(behind[:1]) & set(tokenizer.all_special_ids)
    return frozenset(ends)
