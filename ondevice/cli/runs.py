"""`ondevice train`, `run`, `replay` and `eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, mebibytes, out, overrides, print_json, share, table
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, ConfigError


@common.with_run_options()
@common.with_method_options
def train(
    first: common.FirstModel = None,
    config: common.Config = None,
    model: common.Model = None,
    adapter: common.AdapterPath = None,
    settings: common.Settings = None,
    resume: common.Resume = False,
    overwrite: common.Overwrite = False,
    force: common.Force = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
    *,
    method_options: dict[str, Any],
    run_options: dict[str, Any],
) -> None:
    """Fine-tune in eager PyTorch, or in MLX: any of the methods."""
    from ondevice.api.runfile import RunConfig

    flags = (
        overrides(settings, model__source=common.model_of(first, model))
        | method_options
        | run_options
    )
    run_config = RunConfig.load(config, flags)
    run_config.check_data()  # before the frameworks, which take seconds to import
    common.check_model(run_config.model.source, run_config.model.revision)
    from ondevice.api.train import train as train_run
    from ondevice.planning.devices import place

    placement = place(run_config)
    if dry_run:
        if placement.rank == 0:  # under torchrun every rank runs this verb, and one of them prints
            _dry_run(run_config, placement, json)
        return
    with _progress(json or quiet) as sink:
        trained = train_run(
            run_config,
            resume=resume,
            overwrite=overwrite,
            force=force,
            adapter=adapter,
            sinks=[sink],
        )
    if placement.rank == 0:
        _finish(trained, json)


@common.with_run_options(
    without=(
        "--method",
        "--revision",
        "--dtype",
        "--packing",
        "--batch-size",
        "--max-length",
        "--backend",
        "--seed",
    )
)
def run(
    artifact: Annotated[Path, typer.Argument(help="An artifact that `ondevice export` wrote.")],
    config: common.Config = None,
    adapter: common.AdapterPath = None,
    settings: common.Settings = None,
    resume: common.Resume = False,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
    *,
    run_options: dict[str, Any],
) -> None:
    """Fine-tune with an exported program in its own runtime, on this machine."""
    from ondevice.api.export import run_config as resolve

    run_config = resolve(artifact, config, overrides(settings) | run_options)
    run_config.check_data()
    if dry_run:
        from ondevice.artifact.manifest import read_manifest
        from ondevice.planning.artifacts import plan_artifact

        manifest = read_manifest(artifact)
        _read_rows(run_config, manifest.task)
        _print_plan(
            run_config,
            plan_artifact(artifact, manifest, run_config.train.memory_limit_bytes),
            (),
            json,
        )
        return
    from ondevice.api.train import run_artifact

    with _progress(json or quiet) as sink:
        trained = run_artifact(
            artifact, run_config, resume=resume, overwrite=overwrite, adapter=adapter, sinks=[sink]
        )
    _finish(trained, json)


def replay(
    log: Annotated[Path, typer.Argument(help="A run's folder, or its events.jsonl.")],
    target_dir: common.Out = None,
    steps: common.Steps = None,
    artifact: Annotated[
        Path | None, typer.Option("--artifact", help="The program, for a run of `ondevice run`.")
    ] = None,
    adapter: common.AdapterPath = None,
    json: common.Json = False,
) -> None:
    """Rebuild a zeroth-order run's adapter from its log: the seed and one scalar a query."""
    from ondevice.api.evaluate import replay as replay_run
    from ondevice.artifact.adapter import save_adapter

    warnings: list[str] = []
    rebuilt = replay_run(log, steps=steps, artifact=artifact, adapter=adapter, warn=warnings.append)
    if rebuilt is None:
        raise ConfigError(
            "the run trained the whole model; its log rebuilds no adapter",
            hint="resume from its checkpoint",
        )
    folder = target_dir or (log if log.is_dir() else log.parent) / "adapter-replayed"
    save_adapter(rebuilt, folder)
    if json:
        print_json({"adapter": folder, "warnings": warnings})
        return
    for warning in warnings:
        err.print(f"warning: {warning}", markup=False)
    out.print(f"adapter rebuilt in {folder}", markup=False)


def evaluate(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model (hub id, directory, .gguf, package:...), or an artifact.",
        ),
    ] = None,
    model: common.Model = None,
    revision: common.Revision = None,
    dtype: common.Dtype = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help="Rows: JSON, CSV, Excel, Parquet, text, a folder, or a data set's name.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            help="A benchmark (mmlu, gsm8k, mt_bench), a template (sst2, ...) or your .yaml file.",
        ),
    ] = None,
    adapter: common.AdapterPath = None,
    rows: Annotated[
        int | None, typer.Option("--rows", "--limit", min=1, help="Only the first so many rows.")
    ] = None,
    columns: common.Columns = None,
    strict_columns: common.StrictColumns = False,
    max_length: common.MaxLength = None,
    shots: Annotated[
        int | None,
        typer.Option("--shots", min=0, help="Worked examples before each question (mmlu, gsm8k)."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", min=1, help="Tokens an answer, at most (gsm8k, mt_bench)."
        ),
    ] = None,
    target_dir: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of a benchmark's answers; else runs/eval-TASK."),
    ] = None,
    overwrite: common.Overwrite = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Compute loss and accuracy (by label likelihood) of a model or an artifact, with or without an adapter; or a
    benchmark."""
    from ondevice.data.readers.records import check_source
    from ondevice.data.reading import named_task
    from ondevice.data.tasks.benchmarks import BENCHMARKS, find_benchmark

    source = common.model_of(first, model)
    if source is None:
        raise ConfigError(
            "no model is given", expected="--model, or a model or an artifact as the first word"
        )
    if data is None:
        raise ConfigError("no data is given", expected="--data FILE")
    name = find_benchmark(task)
    if name is None:  # before the frameworks, which take seconds to import
        check_source(data)
        if task is not None:
            named_task(task, data)
    if not Path(source).is_dir():  # which may be an artifact, or a network of a method's own
        common.check_model(source, revision)
    from ondevice.api.evaluate import evaluate as evaluate_rows

    flags = {
        "--shots": shots,
        "--max-new-tokens": max_new_tokens,
        "--out": target_dir,
        "--overwrite": overwrite,
    }
    if name is not None and columns:
        raise ConfigError(
            "--column is not for a benchmark",
            expected="the columns of the benchmark",
            received=columns[0],
        )
    used = [flag for flag, value in flags.items() if value]
    if name is None and used:
        raise ConfigError(
            f"{used[0]} is for a benchmark",
            expected=f"--task {' or '.join(BENCHMARKS)}",
            received=task,
        )
    chosen = {"revision": revision, **({} if dtype is None else {"dtype": dtype})}
    if name is not None:
        limits = chosen | {
            "rows": rows,
            "max_length_tokens": max_length,
            "max_new_tokens": max_new_tokens,
        }
        _benchmark(source, name, Path(data), json, quiet, adapter=adapter, shots=shots or 0, out=target_dir,
                   overwrite=overwrite, **limits)  # fmt: skip
        return
    named = common.columns_of(columns)
    result = evaluate_rows(
        source,
        Path(data),
        task=task,
        adapter=adapter,
        rows=rows,
        columns=named,
        max_length_tokens=max_length,
        strict_columns=strict_columns,
        **chosen,
    )
    if json:
        print_json(
            result.figures()
            | {"correct": result.correct, "accuracy_interval": result.accuracy_interval}
        )
    else:
        figures = result.figures() | {"accuracy": share(result.figures(), result.accuracy_interval)}
        table({"correct": result.correct} | figures)


def _benchmark(source: str, task: str, data: Path, json: bool, quiet: bool, **options: Any) -> None:
    from ondevice.api.benchmark import benchmark
    from ondevice.training.progress import RowProgress

    with RowProgress(silent=json or quiet) as progress:
        result = benchmark(source, task, data, on_row=progress, **options)
    figures = result.figures()
    if json:
        print_json(figures)
    else:
        table({
            name: share(group, group.get("accuracy_interval")) or group["rows"]
            for name, group in result.groups.items()
        })  # fmt: skip
        hidden = ("groups", "accuracy_interval", "interrupted")
        table({name: value for name, value in figures.items() if name not in hidden} | {
            "accuracy": share(figures, result.accuracy_interval)})  # fmt: skip
        if task == "mt_bench":
            err.print(
                "not judged: the answers have the layout of FastChat's model answers, for a judge",
                markup=False,
            )
    if result.interrupted:
        err.print(
            f"stopped after {result.rows} rows; their answers are in {result.answers}", markup=False
        )
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _progress(silent: bool) -> Any:
    from ondevice.training.progress import ProgressSink

    return ProgressSink(silent=silent)


def _read_rows(config: Any, task: str | None = None) -> Any:
    """Read the rows of a dry run, where bad ones are found now and not after loading; return those to train on."""
    from ondevice.data import read_rows

    rows, *_ = [
        read_rows(path, task=config.data.task or task, columns=config.data.columns)
        for path in filter(None, (config.data.path, config.data.eval_path))
    ]
    return rows


def _dry_run(config: Any, placement: Any, json: bool) -> None:
    from ondevice.planning.estimate import plan_run
    from ondevice.training.length import with_length

    config, notes = with_length(config, _read_rows(config))
    if config.chosen:
        notes = (config.chosen, *notes)
    _print_plan(config, plan_run(config, placement), notes, json)


def _print_plan(config: Any, estimate: Any, notes: tuple[str, ...], json: bool) -> None:
    from ondevice.planning.render import render

    if json:
        print_json({"config": config.model_dump(mode="json"), "plan": estimate.to_dict()})
    else:
        for note in notes:
            err.print(note, markup=False)
        out.print(render(estimate))


def _finish(trained: Any, json: bool) -> None:
    from ondevice.training.progress import describe_data

    values = trained.to_dict()
    if json:
        print_json(values)
    else:
        shown = {
            key: value
            for key, value in values.items()
            if key not in ("evaluation", "interrupted", "overlap", "data") and value is not None
        }
        shown["peak_memory_bytes"] = mebibytes(values["peak_memory_bytes"])
        if values["evaluation"]:
            shown |= {
                f"evaluation_{key}": values["evaluation"][key]
                for key in ("loss", "accuracy", "f1")
                if values["evaluation"].get(key) is not None
            }
        table(shown)
    if (
        values["data"].get("train", {}).get("streamed")
    ):  # at the start these were known of the first window alone
        err.print("\n".join(describe_data("train", values["data"]["train"])), markup=False)
    if values["unused_rows"]:
        err.print(
            f"warning: {values['unused_rows']} rows were not used; `ondevice data FILE` lists them",
            markup=False,
        )
    if trained.result.interrupted:
        again = f"everything is saved. To go on: {common.resumed_command()}"
        err.print(
            f"stopped after step {trained.result.steps}; {again}", markup=False, soft_wrap=True
        )
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
