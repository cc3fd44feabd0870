"""`ondevice fleet`: many devices train one adapter and send only numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, out, overrides, print_json, table
from ondevice.cli.fleet_carry import carry
from ondevice.cli.fleet_flower import LocalSteps, begin, certificates, device, server
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, ConfigError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="Devices.")]
RoundCount = Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds.")]
Dirichlet = Annotated[
    float | None, typer.Option("--dirichlet", help="Split the rows by label, as 0.1; else evenly.")
]
Log = Annotated[Path, typer.Argument(help="A fleet's folder, its fleet.db, or a *.fleetlog file.")]


@app.callback()
def private_files(context: typer.Context) -> None:
    """Many devices train one adapter and send only numbers."""
    from ondevice.artifact.files import private

    context.with_resource(private())  # adapters, keys, and paths of rows


@app.command()
@common.with_run_options(
    without=("--packing", "--streaming", "--steps", "--backend", "--memory-limit"), loop=False
)
@common.with_method_options
def simulate(
    first: common.FirstModel = None,
    config: common.Config = None,
    model: common.Model = None,
    devices: Devices = None,
    rounds: RoundCount = None,
    local_steps: LocalSteps = None,
    dirichlet: Dirichlet = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="`own`: in this process. `flower`: in Flower's engine, on Ray's actors.",
        ),
    ] = "own",
    settings: common.Settings = None,
    resume: common.Resume = False,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
    *,
    method_options: dict[str, Any],
    run_options: dict[str, Any],
) -> None:
    """Run a fleet of simulated devices in one process, with splits, dropouts, late and hostile devices."""
    from ondevice.fleet.config import FleetRun

    flags = overrides(
        settings,
        model__source=common.model_of(first, model),
        simulation__devices=devices,
        simulation__dirichlet=dirichlet,
        fleet__rounds=rounds,
        fleet__local_steps=local_steps,
    )
    run = FleetRun.load(config, flags | method_options | run_options)
    run.check_data()
    if dry_run:
        print_json({"config": run.model_dump(mode="json")}) if json else table(
            run.fleet.model_dump() | run.simulation.model_dump()
        )
        return
    if engine not in ("own", "flower"):
        raise ConfigError(
            "an engine that does not exist", expected="own or flower", received=engine
        )
    if engine == "flower":
        from ondevice.fleet.engine import simulate_with_flower

        result = simulate_with_flower(run, resume=resume, overwrite=overwrite)
    else:
        from ondevice.fleet.simulate import simulate as simulate_fleet

        result = simulate_fleet(
            run,
            resume=resume,
            overwrite=overwrite,
            on_round=lambda done: None if json or quiet else _say(done),
        )
    values = result.to_dict()
    print_json(values) if json else table(
        {name: value for name, value in values.items() if name != "curve"}
    )
    if result.interrupted:
        err.print(f"stopped after round {result.rounds}; everything is saved. To go on: {common.resumed_command()}",
                  markup=False, soft_wrap=True)  # fmt: skip
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _say(done: Any) -> None:
    loss = "no answers" if done.loss is None else f"loss {done.loss:.4f}"
    err.print(
        f"round {done.number + 1}/{done.rounds}  {loss}  {done.answers} answers  {done.refused} refused",
        markup=False,
    )


@app.command()
def replay(
    log: Log,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=0, help="Only the first so many rounds.")
    ] = None,
    target_dir: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Write the adapter too: a folder. Loads the model."),
    ] = None,
    model: common.Model = None,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Rebuild a fleet's adapter from its log: no data, no forward pass, and without --out no model."""
    from ondevice.fleet.log import read_file
    from ondevice.fleet.log import replay as replay_log

    content = read_file(log)
    state = replay_log(content, rounds=rounds)
    taken = content.events_until(rounds)
    if content.unfinished:
        err.print(
            f"warning: the log ends with {content.unfinished} bytes of a round that is not whole",
            markup=False,
        )
    if target_dir is not None:
        import tempfile

        from ondevice.artifact.adapter import save_adapter
        from ondevice.fleet.frozen import Space, matched
        from ondevice.fleet.member import load_vector, vector_name
        from ondevice.fleet.open import open_for

        session, _ = open_for(content.charter, model)
        name = vector_name(session, content.charter.session_size)
        with tempfile.TemporaryDirectory() as folder:
            if content.charter.subspace == "given":
                files = matched(taken, list(content.frozen.values()))
                Space(content.charter, session, name, Path(folder)).enter(taken, files.__getitem__)
        load_vector(session, state.flat(), name)
        adapter = session.adapter()
        if adapter is not None:
            save_adapter(adapter, target_dir)
    values = {
        "final_hash": state.digest().hex(),
        "rounds": state.round,
        "fleet": f"{content.charter.id:08x}",
        "elements": state.size,
        "adapter": target_dir,
    }
    print_json(values) if json else table(values)


@app.command()
def status(
    log: Log,
    delta: Annotated[
        float, typer.Option("--delta", help="Of epsilon, where the charter has noise.")
    ] = 1e-5,
    json: common.Json = False,
) -> None:
    """Show a fleet's charter, its rounds, their losses and bytes, and the hash of its adapter."""
    from ondevice.fleet.status import status as status_of

    values = status_of(log, delta)
    if json:
        print_json(values)
        return
    table(
        {name: value for name, value in values.items() if name not in ("rounds_table", "charter")}
    )
    for row in values["rounds_table"][-10:]:
        loss = "no answers" if row["loss"] is None else f"loss {row['loss']:.4f}"
        if row["bytes"] and not row["answers"]:
            out.print(
                f"before round {row['round']}: a new subspace, {row['bytes']} bytes", markup=False
            )
        else:
            out.print(
                f"round {row['round']}: {loss}, {row['answers']} answers, {row['bytes']} bytes",
                markup=False,
            )


@app.command()
def plot(
    fleets: Annotated[list[Path], typer.Argument(help="Folders of simulated fleets.")],
    target: common.Out = None,
    json: common.Json = False,
) -> None:
    """Draw accuracy by round and by bytes of simulated fleets: --out FILE.png, .svg or .pdf."""
    from ondevice.fleet.plot import curve_of
    from ondevice.fleet.plot import plot as draw

    target = target or Path("fleet.png")
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            "pictures of another kind", expected=".png, .svg or .pdf", received=target.name
        )
    draw(fleets, target)
    values = {
        "picture": str(target),
        "curves": {str(folder): curve_of(folder) for folder in fleets},
    }
    print_json(values) if json else out.print(str(target), markup=False)


for verb in (begin, server, device, certificates):
    app.command()(verb)
app.add_typer(carry, name="carry")
