"""`ondevice fleet carry`: a fleet's rounds as files, for devices without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.artifact.files import atomic_write
from ondevice.cli import common, flags
from ondevice.cli.common import err, print_json, show_table, table
from ondevice.cli.fleet_flower import Artifact, Copy, Folder
from ondevice.core.errors import ConfigError, FleetError
from ondevice.data.readers.files import check_source
from ondevice.fleet import qr
from ondevice.fleet.carry import Desk, Parcel, files_of, parcel_of
from ondevice.fleet.device import Device, DeviceSettings
from ondevice.fleet.qr import read
from ondevice.fleet.store import Store
from ondevice.training.checkpoint import RunLock

carry = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Carry rounds as files below 2 kB, for devices without a network.",
)
Number = Annotated[
    int, typer.Option("--device", min=0, max=2**64 - 1, help="Number of the device.")
]
QR = Annotated[
    bool,
    typer.Option(
        "--qr", help="Also write each file as a QR code, FILE.png, and show it in the terminal."
    ),
]


@carry.command("out")
def carry_out(
    folder: Folder,
    device: Number,
    to: Annotated[Path, typer.Option("--to", help="File to write, such as phone.odfleet.")],
    last: Annotated[
        bool, typer.Option("--last", help="Write only the missing rounds, without a task.")
    ] = False,
    qr: QR = False,
    json: common.Json = False,
) -> None:
    """Write a device's next file: the rounds it has not seen, and a task.

    The first file also has the charter."""
    _check_fleet(folder)
    with RunLock(folder), Store.open(folder) as store:
        files = Desk(store).out(device, last)
    names = [to, *(to.with_stem(f"{to.stem}-{number}") for number in range(2, len(files) + 1))]
    written = dict(zip(names, files, strict=True))
    for name, data in written.items():
        atomic_write(name, data)
    values = {"files": [str(name) for name in names], "bytes": [len(data) for data in files]}
    if qr:
        values["qr"] = [_picture(name, data) for name, data in written.items()]
    if json:
        print_json(values)
    else:
        table({str(name): f"{len(data)} bytes" for name, data in written.items()})


@carry.command("in")
def carry_in(
    folder: Folder,
    files: Annotated[
        list[Path] | None, typer.Argument(help="Files with the devices' replies.")
    ] = None,
    close: Annotated[bool, typer.Option("--close", help="End the round afterwards.")] = False,
    json: common.Json = False,
) -> None:
    """Read the devices' replies from files. A refused reply is reported; the others count."""
    refused: dict[str, str] = {}
    _check_fleet(folder)
    with RunLock(folder), Store.open(folder) as store:
        desk = Desk(store)
        taken = []
        outcome = None
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
    show_table(values, json)
    if refused:
        raise typer.Exit(FleetError.exit_code)


@carry.command("answer")
def carry_answer(
    files: Annotated[list[Path], typer.Argument(help="The round's files, in order.")],
    target_dir: Copy,
    data: Annotated[str | None, common.OwnRows] = None,
    to: Annotated[Path | None, typer.Option("--to", help="File for the reply.")] = None,
    task: flags.Task = None,
    columns: flags.Columns = None,
    strict_columns: flags.StrictColumns = False,
    model: flags.Model = None,
    artifact: Artifact = None,
    batch_size: flags.BatchSize = None,
    key: common.DeviceKey = None,
    epsilon: common.Epsilon = None,
    qr: QR = False,
    json: common.Json = False,
) -> None:
    """Act as the device: apply a round's files, do the task on its rows, write the reply."""
    if data is not None:
        check_source(data)
    end = Device(
        DeviceSettings(
            folder=str(target_dir),
            data=data or "",
            task=task,
            columns=flags.columns_of(columns),
            strict_columns=strict_columns,
            model=model,
            artifact=None if artifact is None else str(artifact),
            batch_size=batch_size or 4,
            key=None if key is None else str(key.absolute()),
            epsilon=epsilon,
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
            raise ConfigError(
                "the file has a task", expected="--data with rows, and --to for the reply"
            )
        answer = end.take({"task": parcel.task}, parcel.device)["answer"]
        (written,) = files_of(
            Parcel(device=parcel.device, answer=answer, signed=end.signed(answer))
        )
        atomic_write(to, written)
        values |= {"answer": str(to), "bytes": len(written)}
        if qr:
            values["qr"] = _picture(to, written)
    show_table(values, json)


def _picture(name: Path, data: bytes) -> str:
    """Write a file's QR code next to it, show it in a terminal, and return its name."""
    picture = name.with_name(name.name + ".png")
    qr.write(data, picture)
    if err.is_terminal:
        err.print(qr.shown(data), markup=False, highlight=False)
    return str(picture)


def _check_fleet(folder: Path) -> None:
    """Refuse a folder without a fleet, before a lock is written to it."""
    Store.open(folder).close()
