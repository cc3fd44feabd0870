"""`ondevice config schema` and `ondevice config show`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ondevice.cli import common
from ondevice.cli.common import overrides, print_json
from ondevice.core.errors import ConfigError

app = typer.Typer(help="The run file: its schema, and what it resolves to.", no_args_is_help=True)


@app.command()
def schema(json: common.Json = False) -> None:
    """Print the JSON schema of a run file."""
    from ondevice.api.runfile import RunConfig

    told = RunConfig.model_json_schema()
    print_json(told) if json else typer.echo(json_module.dumps(told, indent=2, ensure_ascii=False))


@app.command()
def preset(
    name: Annotated[str | None, typer.Argument(help="Which one; without, they are listed.")] = None,
    json: common.Json = False,
) -> None:
    """Print a run file for a kind of device, to change and keep; `--config NAME` takes it as it is."""
    from ondevice.api.runfile import presets

    known = presets()
    if name is not None and name not in known:
        raise ConfigError(f"there is no preset {name}", expected=", ".join(known), received=name)
    if json:
        print_json({"presets": known if name is None else {name: known[name]}})
    else:
        typer.echo("\n".join(known) if name is None else known[name], nl=name is None)


@app.command()
@common.with_run_options("--method", "--revision", "--dtype", loop=False)
def show(
    first: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="The same as --config.")
    ] = None,
    config: common.Config = None,
    model: common.Model = None,
    settings: common.Settings = None,
    json: common.Json = False,
    *,
    run_options: dict[str, Any],
) -> None:
    """Print the run file with every default filled in."""
    from ondevice.api.runfile import RunConfig

    file = common.one_of(first, config, "config")
    resolved = RunConfig.load(
        file, overrides(settings, model__source=model) | run_options
    ).model_dump(mode="json")
    if json:
        print_json(resolved)
    else:
        typer.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)
