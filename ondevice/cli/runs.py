"""`ondevice train`, `run`, `replay` and `eval`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.api.runfile import RunConfig
from ondevice.cli import common, flags
from ondevice.cli.common import err, mebibytes, print_json, show, table
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, ConfigError
from ondevice.core.registry import naming_methods
from ondevice.training.choices import place
from ondevice.training.progress import ProgressSink, describe_data

Artifact = Annotated[Path, typer.Argument(help="An artifact that `ondevice export` wrote.")]


@flags.with_settings("model", "data", "method", "train")
def train(
    adapter: common.AdapterPath = None,
    resume: common.Resume = False,
    overwrite: common.Overwrite = False,
    force: common.Force = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Fine-tune a model in PyTorch or MLX, with any of the methods."""
    from ondevice.models.choice import trains
    from ondevice.models.load import check_model

    run_config = RunConfig.load(config, overrides)
    # Mistakes are reported before the frameworks are imported, which takes seconds.
    run_config.check_data()
    check_model(run_config.model.source, run_config.model.revision)
    with naming_methods(partial(trains, config=run_config)):
        placement = place(run_config.method, run_config.train, run_config.model.device)
    if dry_run:
        from ondevice.cli.dry_run import dry_run_model

        if placement.rank == 0:  # under torchrun every rank runs this verb, and one prints
            dry_run_model(
                run_config,
                resume=resume,
                overwrite=overwrite,
                force=force,
                adapter=adapter,
                json=json,
            )
        return
    from ondevice.api import resolve

    with ProgressSink(silent=json or quiet, summary=False) as sink:
        options = resolve.options_of(adapter, [sink], resume=resume, overwrite=overwrite)
        trained = resolve.run(run_config, options, force)
    if placement.rank == 0:
        _finish(trained, json)


@flags.with_settings(
    "data",
    "method.learning_rate",
    "train",
    without=(
        "data.packing",
        "data.max_length_tokens",
        "train.batch_size",
        "train.backend",
        "train.seed",
    ),
)
def run(
    artifact: Artifact,
    adapter: common.AdapterPath = None,
    tokens: Annotated[
        Path | None,
        typer.Option("--tokens", help="Only write the rows as token ids, for a native host."),
    ] = None,
    resume: common.Resume = False,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Fine-tune with an exported program on this machine, in the program's runtime."""
    from ondevice.api.export import run_config as resolve

    run_config = resolve(artifact, config, overrides)
    run_config.check_data()
    if dry_run:
        from ondevice.cli.dry_run import dry_run_artifact

        dry_run_artifact(
            artifact, run_config, resume=resume, overwrite=overwrite, adapter=adapter, json=json
        )
        return
    from ondevice.api.train import run_artifact, write_tokens

    if tokens is not None:
        count = write_tokens(artifact, run_config, tokens)
        show({"tokens": tokens, "sequences": count}, f"{count} sequences in {tokens}", json)
        return
    with ProgressSink(silent=json or quiet, summary=False) as sink:
        trained = run_artifact(
            artifact, run_config, resume=resume, overwrite=overwrite, adapter=adapter, sinks=[sink]
        )
    _finish(trained, json)


def replay(
    log: Annotated[Path, typer.Argument(help="A run's folder, or its events.jsonl.")],
    target_dir: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write to (default: adapter-replayed)."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", "-n", help="Replay only this many steps.")
    ] = None,
    artifact: Annotated[
        Path | None, typer.Option("--artifact", help="Program of a run of `ondevice run`.")
    ] = None,
    adapter: common.AdapterPath = None,
    json: common.Json = False,
) -> None:
    """Rebuild a zeroth-order run's adapter from its log: the seed and one number per query."""
    from ondevice.api.replay import replay as replay_run
    from ondevice.artifact.adapter import save_adapter

    warnings: list[str] = []
    rebuilt = replay_run(log, steps=steps, artifact=artifact, adapter=adapter, warn=warnings.append)
    if rebuilt is None:
        raise ConfigError(
            "a run that trained all parameters has no adapter to rebuild",
            hint="resume it from its checkpoint",
        )
    folder = target_dir or (log if log.is_dir() else log.parent) / "adapter-replayed"
    save_adapter(rebuilt, folder)
    if not json:
        for warning in warnings:
            err.print(f"warning: {warning}", markup=False)
    show({"adapter": folder, "warnings": warnings}, f"adapter rebuilt in {folder}", json)


def evaluate(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model (hub id, folder, .gguf file, package:NAME), or an artifact.",
        ),
    ] = None,
    model: flags.Model = None,
    revision: flags.Revision = None,
    dtype: flags.Dtype = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help=f"Rows to evaluate: {common.ROWS}.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="A benchmark (mmlu, gsm8k, mt_bench), a template (sst2, ...), or a .yaml file.",
        ),
    ] = None,
    adapter: common.AdapterPath = None,
    rows: Annotated[
        int | None, typer.Option("--rows", "--limit", min=1, help="Evaluate only this many rows.")
    ] = None,
    columns: flags.Columns = None,
    strict_columns: flags.StrictColumns = False,
    max_length: flags.MaxLength = None,
    shots: Annotated[
        int | None,
        typer.Option("--shots", min=0, help="Solved examples before each question (mmlu, gsm8k)."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Most tokens per answer (gsm8k, mt_bench)."),
    ] = None,
    target_dir: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Folder for a benchmark's answers (default: runs/eval-TASK)."
        ),
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option("--predictions", help="Write a JSON line with each row's prediction."),
    ] = None,
    overwrite: common.Overwrite = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Compute loss and accuracy, or a benchmark, of a model, an artifact or what a run trained.

    Accuracy compares the likelihoods of the labels. --adapter evaluates with an adapter, as it was trained."""
    from ondevice.cli import evaluation

    source, adapter = common.model_or_adapter(first, model, adapter)
    if source is None:
        raise ConfigError(
            "no model is given", expected="--model, or a model, artifact or run as the first word"
        )
    if data is None:
        raise ConfigError("no data is given", expected="--data FILE")
    benchmark = evaluation.check(source, data, task, revision)
    chosen = {
        "adapter": adapter,
        "rows": rows,
        "max_length_tokens": max_length,
        "revision": revision,
    }
    if dtype is not None:
        chosen["dtype"] = dtype
    if benchmark is not None:
        if predictions is not None:
            raise ConfigError(
                "--predictions is not for a benchmark",
                expected="--out, where a benchmark writes its answers",
                received=f"--predictions {predictions}",
            )
        if columns:
            raise ConfigError(
                "--column is not for a benchmark",
                expected="the columns of the benchmark",
                received=columns[0],
            )
        chosen |= {"shots": shots or 0, "max_new_tokens": max_new_tokens}
        chosen |= {"out": target_dir, "overwrite": overwrite}
        evaluation.run_benchmark(source, benchmark, Path(data), json, quiet, **chosen)
        return
    for_benchmarks = {
        "--shots": shots,
        "--max-new-tokens": max_new_tokens,
        "--out": target_dir,
        "--overwrite": overwrite,
    }
    if used := [flag for flag, value in for_benchmarks.items() if value]:
        raise ConfigError(
            f"{used[0]} is only for a benchmark",
            expected=f"--task {' or '.join(evaluation.BENCHMARKS)}",
            received=task,
        )
    chosen |= {"task": task, "strict_columns": strict_columns, "predictions": predictions}
    evaluation.evaluate_rows(source, Path(data), json, columns=flags.columns_of(columns), **chosen)


def _finish(trained: Any, json: bool) -> None:
    values = trained.to_dict()
    if json:
        print_json(values)
    else:
        hidden = ("evaluation", "interrupted", "overlap", "experts", "data")
        shown = {key: value for key, value in values.items() if key not in hidden}
        shown["peak_memory_bytes"] = mebibytes(values["peak_memory_bytes"])
        for key in ("loss", "accuracy", "f1"):
            shown[f"evaluation_{key}"] = (values["evaluation"] or {}).get(key)
        table(shown)
    if values["data"].get("train", {}).get("streamed"):  # at the start only one window was known
        err.print("\n".join(describe_data("train", values["data"]["train"])), markup=False)
    if values["unused_rows"]:
        first = f", such as {trained.problems[0]}" if trained.problems else ""
        err.print(
            f"warning: {values['unused_rows']} rows were not used{first}; "
            "`ondevice data FILE` lists them",
            markup=False,
            soft_wrap=True,
        )
    if trained.result.interrupted:
        err.print(
            f"stopped after step {trained.result.steps}; everything is saved. "
            f"To go on: {common.resumed_command()}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
