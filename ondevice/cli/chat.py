"""`ondevice chat`: one reply or a conversation, printed while the model generates it."""

from __future__ import annotations

from collections import abc
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ondevice.cli import common, flags
from ondevice.cli.common import err, print_json
from ondevice.core.errors import ConfigError, DataError, OndeviceError
from ondevice.core.process import expanded

if TYPE_CHECKING:
    from ondevice.api.trained_chat import TrainedChat

HELP = (
    "Ctrl-D quits. Ctrl-C stops a reply. /new starts over. "
    "/adapter PATH takes an adapter, /adapter alone the base model."
)


def chat(
    first: flags.FirstModel = None,
    model: flags.Model = None,
    revision: flags.Revision = None,
    dtype: flags.Dtype = None,
    adapter: common.AdapterPath = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Reply to this prompt and quit.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message, before the conversation.")
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            min=1,
            help="Most tokens per reply (default: 128, or what the training's answers need).",
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Sample from the likeliest tokens up to this sum.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed for sampling.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends a reply (repeat for more).")
    ] = None,
    json: common.Json = False,
) -> None:
    """Chat with a model, an artifact or what a run trained, with or without an adapter.

    What you type is framed as the training did: an adapter for labels answers with the label."""
    from ondevice.api.trained_chat import TrainedChat
    from ondevice.models.load import check_model

    source, adapter = common.model_or_adapter(first, model, adapter)
    if source is None:
        raise ConfigError(
            "no model is given", expected="--model, or a model or a run as the first word"
        )
    if not Path(source).is_dir():  # a folder may be an artifact
        check_model(source, revision)
    options = {}
    if dtype is not None:
        options = {"dtype": dtype}
    trained = TrainedChat(source, adapter, revision=revision, **options)
    if system is not None and not trained.has_template:
        raise ConfigError("--system needs a chat template", received=f"{source}, which has none")
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": stop or [],
    }
    conversation = _Conversation(trained, system, sampling)
    if prompt is None:
        _converse(conversation)
    elif json:
        values = {"prompt": prompt, "answer": "".join(conversation.ask(prompt))}
        print_json(values | _ending(trained))
    else:
        _print_pieces(conversation.ask(prompt))


def _ending(trained: TrainedChat) -> dict[str, Any]:
    """Return how a reply ended, or the probabilities of a label."""
    if trained.picked is not None:
        label = {"answer": trained.picked.prediction, "probability": trained.picked.probability}
        return label | {"probabilities": dict(trained.picked.probabilities)}
    assert trained.generator is not None  # noqa: S101  only labels do without
    ending = trained.generator.ending
    return {"finish": ending.finish, "tokens": ending.tokens}


class _Conversation:
    """A conversation. Without a chat template the model sees only the last line, to continue it."""

    def __init__(self, trained: TrainedChat, system: str | None, sampling: dict[str, Any]) -> None:
        self.trained = trained
        self.sampling = sampling
        self.first = []
        if system is not None:
            self.first = [{"role": "system", "content": system}]
        self.messages = list(self.first)

    def ask(self, text: str) -> abc.Generator[str, None, None]:
        """Yield the reply. A stopped reply still counts as a turn; a failed one does not."""
        messages = [*self.messages, {"role": "user", "content": text}]
        reply = ""
        try:
            most = self.sampling["max_new_tokens"] or self.trained.new_tokens
            for piece in self.trained.stream(messages, **self.sampling | {"max_new_tokens": most}):
                reply += piece
                yield piece
        finally:
            if reply:
                self.messages = [*messages, {"role": "assistant", "content": reply}]

    def command(self, line: str) -> str:
        """Run a line that begins with /, and return the message for the user."""
        name, _, rest = line[1:].partition(" ")
        if name == "adapter":
            self.trained.use(expanded(rest.strip()) if rest.strip() else None)
        elif name != "new":
            return HELP
        self.messages = list(self.first)
        return "New conversation."


def _converse(conversation: _Conversation) -> None:
    err.print(HELP, markup=False)
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise DataError("standard input is not valid UTF-8") from None
        try:
            if text.startswith("/"):
                err.print(conversation.command(text), markup=False)
            elif text.strip():
                _print_pieces(conversation.ask(text))
        except KeyboardInterrupt:
            typer.echo()
        except OndeviceError as error:  # the conversation goes on
            err.print(f"error: {error}", markup=False, soft_wrap=True)


def _print_pieces(pieces: abc.Generator[str, None, None]) -> None:
    """Print a reply while it is generated."""
    with closing(pieces):
        for piece in pieces:
            typer.echo(piece, nl=False)
    typer.echo()
