"""`ondevice plan` and `ondevice doctor`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.api.runfile import RunConfig
from ondevice.cli import common, flags
from ondevice.cli.common import err, out, print_json
from ondevice.core.capabilities import HalfOnGpu, OwnPrecision
from ondevice.core.errors import DoesNotFitError
from ondevice.core.registry import backend_for, spec_of, target


@flags.with_settings("model", "data", "method", "train", "export.quantize", without=("train.out",))
def plan(
    device: Annotated[
        str, typer.Option("--device", help="Device: oneplus-12, orin-nano-8gb, h200 or this.")
    ] = "this",
    device_file: Annotated[
        Path | None, typer.Option("--device-file", help="YAML file with more devices.")
    ] = None,
    exported: Annotated[
        bool, typer.Option("--exported", help="Plan the exported program, not eager PyTorch.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Measure this machine for ten seconds (methods that offload)."
        ),
    ] = False,
    force: common.Force = False,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Show the memory a run needs, part by part, and whether it fits. Nothing is loaded."""
    from ondevice.planning import advice, devices, estimate, render
    from ondevice.training import choices

    if "train.batch_size" in overrides:
        overrides["export.batch_size"] = overrides["train.batch_size"]
    if "data.max_length_tokens" in overrides:
        overrides["export.lengths_tokens"] = [overrides["data.max_length_tokens"]]
    run_config = RunConfig.load(config, overrides)
    if run_config.chosen and not json:
        err.print(run_config.chosen, markup=False)
    spec = target(run_config.export.target)
    if not exported or spec.kind == "torch":
        run_config = run_config.for_training()
    method_spec = spec_of(run_config.method)
    precise = method_spec.capability(OwnPrecision) and find_spec("torch") is not None
    if device == "this" and not exported and precise:
        placement = choices.place(run_config.method, run_config.train, run_config.model.device)
        chosen = choices.precision_of(run_config.model, run_config.method, placement)
        run_config = run_config.model_copy(update={"model": chosen.model, "method": chosen.method})
    if method_spec.capability(HalfOnGpu) and not exported:
        where = devices.find_device(device, device_file).torch_device
        model_config = choices.half_on_gpu(run_config.model, method_spec, where)
        run_config = run_config.model_copy(update={"model": model_config})
    rows = run_config.data
    sizes = None
    if rows.path is not None and rows.max_length_tokens is None and not exported:
        from ondevice.training.rows import OpenedRows, maximum_length

        run_config.check_data()

        def fits(tokens: int) -> bool:
            if device != "this":
                return True
            sections = run_config.method, run_config.train, run_config.model.device
            return estimate.plan_run(run_config.of_length(tokens), choices.place(*sections)).fits

        opened = OpenedRows(rows)
        length, notes = maximum_length(run_config.model, opened, fits=fits)
        sizes = opened.sizes
        run_config = run_config.of_length(length)
        for note in notes:
            err.print(note, markup=False)
    length_tokens = run_config.data.max_length_tokens or estimate.PLAN_LENGTH_TOKENS
    estimate_with = partial(
        estimate.plan,
        run_config.model.source,
        run_config.method,
        batch_size=run_config.export.batch_size if exported else run_config.train.batch_size,
        length_tokens=max(run_config.export.lengths_tokens) if exported else length_tokens,
        revision=run_config.model.revision,
        dtype=spec.dtype(run_config.model) if exported else run_config.model.dtype,
        export=run_config.export if exported else None,
        memory_limit_bytes=run_config.train.memory_limit_bytes,
        runtime=spec.runtime
        if exported
        else backend_for(run_config.method, run_config.train.backend),
        device=device,
        device_file=device_file,
        sizes=sizes,
    )
    planned = estimate_with()
    rates = None
    added: dict[str, Any] = {}
    if calibrate:
        rates = advice.measure(planned)
    if rates is not None:
        planned = estimate_with(rates=rates)
        added["offload"] = advice.predict_step(planned, rates)
    if recommendation := advice.recommend(planned, rates):
        added["recommendation"] = recommendation
    if json:
        print_json(planned.to_dict() | added)
    else:
        out.print(render.render(planned))
        if "offload" in added:
            for line in advice.describe(added["offload"]):
                out.print(line)
        for line in added.get("recommendation", {}).get("sentences", ()):
            out.print(line)
    if not planned.fits and not force:  # for scripts: an exit code, but no error message
        raise typer.Exit(DoesNotFitError.exit_code)


def doctor(
    target: Annotated[
        str | None, typer.Option("--target", help="Check only what this target needs.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Also run a kernel in every backend. Takes minutes.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Check the installed packages; name missing ones and how to install them."""
    from ondevice.planning import doctor as examination
    from ondevice.planning import render

    with err.status("looking for backends") as status:
        checks = examination.doctor(
            target, progress=lambda name: status.update(f"checking {name}"), full=full
        )
    code = examination.exit_code(checks)
    if json:
        print_json({"checks": [check.to_dict() for check in checks], "ok": code == 0, "full": full})
    else:
        out.print(render.render_checks(checks))
        if not full:
            out.print("No kernel was run: --full runs one in every backend.", markup=False)
    if code:
        raise typer.Exit(code)
