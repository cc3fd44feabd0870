"""What llama.cpp makes of a text: how a GGUF file has to say it, and the proof that it does.

llama.cpp has its own code for tokens: no NFC, one way of putting spaces before texts, and special
tokens that remove the spaces after them only in files of one name. So the choices that a file
leaves are tried on texts before a weight is read. The file is refused if none gives the ids that
were trained on.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ondevice.core.errors import VerificationError
from ondevice.data.tasks.chat_template import apply_template, with_date
from ondevice.data.tasks.trained import TrainedTask
from ondevice.exits.task import PLAIN, is_plain
from ondevice.gguf.metadata import Metadata
from ondevice.gguf.read import open_gguf
from ondevice.gguf.read_tokenizer import KEEPS_SPACES, strips_right
from ondevice.gguf.read_tokenizer import write_tokenizer as read_tokenizer
from ondevice.gguf.write_tokenizer import Templates, write_tokenizer

TEXTS = (
    "The capital of France is",
    "Hello, world! It's 12345 o'clock; we've 3.14 and 1,000.",
    "inner   spaces \n\n\n and\tlines\r\n  end",
    "Äpfel, naïve, Ελληνικά, 漢字仮名, emoji 🙂🙃",
    "def f(x):\n    return x**2  # IT'S ok\n",
)
"""Texts that every file must read as the tokenizer does, if the training had no chat template."""
SPACED = (" leading space", "\n\nleading lines", "  two spaces")
DECOMPOSED = "cafe\u0301 A\u030angstro\u0308m"
CONVERSATIONS = (
    ("Hi there",),
    ("Be brief", "Why?"),
    ("  two spaces before", "Yes? ", " Why\n\n", "Because it's 12345.\n", "\nÄpfel 漢字 🙂?"),
)
"""Contents of turns; the last is the user's, and an even number begins with a system turn."""
_NOTES = {
    "decomposed": "llama.cpp does not compose letters and accents (NFC) as the training did:"
    " compose texts before you send them",
    "text": "in llama.cpp a text without the chat template has other tokens than in the training:"
    " use the chat template",
    "spaced": "in llama.cpp a text that begins with a space has other tokens than in the training:"
    " strip texts before you send them",
}
_PHI = "phi-3"
_CAUGHT = ("jina-v2", "modern-bert")
"""Names at which llama.cpp changes other marks."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A text, and the ids that the training's tokenizer makes of it.

    Attributes:
        kind: "text", "spaced", "decomposed" or "conversation".
        text: as it goes to llama.cpp, with the marks of the chat template.
        ids: the training's, without an end that the tokenizer adds.
        turns: of a conversation.
    """

    kind: str
    text: str
    ids: tuple[int, ...]
    turns: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True)
class Reading:
    """How a file tells llama.cpp to read texts.

    Attributes:
        name: `general.name`.
        add_space: before a text and after each special token; None without spaces as letters.
        templates: the chat template, or several by name.
        trials: texts, whose ids the file has to give.
        differs: those that no file can give, and that the training had no need of, with the ids.
    """

    name: str
    add_space: bool | None
    templates: Templates
    trials: tuple[Trial, ...]
    differs: tuple[tuple[Trial, list[int]], ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know, one sentence each."""
        kinds = {trial.kind for trial, _ in self.differs}
        if "text" in kinds:
            kinds -= {"spaced"}
        return tuple(note for kind, note in _NOTES.items() if kind in kinds)


def reading_of(
    tokenizer: Any, task: TrainedTask | None, rows: int, stem: str, where: str
) -> Reading:
    """Choose how a file is read, so that llama.cpp's ids are those of the training.

    Args:
        rows: of the embedding.
        stem: of the file's name.
        where: names the model in errors.

    Raises:
        VerificationError: no choice gives the same ids; names the text.
        ModelError: llama.cpp has no name for how the tokenizer splits text.
    """
    framed = tokenizer if task is None else task.with_template(tokenizer)
    has_chat = not is_plain(task) and bool(framed.chat_template)
    trials = tuple(_trials(framed, task, has_chat))
    templates: Templates = PLAIN
    if not is_plain(task):
        templates = _dated(framed.chat_template, tokenizer, task)
    name = _plain_name(stem)
    strips = any(token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if strips and tokenizer.get_vocab().keys() >= {
        *KEEPS_SPACES,
        "</s>",
    }:  # else it loads no such file
        name = f"{_PHI} {name}"
    found: list[tuple[int, int, Reading]] = []
    for add_space in _spaces(tokenizer):
        reading = Reading(name, add_space, templates, trials)
        wrong = tuple(mismatches(reading, tokenizer, rows, where))
        needed = sum(_is_needed(trial, has_chat) for trial, _ in wrong)
        found.append((needed, len(wrong), replace(reading, differs=wrong)))
        if not wrong:
            break
    needed, _, best = min(found, key=lambda one: one[:2])
    if needed:
        fault = next(pair for pair in best.differs if _is_needed(pair[0], has_chat))
        raise refusal(fault, tokenizer, where, "llama.cpp's rules")
    return best


def _dated(framed: Templates, tokenizer: Any, task: TrainedTask | None) -> Templates:
    """Return the templates that a file gets: with the date of the training as a text."""
    if task is None or task.date is None:
        return framed
    plain: Templates = task.chat_template or tokenizer.chat_template
    if isinstance(plain, str):
        return with_date(plain, task.date)
    return {name: with_date(text, task.date) for name, text in (plain or {}).items()} or None


def mismatches(
    reading: Reading, tokenizer: Any, rows: int, where: str
) -> list[tuple[Trial, list[int]]]:
    """Return the trials whose ids differ under our model of llama.cpp's rules, with those ids."""
    from gguf import GGUFWriter
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_name(reading.name)
        write_tokenizer(writer, tokenizer, rows, (), where, None, reading.add_space)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        data = Metadata(open_gguf(path), path)
        config = {
            f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos")
        }
        read_tokenizer(data, config, Path(folder))
        back = AutoTokenizer.from_pretrained(folder)
        begins = bool(data.optional("tokenizer.ggml.add_bos_token"))
    wrong = []
    for trial in reading.trials:
        ids = back(text_sent(trial, tokenizer, begins))["input_ids"]
        if tuple(ids) != trial.ids:
            wrong.append((trial, list(ids)))
    return wrong


def text_sent(trial: Trial, tokenizer: Any, begins: bool) -> str:
    """Return a trial's text as llama.cpp cuts it: without the first mark, if the file adds that."""
    if begins and tokenizer.bos_token:
        return trial.text.removeprefix(tokenizer.bos_token)
    return trial.text


def refusal(
    fault: tuple[Trial, list[int]], tokenizer: Any, where: str, reader: str
) -> VerificationError:
    """Build the error for a text that llama.cpp would read otherwise."""
    trial, ids = fault
    place = next(
        (at for at, pair in enumerate(zip(ids, trial.ids)) if pair[0] != pair[1]),
        min(len(ids), len(trial.ids)),
    )
    around = slice(max(0, place - 2), place + 4)

    def tokens(values: Sequence[int]) -> str:
        return repr(tokenizer.convert_ids_to_tokens(list(values[around])))

    cause = ""
    added = [token for token in tokenizer.added_tokens_decoder.values()]
    for side in ("rstrip", "lstrip"):
        if marks := [token.content for token in added if getattr(token, side)]:
            cause += f"; its special token {marks[0]!r} has `{side}`"
    return VerificationError(
        f"{where}: llama.cpp would read other tokens than were trained{cause}",
        expected=f"{tokens(trial.ids)} in {trial.text[:60]!r}",
        received=f"{tokens(ids)} by {reader}",
        hint="use --to safetensors or --to mlx-model, whose readers take the tokenizer as it is",
    )


def _trials(tokenizer: Any, task: TrainedTask | None, has_chat: bool) -> Iterator[Trial]:
    own = () if task is None else (*_plain_texts(task),)
    for text in (*TEXTS, *own):
        yield Trial("text", text, _ids(tokenizer, text))
    for text in SPACED:
        yield Trial("spaced", text, _ids(tokenizer, text))
    yield Trial("decomposed", DECOMPOSED, _ids(tokenizer, DECOMPOSED))
    if not has_chat:
        return
    for contents in CONVERSATIONS:
        turns = turns_of(contents)
        text = render(tokenizer, turns)
        if text is not None:
            yield Trial("conversation", text, _ids(tokenizer, text), tuple(turns))


def turns_of(contents: Sequence[str]) -> list[dict[str, str]]:
    """Return a conversation of these contents, the last of them the user's."""
    roles = ["user", "assistant"] * len(contents)
    if len(contents) % 2 == 0:
        roles = ["system", *roles]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def render(tokenizer: Any, turns: Sequence[dict[str, str]]) -> str | None:
    """Return a conversation's prompt; None if the chat template refuses it."""
    try:
        return apply_template(tokenizer, list(turns), add_generation_prompt=True)
    except Exception:  # a template may refuse roles with an error of its own: Jinja's
        return None


def _plain_texts(task: TrainedTask) -> Iterator[str]:
    """Return the training's own words: its prompt, if no chat template made it."""
    if is_plain(task) and task.prompt and not task.prompt[:1].isspace():
        yield task.prompt
        for label in task.labels.values():
            yield f"{task.prompt} {label}"


def _ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokenize as the training does: a first mark once, and no last one."""
    begins = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = list(tokenizer(text, add_special_tokens=not begins, verbose=False)["input_ids"])
    while ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
        ids.pop()
    return tuple(ids)


def _is_needed(trial: Trial, has_chat: bool) -> bool:
    if trial.kind == "text" and not has_chat:
        return True
    return trial.kind == "conversation"


def _spaces(tokenizer: Any) -> tuple[bool | None, ...]:
    """Return the choices for a space before texts; llama.cpp's other tokenizers have none."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    if rules["model"].get("byte_fallback"):
        return (True, False)
    return (None,)


def _plain_name(stem: str) -> str:
    """Return a file's name at which llama.cpp changes nothing about special tokens."""
    if strips_right(stem) or any(part in stem.lower() for part in _CAUGHT):
        return re.sub(r"(?i)(phi|jina|modern)-?", r"\1_", stem)
    return stem
