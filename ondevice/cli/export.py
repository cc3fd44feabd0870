"""`ondevice export` and `ondevice verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.api.runfile import RunConfig
from ondevice.cli import common, flags
from ondevice.cli.common import err, mebibytes, print_json, show, show_table, stages, table
from ondevice.core.errors import ConfigError, VerificationError
from ondevice.core.registry import targets


@flags.with_settings(
    "model",
    "method",
    "data.path",
    "data.task",
    "data.columns",
    "train.memory_limit_bytes",
    "train.seed",
    "export",
    without=("model.classes",),
)
def export(
    target_dir: common.Out = None,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    list_targets: Annotated[bool, typer.Option("--list", help="List the targets.")] = False,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Export the training step as a program for another device, and check the program."""
    from ondevice.api import export as artifacts

    if list_targets:
        show_table({spec.name: spec.summary for spec in targets()}, json)
        return
    run_config = RunConfig.load(config, overrides)
    if "data.path" in overrides:
        run_config.check_data()
    if dry_run:
        jobs = artifacts.export_jobs(run_config)
        problems = artifacts.problems_of(jobs)
        if problems:
            raise artifacts.refusal(jobs[0], problems)
        show({"problems": [], "ok": True}, "export check passed", json)
        return
    if target_dir is None:
        raise ConfigError("no folder is given", expected="--out DIR")
    with stages(quiet or json):
        reports = artifacts.export_each(run_config, target_dir, overwrite=overwrite)
    _show(reports, json)


def _show(reports: list[Any], json: bool) -> None:
    if json:
        values = []
        for report in reports:
            fields = {name: getattr(report, name) for name in report.__dataclass_fields__}
            fields["partition"] = {
                name: [part.model_dump() for part in parts]
                for name, parts in report.partition.items()
            }
            values.append(fields)
        print_json(values[0] if len(values) == 1 else {"artifacts": values})
        return
    for report in reports:
        for warning in report.warnings:
            err.print(f"warning: {warning}", markup=False)
        largest = max(report.planned_bytes, key=report.planned_bytes.__getitem__)
        kernels = ", ".join(report.custom_ops)
        values = {
            "artifact": str(report.path),
            "program": mebibytes(report.program_bytes),
            "planned memory": mebibytes(report.planned_bytes[largest]),
            "lowering": f"{report.lowering_s:.0f} s",
            "kernels of this project": kernels or "none: a stock runtime runs it",
        }
        for part in report.partition[largest]:
            values[f"train_step on {part.backend}"] = (
                f"{part.operators} operators in {part.calls} calls, {mebibytes(part.bytes)}"
            )
        table(values | _against_eager(report.check))


def _against_eager(check: dict[str, Any]) -> dict[str, str]:
    if "max_rel_gradient_error" in check:
        return {
            "gradient error against autodiff": f"{check['max_rel_gradient_error']:.1e}",
            "loss error against eager": f"{check['max_rel_loss_error']:.1e}",
            **_cosines("against autodiff over the same weights", check, ""),
            **_cosines("against float32", check, "_float32"),
        }
    if "max_rel_loss_error_replayed" in check:
        return {
            "loss error against eager": f"{check['max_rel_loss_error_replayed']:.1e}",
            "adapter error against eager": f"{check['max_abs_adapter_error']:.1e}",
        }
    directions = check["directions"]
    agree = check["sign_agreement"] * directions
    return {
        "checked in": check["backend"],
        "loss error against eager": f"{check['loss_error']:.1e}",
        "update error against eager": f"{check['adapter_error']:.1e}",
        "signs of projected gradients": f"{agree:.0f} of {directions} as in float32",
    }


def _cosines(against: str, check: dict[str, Any], suffix: str) -> dict[str, str]:
    """Return a line on the cosines of gradients, if they were measured and show rounding."""
    cosine = check.get(f"gradient_cosine{suffix}")
    if cosine is None or "gradient_cosine_float32" not in check:
        return {}
    least = check[f"min_gradient_cosine{suffix}"]
    median = check[f"median_gradient_cosine{suffix}"]
    text = f"{cosine:.4f}; by tensor min {least:.4f}, median {median:.4f}"
    return {f"gradient cosine {against}": text}


def verify(
    artifact: Annotated[Path, typer.Argument(help="An artifact that `ondevice export` wrote.")],
    steps: Annotated[
        int | None,
        typer.Option("--steps", "-n", min=1, help="Training steps of a CPU program (default: 20)."),
    ] = None,
    directions: Annotated[
        int | None,
        typer.Option(
            "--directions", min=1, help="Projected gradients of an NPU program (default: 8)."
        ),
    ] = None,
    perturbation_scale: Annotated[
        list[float] | None,
        typer.Option(
            "--perturbation-scale", help="Compare an NPU program at this scale (repeat for more)."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help=f"Rows to train on: {common.ROWS}.")
    ] = None,
    model: flags.Model = None,
    json: common.Json = False,
) -> None:
    """Compare an exported program with eager PyTorch.

    A CPU program runs training steps; an NPU program computes projected gradients in a
    simulator."""
    from ondevice.api.verify import verify as compare

    result = compare(
        artifact,
        steps=steps,
        data=Path(data) if data else None,
        model=model,
        directions=directions,
        perturbation_scales=tuple(perturbation_scale or ()),
    )
    scales = result.get("scales", [result])
    if json:
        print_json(result)
    else:
        for figures in scales:
            hidden = ("scales", "broken")
            table({name: value for name, value in figures.items() if name not in hidden})
    if not result["ok"]:
        problems = [problem for figures in scales for problem in figures.get("broken", [])]
        errors = [f"{name} {result[name]:.3g}" for name in result if name.endswith("_error")]
        raise VerificationError(
            "the program differs from eager PyTorch",
            received="; ".join(problems) or ", ".join(errors),
        )
