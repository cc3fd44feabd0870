"""`ondevice config schema` and `ondevice config show`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer
import yaml

from ondevice.cli import common
from ondevice.cli.common import overrides, print_json

app = typer.Typer(help="The run file: its schema, and what it resolves to.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of a run file."""
    from ondevice.api.runfile import RunConfig

    typer.echo(json_module.dumps(RunConfig.model_json_schema(), indent=2, ensure_ascii=False))


@app.command()
def show(
    config: Annotated[Path | None, typer.Argument(help="A run file.")] = None,
    model: common.Model = None,
    method: common.Method = None,
    settings: common.Settings = None,
    json: common.Json = False,
) -> None:
    """Print the run file with every default filled in."""
    from ondevice.api.runfile import RunConfig

    resolved = RunConfig.load(config, overrides(settings, model__source=model, method__name=method)).model_dump(
        mode="json"
    )
    if json:
        print_json(resolved)
    else:
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)
