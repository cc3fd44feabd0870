"""`--dry-run` of `ondevice train` and `ondevice run`: read the rows, check, and print the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from ondevice.api import resolve
from ondevice.api.runfile import RunConfig
from ondevice.api.train import check_artifact
from ondevice.cli.common import err, out, print_json
from ondevice.core.errors import DoesNotFitError
from ondevice.models import check_files
from ondevice.planning.render import render


def dry_run_model(
    config: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    force: bool,
    adapter: Path | None,
    json: bool,
) -> None:
    """Check a run of `ondevice train`, print its plan, and refuse one that does not fit."""
    options = resolve.options_of(adapter, resume=resume, overwrite=overwrite)
    decided = resolve.check(config, options)
    check_files(decided.config.model.source, decided.config.model.revision)
    notes = (*decided.options.said, *decided.options.notes)
    _print_plan(decided.config, decided.plan, notes, json, force)


def dry_run_artifact(
    artifact: Path,
    config: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    adapter: Path | None,
    json: bool,
) -> None:
    """Check a run of `ondevice run`, print its plan, and refuse one that does not fit."""
    plan = check_artifact(artifact, config, resume=resume, overwrite=overwrite, adapter=adapter)
    _print_plan(config, plan, (), json)


def _print_plan(
    config: RunConfig, plan: Any, notes: tuple[str, ...], json: bool, force: bool = False
) -> None:
    """Print the plan; one that does not fit ends with the exit code of its error, as in `plan`."""
    if json:
        print_json({"config": config.model_dump(mode="json"), "plan": plan.to_dict()})
    else:
        for note in notes:
            err.print(note, markup=False)
        out.print(render(plan))
    if not plan.fits and not force:
        raise typer.Exit(DoesNotFitError.exit_code)
