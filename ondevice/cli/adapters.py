"""`ondevice fuse`, `ondevice convert` and `ondevice chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import err, out, print_json, table
from ondevice.core.errors import ConfigError


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
    adapter: Annotated[Path, typer.Argument(help="The adapter's folder, PEFT's or mlx-lm's.")],
    to: Annotated[str, typer.Option("--to", help="peft or mlx-lm.")] = "peft",
    target_dir: common.Out = None,
    json: common.Json = False,
) -> None:
    """Write an adapter in the layout of another library; its numbers stay as they are."""
    from ondevice.artifact.adapter import load_adapter, save_adapter
    from ondevice.artifact.mlx_lm_files import save_mlx_lm_adapter

    writers = {"peft": save_adapter, "mlx-lm": save_mlx_lm_adapter}
    if to not in writers:
        raise ConfigError("unknown layout of adapters", expected=", ".join(writers), received=to)
    if target_dir is None:
        raise ConfigError("no folder is given", expected="--out DIR")
    loaded = load_adapter(adapter)
    writers[to](loaded, target_dir)
    values = {"adapter": str(target_dir), "layout": to, "rank": loaded.rank, "alpha": loaded.alpha,
              "layers": len(loaded.linears), "base_model": loaded.base_model or None}  # fmt: skip
    print_json(values) if json else table(values)


def chat(
    first: common.FirstModel = None,
    model: common.Model = None,
    adapter: common.AdapterPath = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Answer this and stop.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    json: common.Json = False,
) -> None:
    """Talk to a model, with or without an adapter."""
    from ondevice.artifact.adapter import load_adapter
    from ondevice.models import load_model
    from ondevice.models.generate import generate
    from ondevice.planning.devices import resolve_device
    from ondevice.training.fuse import apply_adapter

    source = common.model_of(first, model)
    if source is None:
        raise ConfigError("no model is given", expected="--model, or a model as the first word")
    loaded = load_model(source, device=resolve_device("auto"))
    if adapter is not None:
        apply_adapter(loaded, load_adapter(adapter))
    # With a chat template the model sees the whole conversation; without, each line is a text to continue.
    templated = getattr(loaded.tokenizer, "chat_template", None) is not None
    messages: list[dict[str, str]] = []

    def answer(text: str) -> str:
        messages.append({"role": "user", "content": text})
        reply = generate(
            loaded, messages if templated else text, max_new_tokens=max_new_tokens, temperature=temperature
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
