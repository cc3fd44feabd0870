"""`ondevice fuse`, `ondevice convert` and `ondevice chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import err, out, print_json, table
from ondevice.core.errors import ConfigError

FORMS = "gguf, gguf-lora, mlx, ollama, peft, safetensors or vllm."
"""As `ondevice.exits.form_names` finds them; a test holds them together, and `--help` reads no folder."""


def fuse(
    model: Annotated[str, typer.Argument(help="The base model, or the artifact that was made of it.")],
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder.")],
    target_dir: common.Out = None,
    overwrite: common.Overwrite = False,
    json: common.Json = False,
) -> None:
    """Merge an adapter into its model and check that the result is base plus adapter."""
    from ondevice.training.fuse import fuse as fuse_model

    if target_dir is None:
        raise ConfigError("no folder is given", expected="--out DIR")
    report = fuse_model(model, adapter, target_dir, overwrite=overwrite)
    values = {name: getattr(report, name) for name in report.__dataclass_fields__}
    print_json(values) if json else table(values)


def convert(
    source: Annotated[Path, typer.Argument(help="An adapter's folder (PEFT's or mlx-lm's), or a run's.")],
    to: Annotated[str, typer.Option("--to", help=FORMS)] = "peft",
    model: common.Model = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of a hub id.")] = None,
    target: Annotated[Path | None, typer.Option("--out", "-o", help="File or folder to write.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the weights: float16, q8_0, ...")] = None,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Write an adapter, or base plus adapter, as another program reads it, and check what was written."""
    from ondevice.exits import convert as convert_source

    if target is None:
        raise ConfigError("no place is given", expected="--out PATH")
    with common.stages(quiet or json):
        report = convert_source(
            source, to, target, model=model, revision=revision, dtype=dtype, overwrite=overwrite, dry_run=dry_run
        )
    if json:
        print_json(report.to_dict())
        return
    values = report.to_dict()
    notes = values.pop("notes")
    table(values | {"bytes": common.mebibytes(report.bytes)})
    for note in notes:
        err.print(note, markup=False, soft_wrap=True)


def chat(
    first: common.FirstModel = None,
    model: common.Model = None,
    adapter: common.AdapterPath = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and stop.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of what is drawn, above temperature 0.")] = 0,
    json: common.Json = False,
) -> None:
    """Talk to a model, or to an artifact in its runtime, with or without an adapter."""
    from ondevice.api.chat import open_chat

    source = common.model_of(first, model)
    if source is None:
        raise ConfigError("no model is given", expected="--model, or a model as the first word")
    talk = open_chat(source, adapter)
    # With a chat template the model sees the whole conversation; without, each line is a text to continue.
    messages: list[dict[str, str]] = []

    def answer(text: str) -> str:
        messages.append({"role": "user", "content": text})
        reply = talk.answer(
            messages if talk.templated else text, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )
        messages.append({"role": "assistant", "content": reply})
        return reply

    if prompt is not None:
        reply = answer(prompt)
        print_json({"prompt": prompt, "answer": reply}) if json else out.print(reply, markup=False)
        return
    err.print("Ctrl-D ends the conversation.")
    while True:
        try:
            text = input("> ")
        except EOFError:
            return
        if text.strip():
            out.print(answer(text), markup=False)
