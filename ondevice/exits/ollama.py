"""`ollama`: a merged GGUF file and a Modelfile, for `ollama create NAME -f Modelfile` in the
folder.

Ollama no longer takes an adapter next to a model (ADAPTER is rejected from 0.34), so the file is
merged. Its templates are Go's, not Jinja: one is written if the model's own only puts texts before
and after each message, which is tried; otherwise Ollama's own choice is left to it, and that is
said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write
from ondevice.data.tasks.chat_template import apply_template
from ondevice.exits import gguf
from ondevice.exits.base import Checked, Form, Request
from ondevice.models import load_tokenizer

MODEL_NAME = "model.gguf"
MARKER = "Modelfile"
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
    template = template_of(tokenizer)
    lines = [f"FROM ./{MODEL_NAME}"]
    notes = list(checked.notes)
    if template is not None and '"""' not in template.go():
        lines.append(f'TEMPLATE """{template.go()}"""')
    else:
        notes.append(
            "the chat template has no form for Ollama, which chooses one of its own: compare its answers"
        )
    stops = {tokenizer.eos_token} - {None, ""}
    lines += [f'PARAMETER stop "{stop}"' for stop in sorted(stops)]
    atomic_write(folder / MARKER, "\n".join(lines) + "\n")
    notes.append(f"cd {request.out} && ollama create {request.out.name} -f {MARKER}")
    return replace(checked, notes=tuple(notes))


def template_of(tokenizer: Any) -> Template | None:
    """Find what a chat template puts around messages; None if it does anything else."""
    if not isinstance(tokenizer.chat_template, str):
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


FORM = Form("ollama", "Ollama", write, marker=MARKER, dtypes=gguf.DTYPES, merged=True)
