"""`ondevice fleet`: many devices train one adapter and send only numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, out, overrides, print_json, table
from ondevice.core.errors import INTERRUPTED_EXIT_CODE, ConfigError

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Many devices train one adapter and send only numbers."
)
Devices = Annotated[int | None, typer.Option("--devices", min=1, help="Devices.")]
RoundCount = Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds.")]
LocalSteps = Annotated[int | None, typer.Option("--local-steps", min=1, help="Steps of a device before it answers.")]
Dirichlet = Annotated[float | None, typer.Option("--dirichlet", help="Split the rows by label, as 0.1; else evenly.")]
Log = Annotated[Path, typer.Argument(help="A fleet's folder, its fleet.db, or a *.fleetlog file.")]


@app.command()
@common.with_run_options(without=("--packing", "--streaming", "--steps", "--backend", "--memory-limit"), loop=False)
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
        str, typer.Option("--engine", help="`own`: in this process. `flower`: in Flower's engine, on Ray's actors.")
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
        raise ConfigError("an engine that does not exist", expected="own or flower", received=engine)
    if engine == "flower":
        from ondevice.fleet.engine import simulate_with_flower

        result = simulate_with_flower(run, resume=resume, overwrite=overwrite)
    else:
        from ondevice.fleet.simulate import simulate as simulate_fleet

        result = simulate_fleet(
            run, resume=resume, overwrite=overwrite, on_round=lambda done: None if json or quiet else _say(done)
        )
    values = result.to_dict()
    print_json(values) if json else table({name: value for name, value in values.items() if name != "curve"})
    if result.interrupted:
        err.print(f"stopped after round {result.rounds}; everything is saved. To go on: {common.resumed_command()}",
                  markup=False, soft_wrap=True)  # fmt: skip
        raise typer.Exit(INTERRUPTED_EXIT_CODE)


def _say(done: Any) -> None:
    loss = "no answers" if done.loss is None else f"loss {done.loss:.4f}"
    err.print(
        f"round {done.number + 1}/{done.rounds}  {loss}  {done.answers} answers  {done.refused} refused", markup=False
    )


@app.command()
def replay(
    log: Log,
    rounds: Annotated[int | None, typer.Option("--rounds", min=0, help="Only the first so many rounds.")] = None,
    target_dir: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the adapter too: a folder. Loads the model.")
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
        err.print(f"warning: the log ends with {content.unfinished} bytes of a round that is not whole", markup=False)
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
    delta: Annotated[float, typer.Option("--delta", help="Of epsilon, where the charter has noise.")] = 1e-5,
    json: common.Json = False,
) -> None:
    """Show a fleet's charter, its rounds, their losses and bytes, and the hash of its adapter."""
    from ondevice.fleet.status import status as status_of

    values = status_of(log, delta)
    if json:
        print_json(values)
        return
    table({name: value for name, value in values.items() if name not in ("rounds_table", "charter")})
    for row in values["rounds_table"][-10:]:
        loss = "no answers" if row["loss"] is None else f"loss {row['loss']:.4f}"
        if row["bytes"] and not row["answers"]:
            out.print(f"before round {row['round']}: a new subspace, {row['bytes']} bytes", markup=False)
        else:
            out.print(f"round {row['round']}: {loss}, {row['answers']} answers, {row['bytes']} bytes", markup=False)


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
        raise ConfigError("pictures of another kind", expected=".png, .svg or .pdf", received=target.name)
    draw(fleets, target)
    values = {"picture": str(target), "curves": {str(folder): curve_of(folder) for folder in fleets}}
    print_json(values) if json else out.print(str(target), markup=False)


Host = Annotated[str, typer.Option("--host", help="Address of the SuperLink.")]
Port = Annotated[int, typer.Option("--port", help="Port of the SuperLink.")]
Certificates = Annotated[
    Path | None,
    typer.Option("--certificates", help="Folder with ca.crt, and for the server server.pem and server.key."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: on one machine only.")]
Folder = Annotated[Path, typer.Argument(help="The fleet's folder, from `ondevice fleet begin`.")]


@app.command()
@common.with_run_options(
    "--method", "--revision", "--dtype", "--task", "--max-length", "--learning-rate", "--seed", "--out", loop=False
)
@common.with_method_options
def begin(
    first: common.FirstModel = None,
    config: common.Config = None,
    model: common.Model = None,
    local_steps: LocalSteps = None,
    settings: common.Settings = None,
    json: common.Json = False,
    *,
    method_options: dict[str, Any],
    run_options: dict[str, Any],
) -> None:
    """Begin a fleet: write its charter, which every device will check. Needs the model, and no data."""
    from ondevice.fleet.config import FleetRun

    flags = overrides(settings, model__source=common.model_of(first, model), fleet__local_steps=local_steps)
    run = FleetRun.load(config, flags | method_options | run_options)
    from ondevice.fleet.open import open_task
    from ondevice.fleet.store import Store

    run, session, source = open_task(run)
    if run.averages:
        from ondevice.fleet.averaging.arrays import arrays_of
        from ondevice.fleet.averaging.store import AdapterStore

        charter, arrays = run.adapter_charter(source), arrays_of(session)
        AdapterStore.create(run.train.out, charter, arrays).close()
        elements = sum(value.size for value in arrays.values())
    else:
        charter = run.charter(session, source)
        Store.create(run.train.out, charter).close()
        elements = charter.size
    values = {"fleet": f"{charter.id:08x}", "folder": str(run.train.out), "elements": elements}
    print_json({**values, "charter": charter.model_dump(mode="json")}) if json else table(values)


@app.command()
def server(
    folder: Folder,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds in all.")] = 100,
    devices: Annotated[int, typer.Option("--devices", min=1, help="Wait for so many devices.")] = 1,
    sample: Annotated[float, typer.Option("--sample", help="Share of the devices that a round asks.")] = 1.0,
    wait: Annotated[float, typer.Option("--wait", help="Longest wait for devices or answers, seconds.")] = 600.0,
    host: Host = "127.0.0.1",
    port: Port = 9092,
    certificates: Certificates = None,
    insecure: Insecure = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Run a fleet's rounds over Flower: a SuperLink and a ServerApp. Started again, it goes on from the last round."""
    from ondevice.fleet.flower import Link, serve
    from ondevice.fleet.status import status as status_of
    from ondevice.training.checkpoint import RunLock

    status_of(folder)  # there is a fleet, before anything is started
    settings = {"rounds": rounds, "least_devices": devices, "sample": sample, "wait_s": wait}
    say = (lambda line: None) if json or quiet else _line
    with RunLock(folder):
        serve(folder, Link(host, port, certificates, insecure), settings, say)
    values = status_of(folder)
    shown = {key: value for key, value in values.items() if key not in ("charter", "rounds_table")}
    print_json(shown) if json else table(shown)


@app.command()
def device(
    data: Annotated[str, typer.Option("--data", "-d", help="This device's rows; they stay here.")],
    target_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder of this device's copy of the fleet.")],
    first: common.FirstModel = None,
    task: common.Task = None,
    columns: common.Columns = None,
    model: common.Model = None,
    artifact: Annotated[
        Path | None, typer.Option("--artifact", help="An exported program instead of the model.")
    ] = None,
    batch_size: common.BatchSize = None,
    gives_subspace: Annotated[
        bool, typer.Option("--gives-subspace", help="This device's gradient may give the fleet's subspaces.")
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = 9092,
    certificates: Certificates = None,
    key: Annotated[Path | None, typer.Option("--key", help="This device's private key (devices/NAME.key).")] = None,
    insecure: Insecure = False,
) -> None:
    """Take part in a fleet over Flower: a SuperNode and a ClientApp, until it is stopped."""
    from ondevice.data.records import check_source
    from ondevice.fleet.device import DeviceSettings
    from ondevice.fleet.flower import Link, join

    check_source(data)
    settings = DeviceSettings(
        folder=str(target_dir),
        data=str(Path(data).absolute()),
        task=task,
        columns=common.columns_of(columns),
        model=common.model_of(first, model),
        artifact=None if artifact is None else str(artifact.absolute()),
        batch_size=batch_size or 4,
        gives_subspace=gives_subspace,
    )
    raise typer.Exit(join(settings, Link(host, port, certificates, insecure), key, _line))


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder to make them in.")],
    host: Annotated[list[str] | None, typer.Option("--host", help="Name or address of the server (repeat).")] = None,
    devices: Annotated[int, typer.Option("--devices", min=0, help="Make keys for so many devices.")] = 0,
    json: common.Json = False,
) -> None:
    """Make TLS certificates for a fleet's server, and key pairs for its devices."""
    from ondevice.fleet.certificates import make

    files = [str(file) for file in make(folder, tuple(host or ["localhost"]), devices)]
    print_json({"files": files}) if json else table(dict.fromkeys(files, ""))


carry = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Rounds as files below 2 kB, for devices without a network."
)
app.add_typer(carry, name="carry")
Number = Annotated[int, typer.Option("--device", min=0, max=2**64 - 1, help="The device's number.")]


QR = Annotated[
    bool, typer.Option("--qr", help="Also write each file as a QR code, FILE.png, and show it in a terminal.")
]


@carry.command("out")
def carry_out(
    folder: Folder,
    device: Number,
    to: Annotated[Path, typer.Option("--to", help="File to write, such as phone.odfleet.")],
    last: Annotated[bool, typer.Option("--last", help="Only what the device lacks: no task.")] = False,
    qr: QR = False,
    json: common.Json = False,
) -> None:
    """Write a round for a device: what it lacks, and its task; its first file also has the charter."""
    from ondevice.artifact.files import atomic_write
    from ondevice.fleet.carry import Desk
    from ondevice.fleet.store import Store
    from ondevice.training.checkpoint import RunLock

    _check_fleet(folder)
    with RunLock(folder), Store.open(folder) as store:
        files = Desk(store).out(device, last)
    names = [to if place == 0 else to.with_stem(f"{to.stem}-{place + 1}") for place in range(len(files))]
    for name, data in zip(names, files, strict=True):
        atomic_write(name, data)
    values = {"files": [str(name) for name in names], "bytes": [len(data) for data in files]}
    if qr:
        values["qr"] = [_picture(name, data) for name, data in zip(names, files, strict=True)]
    print_json(values) if json else table({str(name): f"{len(data)} bytes" for name, data in zip(names, files)})


@carry.command("in")
def carry_in(
    folder: Folder,
    files: Annotated[list[Path] | None, typer.Argument(help="Answers of devices.")] = None,
    close: Annotated[bool, typer.Option("--close", help="Then end the round.")] = False,
    json: common.Json = False,
) -> None:
    """Take answers from files, and end the round with --close; a refused answer is said, and the others are taken."""
    from ondevice.core.errors import FleetError
    from ondevice.fleet.carry import Desk
    from ondevice.fleet.qr import read
    from ondevice.fleet.store import Store
    from ondevice.training.checkpoint import RunLock

    refused: dict[str, str] = {}
    _check_fleet(folder)
    with RunLock(folder), Store.open(folder) as store:
        desk, taken, outcome = Desk(store), [], None
        for file in files or []:
            try:
                taken.append(desk.take(read(file), str(file)).device)
            except FleetError as error:
                refused[str(file)] = str(error)
        if close:
            outcome = desk.close()
        digest = desk.rounds.state.digest().hex()
    for error in refused.values():
        err.print(f"refused: {error}", markup=False)
    values = {
        "taken": taken,
        "refused": refused,
        "closed": None if outcome is None else outcome.round,
        "hash": digest,
    }
    print_json(values) if json else table(values)
    if refused:
        raise typer.Exit(FleetError.exit_code)


@carry.command("answer")
def carry_answer(
    files: Annotated[list[Path], typer.Argument(help="The round's files, in order.")],
    target_dir: Annotated[Path, typer.Option("--out", "-o", help="Folder of this device's copy of the fleet.")],
    data: Annotated[str | None, typer.Option("--data", "-d", help="This device's rows; they stay here.")] = None,
    to: Annotated[Path | None, typer.Option("--to", help="File for the answer.")] = None,
    task: common.Task = None,
    columns: common.Columns = None,
    model: common.Model = None,
    artifact: Annotated[
        Path | None, typer.Option("--artifact", help="An exported program instead of the model.")
    ] = None,
    batch_size: common.BatchSize = None,
    qr: QR = False,
    json: common.Json = False,
) -> None:
    """Be the device: apply a round's files, do its task on rows that stay here, and write the answer."""
    from ondevice.artifact.files import atomic_write
    from ondevice.data.records import check_source
    from ondevice.fleet.carry import Parcel, files_of, parcel_of
    from ondevice.fleet.device import Device, DeviceSettings
    from ondevice.fleet.qr import read

    if data is not None:
        check_source(data)
    end = Device(
        DeviceSettings(
            folder=str(target_dir),
            data=data or "",
            task=task,
            columns=common.columns_of(columns),
            model=model,
            artifact=None if artifact is None else str(artifact),
            batch_size=batch_size or 4,
        )
    )
    values: dict[str, Any] = {"answer": None}
    for file in files:
        parcel = parcel_of(read(file), str(file))
        if parcel.charter is not None:
            end.take({"charter": parcel.charter}, 0)
        reply = end.take({"events": parcel.events}, 0)
        values |= {"hash": reply["digest"].hex(), "rounds": reply["place"]}
        if parcel.task is None or parcel.device is None:
            continue
        if data is None or to is None:
            raise ConfigError("the file has a task", expected="--data with rows, and --to for the answer")
        answer = end.take({"task": parcel.task}, parcel.device)["answer"]
        (written,) = files_of(Parcel(device=parcel.device, answer=answer))
        atomic_write(to, written)
        values |= {"answer": str(to), "bytes": len(written)}
        if qr:
            values["qr"] = _picture(to, written)
    print_json(values) if json else table(values)


def _picture(name: Path, data: bytes) -> str:
    """Write a file's QR code beside it, and show it where somebody looks; returns its name."""
    from ondevice.fleet import qr

    picture = name.with_name(name.name + ".png")
    qr.write(data, picture)
    if err.is_terminal:
        err.print(qr.shown(data), markup=False, highlight=False)
    return str(picture)


def _line(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)


def _check_fleet(folder: Path) -> None:
    """Refuse a folder without a fleet before a lock is written into it."""
    from ondevice.fleet.store import Store

    Store.open(folder).close()
