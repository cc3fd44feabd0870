"""`--dry-run` of `ondevice train` and `ondevice run`: read the rows, check, and print the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.api.runfile import RunConfig
from ondevice.artifact.manifest import read_manifest
from ondevice.cli.common import err, out, print_json
from ondevice.core.method import Placement
from ondevice.data import Rows, read_rows
from ondevice.data.reading import check_columns
from ondevice.models import load_tokenizer
from ondevice.models.load import artifact_tokenizer
from ondevice.planning.artifacts import plan_artifact
from ondevice.planning.estimate import plan_run
from ondevice.planning.render import render
from ondevice.training.length import with_length


def dry_run_model(config: RunConfig, placement: Placement, json: bool) -> None:
    """Check a run of `ondevice train`, and print its plan."""
    config, notes = with_length(
        config, _read_rows(config), fits=lambda measured: plan_run(measured, placement).fits
    )
    if config.data.strict_columns:
        tokenizer = load_tokenizer(config.model.source, config.model.revision)
        length = config.data.max_length_tokens
        assert length is not None  # noqa: S101 `with_length` has taken it from the rows
        _check_columns(config, tokenizer, length)
    if config.chosen:
        notes = (config.chosen, *notes)
    _print_plan(config, plan_run(config, placement), notes, json)


def dry_run_artifact(artifact: Path, config: RunConfig, json: bool) -> None:
    """Check a run of `ondevice run`, and print its plan."""
    manifest = read_manifest(artifact)
    _read_rows(config, manifest.task)
    if config.data.strict_columns:
        length = max(manifest.lengths_tokens)
        _check_columns(config, artifact_tokenizer(artifact), length, manifest.task)
    plan = plan_artifact(artifact, manifest, config.train.memory_limit_bytes)
    _print_plan(config, plan, (), json)


def _read_rows(config: RunConfig, task: str | None = None) -> Rows:
    """Read the rows of a dry run, so that bad ones are reported; return those to train on."""
    rows, *_ = [
        read_rows(path, task=config.data.task or task, columns=config.data.columns)
        for path in filter(None, (config.data.path, config.data.eval_path))
    ]
    return rows


def _check_columns(
    config: RunConfig, tokenizer: Any, length_tokens: int, task: str | None = None
) -> None:
    """Refuse the columns that the run would refuse, according to the tokenizer's template."""
    data = config.data
    for path in filter(None, (data.path, data.eval_path)):
        check_columns(
            path,
            tokenizer,
            task=data.task or task,
            columns=data.columns,
            max_length_tokens=length_tokens,
            train_on_prompt=data.train_on_prompt,
        )


def _print_plan(config: RunConfig, estimate: Any, notes: tuple[str, ...], json: bool) -> None:
    if json:
        print_json({"config": config.model_dump(mode="json"), "plan": estimate.to_dict()})
    else:
        for note in notes:
            err.print(note, markup=False)
        out.print(render(estimate))
