"""`ondevice fleet`: many devices train one adapter and send only numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.artifact.adapter import save_adapter
from ondevice.artifact.files import private
from ondevice.cli import common, flags
from ondevice.cli.common import err, out, print_json, show, show_table, table
from ondevice.cli.fleet_carry import carry
from ondevice.cli.fleet_flower import begin, certificates, device, server
from ondevice.cli.history import Picture, picture_file
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, ConfigError
from ondevice.fleet.config import FleetRun
from ondevice.fleet.engine import simulate_with_flower
from ondevice.fleet.frozen import Space, matched
from ondevice.fleet.log import replay as replay_log
from ondevice.fleet.member import load_vector, vector_name
from ondevice.fleet.open import check_rows_of, open_for
from ondevice.fleet.plot import curve_of
from ondevice.fleet.plot import plot as draw
from ondevice.fleet.simulate import simulate as simulate_fleet
from ondevice.fleet.status import status as status_of
from ondevice.fleet.store import read_file

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Log = Annotated[Path, typer.Argument(help="A fleet's folder, its fleet.db, or a *.fleetlog file.")]


@app.callback()
def private_files(context: typer.Context) -> None:
    """Train one adapter on many devices, which send only numbers."""
    context.with_resource(private())  # for adapters, keys, and paths of rows


@app.command()
@flags.with_settings(
    "model",
    "data",
    "method",
    "train.batch_size",
    "train.seed",
    "train.out",
    "fleet",
    "simulation",
    without=("data.packing", "data.streaming"),
    run=FleetRun,
)
def simulate(
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="Engine: `own` (this process) or `flower` (Flower's, with Ray's actors).",
        ),
    ] = "own",
    resume: common.Resume = False,
    overwrite: common.Overwrite = False,
    dry_run: common.DryRun = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Simulate a fleet in one process.

    Settings can split the rows and make devices drop out, reply late or lie."""
    run = FleetRun.load(config, overrides)
    run.check_data()
    if dry_run:
        run = check_rows_of(run)
        if json:
            print_json({"config": run.model_dump(mode="json")})
        else:
            table(run.fleet.model_dump() | run.simulation.model_dump())
        return
    if engine not in ("own", "flower"):
        raise ConfigError("unknown engine", expected="own or flower", received=engine)
    if engine == "flower":
        result = simulate_with_flower(run, resume=resume, overwrite=overwrite)
    else:
        result = simulate_fleet(
            run,
            resume=resume,
            overwrite=overwrite,
            on_round=lambda done: None if json or quiet else _print_round(done),
        )
    values = result.to_dict()
    if json:
        print_json(values)
    else:
        table({name: value for name, value in values.items() if name != "curve"})
    if result.interrupted:
        err.print(
            f"stopped after round {result.rounds}; everything is saved. "
            f"To go on: {common.resumed_command()}",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _print_round(done: Any) -> None:
    loss = "no replies"
    if done.loss is not None:
        loss = f"loss {done.loss:.4f}"
    err.print(
        f"round {done.number + 1}/{done.rounds}  {loss}  {done.answers} replies  "
        f"{done.refused} refused",
        markup=False,
    )


@app.command()
def replay(
    log: Log,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=0, help="Replay only this many rounds.")
    ] = None,
    target_dir: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Also write the adapter to this folder; needs the model."),
    ] = None,
    model: flags.Model = None,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Rebuild a fleet's adapter from its log, without data or forward passes.

    Without --out it needs no model and prints only the adapter's hash."""
    content = read_file(log)
    state = replay_log(content, rounds=rounds)
    taken = content.events_until(rounds)
    if content.unfinished:
        err.print(
            f"warning: the log ends with {content.unfinished} bytes of an unfinished round",
            markup=False,
        )
    if target_dir is not None:
        import tempfile

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
    show_table(values, json)


@app.command()
def status(
    log: Log,
    delta: Annotated[
        float, typer.Option("--delta", help="Delta of the privacy budget, if there is noise.")
    ] = 1e-5,
    json: common.Json = False,
) -> None:
    """Show a fleet's rounds with losses and bytes, and the hash of its adapter."""
    values = status_of(log, delta)
    if json:
        print_json(values)
        return
    hidden = ("rounds_table", "charter")
    table({name: value for name, value in values.items() if name not in hidden})
    for row in values["rounds_table"][-10:]:
        loss = "no replies"
        if row["loss"] is not None:
            loss = f"loss {row['loss']:.4f}"
        text = f"round {row['round']}: {loss}, {row['answers']} replies, {row['bytes']} bytes"
        if row["bytes"] and not row["answers"]:
            text = f"before round {row['round']}: a new subspace, {row['bytes']} bytes"
        out.print(text, markup=False)


@app.command()
def plot(
    fleets: Annotated[list[Path], typer.Argument(help="Folders of simulated fleets.")],
    target: Picture = None,
    json: common.Json = False,
) -> None:
    """Plot accuracy of simulated fleets by round and by bytes."""
    picture = picture_file(target, "fleet.png")
    draw(fleets, picture)
    curves = {str(folder): curve_of(folder) for folder in fleets}
    show({"picture": str(picture), "curves": curves}, str(picture), json)


for verb in (begin, server, device, certificates):
    app.command()(verb)
app.add_typer(carry, name="carry")
