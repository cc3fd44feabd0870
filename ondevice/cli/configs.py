"""`ondevice config schema` and `ondevice config show`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ondevice.api.runfile import RunConfig, presets
from ondevice.cli import common, flags
from ondevice.cli.common import one_of, print_json
from ondevice.core.errors import ConfigError

app = typer.Typer(help="Show the run file's schema, presets and defaults.", no_args_is_help=True)


@app.command()
def schema(json: common.Json = False) -> None:
    """Print the JSON schema of a run file: every key with its type, default and meaning."""
    values = RunConfig.model_json_schema()
    if json:
        print_json(values)
    else:
        typer.echo(json_module.dumps(values, indent=2, ensure_ascii=False))


@app.command()
def preset(
    name: Annotated[
        str | None, typer.Argument(help="The preset to print; without it, all are listed.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Print a ready run file for a kind of device, to edit. `--config NAME` uses it unchanged."""
    known = presets()
    if name is not None and name not in known:
        raise ConfigError(f"no such preset: {name}", expected=", ".join(known), received=name)
    if json:
        print_json({"presets": known if name is None else {name: known[name]}})
    else:
        typer.echo("\n".join(known) if name is None else known[name], nl=name is None)


@app.command()
@flags.with_settings(
    "model.source", "model.revision", "model.dtype", "method.name", model_first=False
)
def show(
    first: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The run file: the same as --config.")
    ] = None,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Print a run file with every default filled in."""
    file = one_of(first, config, "config")
    resolved = RunConfig.load(file, overrides).model_dump(mode="json")
    if json:
        print_json(resolved)
    else:
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)
