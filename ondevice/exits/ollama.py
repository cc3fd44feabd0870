"""`ollama`: a merged GGUF file and a Modelfile, for `ollama create NAME -f Modelfile` in the
folder.

Ollama no longer takes an adapter next to a model (ADAPTER is rejected from 0.34), so the file is
merged. Its templates are Go's, not Jinja: one is written if the model's own only puts texts before
and after each message, which is tried; otherwise Ollama's own choice is left to it, and that is
said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import ConfigError
from ondevice.core.process import own_version
from ondevice.data.tasks.chat_template import CLOCK, ChatTemplate, apply_template, end_marks
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask
from ondevice.exits import gguf
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.task import date_notes, is_plain
from ondevice.models import load_tokenizer

MODEL_NAME = "model.gguf"
MARKER = "Modelfile"
PLAIN = "{{ .Prompt }}"
"""The template of what was trained without one."""
_NO_FORM = (
    "the chat template has no form for Ollama, which chooses one of its own: compare its answers"
)
_NO_DATE = (
    "the chat template writes the date, which Ollama's cannot: Ollama chooses one of its own,"
    " compare its answers"
)
_NO_TOOLS = "the Modelfile's template has no tools, which the model's own has: Ollama refuses them"
_NAMED = (
    "Ollama has one template, the model's default; its {count} others by name are only in"
    " model.gguf: {names}"
)
_ROLES = ("system", "user", "assistant")
_MARK = "\u2603"
_TRIALS = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
)


@dataclass(frozen=True)
class Template:
    """A chat template that only puts texts around messages.

    Attributes:
        around: what stands before and after a message, by role.
        begin: before a conversation that has no system message.
        answer: after the last message, before the reply.
    """

    around: dict[str, tuple[str, str]]
    begin: str
    answer: str

    def render(self, messages: list[dict[str, str]]) -> str:
        """Return the prompt, as Ollama makes it of `go`."""
        parts = [] if messages[0]["role"] == "system" else [self.begin]
        for message in messages:
            before, after = self.around[message["role"]]
            parts += [before, message["content"], after]
        return "".join(parts) + self.answer

    def without(self, first: str) -> Template:
        """Return the template without the mark that the file says to put before every prompt."""
        around = dict(self.around)
        for role in ("system", "user"):
            before, after = around[role]
            around[role] = (before.removeprefix(first), after)
        return Template(around, self.begin.removeprefix(first), self.answer)

    def go(self) -> str:
        """Return the template in Go's language."""
        cases = "".join(
            f'{{{{ {"if" if role == "system" else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for role, (before, after) in self.around.items()
        )
        begin = ""
        if self.begin:
            begin = f'{{{{ if ne (index .Messages 0).Role "system" }}}}{self.begin}{{{{ end }}}}'
        return f"{begin}{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}{self.answer}"


def write(request: Request, folder: Path) -> Checked:
    """Write `model.gguf` and `Modelfile`."""
    checked = gguf.write(request, folder / MODEL_NAME)
    tokenizer: Any = load_tokenizer(str(request.model), request.revision)
    text, notes = modelfile(tokenizer, request.task)
    atomic_write(folder / MARKER, text)
    create = f"cd {request.out} && ollama create {request.out.name} -f {MARKER}"
    return replace(checked, notes=tuple(dict.fromkeys((*checked.notes, *notes, create))))


def check(request: Request) -> None:
    """Refuse what `gguf.check` refuses, and labels that differ in tokens: nothing was trained to end
    a text behind a label, so a count of tokens ends it, and Ollama goes on behind the shorter ones."""
    gguf.check(request)
    if request.task is None:
        return
    tokenizer: Any = load_tokenizer(str(request.model), request.revision)
    labels = sorted(set(request.task.labels.values()))
    counts = [
        len(tokenizer(f" {label}", add_special_tokens=False)["input_ids"]) for label in labels
    ]
    if len(set(counts)) > 1:
        pairs = zip(labels[:5], counts[:5], strict=True)
        raise ConfigError(
            "Ollama would write on behind the shorter labels of this task",
            expected="labels that have the same number of tokens",
            received="tokens of " + ", ".join(f"{label!r}: {count}" for label, count in pairs),
            hint="`ondevice predict`, the daemon or --to executorch pick a label; --to gguf is for"
            " programs that compare the labels' probabilities",
        )


def modelfile(tokenizer: Any, task: TrainedTask | None) -> tuple[str, list[str]]:
    """Return the Modelfile, which frames a prompt as the training did, and notes on missing parts."""
    template, notes = _template(tokenizer, task)
    lines = [f"FROM ./{MODEL_NAME}"]
    if task is not None:
        lines.append(f"# Trained by ondevice {own_version()} on {task.format} rows: {TASK_NAME}")
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in _stops(tokenizer, task)]
    if task is not None and task.has_candidates:
        lines.append(f"PARAMETER num_predict {max(1, task.longest_answer_tokens)}")
        lines.append("PARAMETER temperature 0")
    return "\n".join(lines) + "\n", notes


def _template(tokenizer: Any, task: TrainedTask | None) -> tuple[str | None, list[str]]:
    if is_plain(task):
        return PLAIN, []
    framed = tokenizer if task is None else task.with_template(tokenizer)
    notes = date_notes(task, framed.chat_template)
    if CLOCK in json.dumps(framed.chat_template) and not notes:
        return None, [_NO_DATE]
    if isinstance(framed.chat_template, dict):
        others = sorted(framed.chat_template.keys() - {"default"})
        notes.append(_NAMED.format(count=len(others), names=", ".join(others)))
    found = template_of(framed)
    if found is not None and _adds_first(tokenizer):
        found = found.without(tokenizer.bos_token)
    if found is None or '"""' in found.go():
        return None, [_NO_FORM]
    if ChatTemplate(framed).shows_tools:
        notes.append(_NO_TOOLS)
    return found.go(), notes


def _adds_first(tokenizer: Any) -> bool:
    """Return True if llama.cpp puts the first mark before every prompt."""
    return bool(tokenizer.bos_token) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _stops(tokenizer: Any, task: TrainedTask | None) -> list[str]:
    """Return the texts that end an answer: those of the training, and the tokenizer's own."""
    ends = end_marks(tokenizer) if task is None and tokenizer.chat_template else ()
    if task is not None:
        ends = task.ends
    return [stop for stop in dict.fromkeys((*ends, tokenizer.eos_token)) if stop]


def template_of(tokenizer: Any) -> Template | None:
    """Find what a chat template puts around messages; None if it does anything else."""
    if not tokenizer.chat_template:
        return None

    def render(*roles: str, answer: bool = False) -> str:
        messages = [{"role": role, "content": f"{_MARK}{i}{_MARK}"} for i, role in enumerate(roles)]
        return apply_template(tokenizer, messages, add_generation_prompt=answer)

    try:
        whole = render(*_ROLES)
        system = whole.split(f"{_MARK}0{_MARK}")[0], _between(whole, 0)
        # What stands between two messages is the end of one and the begin of the other: a user
        # after a user tells.
        only = render("system")
        after_system = only.split(f"{_MARK}0{_MARK}")[1]
        after_assistant = whole.rsplit(_MARK, 1)[1]
        before_user = system[1].removeprefix(after_system)
        user_end = render("system", "user").rsplit(_MARK, 1)[1]
        before_assistant = _between(whole, 1).removeprefix(user_end)
        alone = render("user").split(f"{_MARK}0{_MARK}")[0]
        answer = render("user", answer=True).removeprefix(render("user"))
        if not alone.endswith(before_user):
            return None
        around = {"system": (system[0], after_system), "user": (before_user, user_end),
                  "assistant": (before_assistant, after_assistant)}  # fmt: skip
        found = Template(around, alone.removesuffix(before_user), answer)
        for roles in _TRIALS:
            messages = [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]
            if found.render(messages) != apply_template(
                tokenizer, messages, add_generation_prompt=True
            ):
                return None
        if any("{{" in text for text in (found.begin, answer, *sum(around.values(), ()))):
            return None
        return found
    except Exception:  # a template may refuse roles with an error of its own: Jinja's
        return None


def _between(text: str, number: int) -> str:
    """Return what stands between message `number` and the next."""
    return text.split(f"{_MARK}{number}{_MARK}")[1].split(f"{_MARK}{number + 1}{_MARK}")[0]


FORM = Form(
    "ollama",
    "Ollama",
    write,
    marker=MARKER,
    dtypes=gguf.DTYPES,
    merged=True,
    check=check,
)
