"""`ondevice fuse` and `ondevice convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import err, print_json, table
from ondevice.core.errors import ConfigError

FORMS = "executorch, gguf, gguf-lora, mlx, mlx-model, ollama, peft, safetensors or vllm."
"""As `ondevice.exits.form_names` finds them; a test holds them together, and `--help` reads no folder."""


def fuse(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="The base model, or the artifact that was made of it."
        ),
    ] = None,
    second: Annotated[
        str | None, typer.Argument(metavar="[ADAPTER]", help="The same as --adapter.")
    ] = None,
    model: common.Model = None,
    revision: common.Revision = None,
    dtype: common.Dtype = None,
    adapter: common.AdapterPath = None,
    target_dir: common.Out = None,
    overwrite: common.Overwrite = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Merge an adapter into its model and check that the result is base plus adapter."""
    source, trained = common.both_of((first, second), model, adapter)
    if target_dir is None:
        raise ConfigError("no folder is given", expected="--out DIR")
    from ondevice.training.fuse import fuse as fuse_model

    with common.stages(quiet or json):
        report = fuse_model(
            source, trained, target_dir, dtype=dtype, revision=revision, overwrite=overwrite
        )
    values = {name: getattr(report, name) for name in report.__dataclass_fields__}
    print_json(values) if json else table(values)


def convert(
    first: Annotated[
        Path | None,
        typer.Argument(
            metavar="[ADAPTER]", help="An adapter's folder (PEFT's or mlx-lm's), or a run's."
        ),
    ] = None,
    adapter: common.AdapterPath = None,
    to: Annotated[str, typer.Option("--to", help=FORMS)] = "peft",
    model: common.Model = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Of a hub id.")] = None,
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="File or folder to write.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of the weights: float16, q8_0, ...")
    ] = None,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Write an adapter, or base plus adapter, as another program reads it, and check what was written."""
    source = common.one_of(first, adapter, "adapter")
    if source is None:
        raise ConfigError(
            "no adapter is given", expected="--adapter, or an adapter as the first word"
        )
    if target is None:
        raise ConfigError("no place is given", expected="--out PATH")
    from ondevice.exits import convert as convert_source

    with common.stages(quiet or json):
        report = convert_source(
            source,
            to,
            target,
            model=model,
            revision=revision,
            dtype=dtype,
            overwrite=overwrite,
            dry_run=dry_run,
        )
    if json:
        print_json(report.to_dict())
        return
    values = report.to_dict()
    notes = values.pop("notes")
    table(values | {"bytes": common.mebibytes(report.bytes)})
    for note in notes:
        err.print(note, markup=False, soft_wrap=True)
