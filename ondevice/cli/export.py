"""`ondevice export` and `ondevice verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, mebibytes, out, overrides, print_json, stages, table
from ondevice.core.errors import ConfigError, VerificationError


@common.with_run_options(
    "--method", "--revision", "--dtype", "--data", "--task", "--column", "--learning-rate", "--memory-limit", "--seed",
    loop=False,
)  # fmt: skip
@common.with_method_options
def export(
    first: common.FirstModel = None,
    config: common.Config = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Where the program will run; --list names them.")
    ] = None,
    model: common.Model = None,
    target_dir: common.Out = None,
    length: Annotated[
        list[int] | None,
        typer.Option("--length", "--max-length", help="Length bucket in tokens (repeat)."),
    ] = None,
    batch_size: common.BatchSize = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            help="none, int8, q4, 8da4w or 8da8w; none or w8 on an NPU; nf4 or int8 for CUDA.",
        ),
    ] = None,
    soc: Annotated[
        list[str] | None,
        typer.Option(
            "--soc", help="Qualcomm chip of an NPU program, such as SM8650 (repeat), or all."
        ),
    ] = None,
    form: Annotated[str | None, typer.Option("--form", help="functional or stateful.")] = None,
    settings: common.Settings = None,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    list_targets: Annotated[bool, typer.Option("--list", help="List the targets.")] = False,
    json: common.Json = False,
    *,
    method_options: dict[str, Any],
    run_options: dict[str, Any],
) -> None:
    """Export the whole training step as a program for another device."""
    from ondevice.api import export as artifacts
    from ondevice.api.runfile import RunConfig
    from ondevice.core.registry import target as find_target
    from ondevice.core.registry import targets

    if list_targets:
        listed = {spec.name: spec.summary for spec in targets()}
        print_json(listed) if json else table(listed)
        return
    # An empty list is a flag that was not given: None leaves what the run file says.
    flags = overrides(
        settings,
        model__source=common.model_of(first, model),
        export__target=target,
        export__lengths_tokens=length or None,
        export__batch_size=batch_size,
        export__quantize=quantize,
        export__form=form,
        export__soc=soc or None,
    )
    run_config = RunConfig.load(config, flags | method_options | run_options)
    if "data.path" in run_options:
        run_config.check_data()
    if dry_run:
        problems = [
            problem
            for job in artifacts.export_jobs(run_config)
            for problem in find_target(run_config.export.target).check(job)
        ]
        if json:
            print_json({"problems": problems, "ok": not problems})
        if problems:
            raise ConfigError("cannot export: " + "; ".join(problems))
        if not json:
            out.print("nothing stands in the way of this export")
        return
    if target_dir is None:
        raise ConfigError("no folder is given", expected="--out DIR")
    with stages(quiet or json):
        reports = artifacts.export_each(run_config, target_dir, overwrite=overwrite)
    _show(reports, json)


def _show(reports: list[Any], json: bool) -> None:
    if json:
        values = [
            {name: getattr(report, name) for name in report.__dataclass_fields__}
            for report in reports
        ]
        for report_values in values:
            report_values["partition"] = {
                name: [share.model_dump() for share in shares]
                for name, shares in report_values["partition"].items()
            }
        print_json(values[0] if len(values) == 1 else {"artifacts": values})
        return
    for report in reports:
        for warning in report.warnings:
            err.print(f"warning: {warning}", markup=False)
        table(
            {
                "artifact": str(report.path),
                "program": mebibytes(report.program_bytes),
                "planned memory": mebibytes(max(report.planned_bytes.values())),
                "lowering": f"{report.lowering_s:.0f} s",
                "kernels of this project": ", ".join(report.custom_ops)
                or "none: a stock runtime runs it",
                **{
                    f"train_step on {share.backend}": f"{share.operators} operators in {share.calls} calls, "
                    f"{mebibytes(share.bytes)}"
                    for share in report.partition[
                        max(report.planned_bytes, key=report.planned_bytes.__getitem__)
                    ]
                },
                **_against_eager(report.check),
            }
        )


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
    return {
        "checked in": check["backend"],
        "loss error against eager": f"{check['loss_error']:.1e}",
        "update error against eager": f"{check['adapter_error']:.1e}",
        "signs of projected gradients": f"{check['sign_agreement'] * check['directions']:.0f} of "
        f"{check['directions']} as in float32",
    }


def _cosines(against: str, check: dict[str, Any], suffix: str) -> dict[str, str]:
    """A line on the cosines of gradients, where they were measured and rounding is to be seen in them."""
    whole = check.get(f"gradient_cosine{suffix}")
    if whole is None or "gradient_cosine_float32" not in check:
        return {}
    least, median = (check[f"{kind}_gradient_cosine{suffix}"] for kind in ("min", "median"))
    return {
        f"gradient cosine {against}": f"{whole:.4f}; by tensor min {least:.4f}, median {median:.4f}"
    }


def verify(
    artifact: Annotated[Path, typer.Argument(help="An artifact that `ondevice export` wrote.")],
    steps: Annotated[
        int | None,
        typer.Option("--steps", "-n", min=1, help="Training steps of a CPU's program (20)."),
    ] = None,
    directions: Annotated[
        int | None,
        typer.Option("--directions", min=1, help="Projected gradients of an NPU's program (8)."),
    ] = None,
    perturbation_scale: Annotated[
        list[float] | None,
        typer.Option(
            "--perturbation-scale", help="Compare an NPU's program at this scale (repeat)."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help=f"Rows to step on: {common.ROWS}.")
    ] = None,
    model: common.Model = None,
    json: common.Json = False,
) -> None:
    """Hold a program against eager PyTorch: training steps on a CPU, projected gradients in the NPU's simulator."""
    from ondevice.api.verify import verify as compare

    result = compare(
        artifact,
        steps=steps,
        data=Path(data) if data else None,
        model=model,
        directions=directions,
        perturbation_scales=tuple(perturbation_scale or ()),
    )
    if json:
        print_json(result)
    else:
        for figures in result.get("scales", [result]):
            table(
                {name: value for name, value in figures.items() if name not in ("scales", "broken")}
            )
    if not result["ok"]:
        broken = [
            line for figures in result.get("scales", [result]) for line in figures.get("broken", [])
        ]
        raise VerificationError(
            "the program does not follow eager PyTorch",
            received="; ".join(broken)
            or ", ".join(
                f"{name} {result[name]:.3g}" for name in result if name.endswith("_error")
            ),
        )
