"""`ondevice chat`: one answer, or a conversation, as it is written."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, print_json
from ondevice.core.errors import ConfigError, OndeviceError

if TYPE_CHECKING:
    from ondevice.api.chat import Chat

HELP = "Ctrl-D ends, Ctrl-C stops an answer, /new begins anew, /adapter PATH answers with it, /adapter without one."


def chat(
    first: common.FirstModel = None,
    model: common.Model = None,
    revision: common.Revision = None,
    dtype: common.Dtype = None,
    adapter: common.AdapterPath = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and stop.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told first.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", min=1, help="Tokens an answer, at most.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw among tokens of this probability together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn, above temperature 0.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="A text that ends an answer (repeat).")
    ] = None,
    json: common.Json = False,
) -> None:
    """Talk to a model, or to an artifact in its runtime, with or without an adapter."""
    from ondevice.api.chat import open_chat

    source = common.model_of(first, model)
    if source is None:
        raise ConfigError("no model is given", expected="--model, or a model as the first word")
    if not Path(source).is_dir():  # which may be an artifact
        common.check_model(source, revision)
    talk = open_chat(
        source, adapter, **({} if dtype is None else {"dtype": dtype}), revision=revision
    )
    if system is not None and not talk.templated:
        raise ConfigError("--system needs a chat template", received=f"{source}, which has none")
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    options["stop"] = stop or []
    told = _Conversation(talk, system, options)
    if prompt is None:
        _hold(told)
        return
    reply = "".join(told.ask(prompt)) if json else _show(told.ask(prompt))
    if json:
        print_json(
            {
                "prompt": prompt,
                "answer": reply,
                "finish": talk.ending.finish,
                "tokens": talk.ending.tokens,
            }
        )


class _Conversation:
    """With a chat template the model sees the whole conversation; without, each line is a text to continue."""

    def __init__(self, talk: Chat, system: str | None, options: dict[str, Any]) -> None:
        self.talk, self.options = talk, options
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.first)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer; a part of one that is stopped, by closing this, is a turn too, and a failed one is none."""
        asked, said = [*self.messages, {"role": "user", "content": text}], ""
        try:
            for piece in self.talk.stream(asked if self.talk.templated else text, **self.options):
                said += piece
                yield piece
        finally:
            if said:
                self.messages = [*asked, {"role": "assistant", "content": said}]

    def command(self, line: str) -> str:
        """Do what a line that begins with / says; return what to tell."""
        name, _, rest = line[1:].partition(" ")
        if name == "adapter":
            self.talk.use(Path(rest.strip()).expanduser() if rest.strip() else None)
        elif name != "new":
            return HELP
        self.messages = list(self.first)
        return "A new conversation."


def _hold(told: _Conversation) -> None:
    err.print(HELP, markup=False)
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        try:
            if text.startswith("/"):
                err.print(told.command(text), markup=False)
            elif text.strip():
                _show(told.ask(text))
        except KeyboardInterrupt:
            typer.echo()
        except OndeviceError as error:  # the conversation goes on
            err.print(f"error: {error}", markup=False, soft_wrap=True)


def _show(pieces: Generator[str, None, None]) -> str:
    """Print an answer as it comes."""
    said = ""
    with closing(pieces):
        for piece in pieces:
            typer.echo(piece, nl=False)
            said += piece
    typer.echo()
    return said
