"""`ondevice fleet begin`, `server`, `device` and `certificates`: a fleet over Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common, flags
from ondevice.cli.common import err, one_of, print_json, show_table, table
from ondevice.core.errors import FleetError
from ondevice.data.readers.files import check_source
from ondevice.fleet.averaging.arrays import arrays_of
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.certificates import make
from ondevice.fleet.config import FleetRun
from ondevice.fleet.dates import with_date
from ondevice.fleet.device import DeviceSettings
from ondevice.fleet.failures import ServerError, shown
from ondevice.fleet.flower import join, serve
from ondevice.fleet.link import Link
from ondevice.fleet.open import open_task
from ondevice.fleet.status import progress
from ondevice.fleet.status import status as status_of
from ondevice.fleet.store import Store
from ondevice.training.checkpoint import RunLock

Folder = Annotated[Path, typer.Argument(help="The fleet's folder, from `ondevice fleet begin`.")]
Copy = Annotated[
    Path, typer.Option("--out", "-o", help="Folder for this device's copy of the fleet.")
]
Artifact = Annotated[
    Path | None, typer.Option("--artifact", help="Use an exported program, not the model.")
]


@flags.with_settings(
    "model",
    "data.task",
    "data.max_length_tokens",
    "method",
    "train.seed",
    "train.out",
    "fleet.local_steps",
    without=("model.classes",),
    run=FleetRun,
)
def begin(
    device_keys: Annotated[
        Path | None,
        typer.Option(
            "--device-keys", help="Folder of the devices' public keys (*.pub), for the charter."
        ),
    ] = None,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Begin a fleet: write the charter, which every device checks. Needs the model but no data."""
    run = FleetRun.load(config, overrides)
    run.check_device_keys(device_keys)

    run, session, source = open_task(with_date(run, resume=True))
    if run.averages:
        charter = run.adapter_charter(source)
        arrays = arrays_of(session)
        AdapterStore.create(run.train.out, charter, arrays).close()
        elements = sum(value.size for value in arrays.values())
    else:
        charter = run.charter(session, source, device_keys)
        Store.create(run.train.out, charter).close()
        elements = charter.size
    values = {"fleet": f"{charter.id:08x}", "folder": str(run.train.out), "elements": elements}
    if json:
        print_json(values | {"charter": charter.model_dump(mode="json")})
    else:
        table(values)


def server(
    folder: Folder,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds in total.")] = 100,
    devices: Annotated[
        int, typer.Option("--devices", min=1, help="Wait for this many devices.")
    ] = 1,
    sample: Annotated[
        float, typer.Option("--sample", help="Fraction of the devices to ask in a round.")
    ] = 1.0,
    wait: Annotated[
        float, typer.Option("--wait", help="Longest wait for devices or replies, in seconds.")
    ] = 600.0,
    host: common.FleetHost = "127.0.0.1",
    port: common.FleetPort = 9092,
    certificates: common.Certificates = None,
    insecure: common.Insecure = False,
    end: Annotated[
        bool,
        typer.Option("--end", help="Tell devices after the last round that the fleet is over."),
    ] = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Run a fleet's rounds over Flower with the devices that connect.

    Started again, the server goes on after the last round. It ends with an error if a round got no
    reply, a device has another adapter, or too few devices come within --wait."""
    status_of(folder)  # fails here if there is no fleet
    settings = {
        "rounds": rounds,
        "least_devices": devices,
        "sample": sample,
        "wait_s": wait,
        "end": end,
    }
    report = (lambda line: None) if quiet else _line
    failed: dict[int, dict[str, int]] = {}
    with RunLock(folder):
        try:
            failed = serve(folder, Link(host, port, certificates, insecure), settings, report)
        except FleetError as error:
            raise ServerError.of(error, _result(folder)) from None
    values = _result(folder)
    if failed:
        raise ServerError(
            f"{len(failed)} of the fleet's rounds got no reply",
            values,
            received="; ".join(f"round {n + 1}: {shown(why)}" for n, why in failed.items()),
            hint="a device's own log says why",
        )
    if not values["hashes_equal"]:
        raise ServerError(
            "a device has another adapter than the server",
            values,
            expected=f"the hash {values['hash']} on {values['devices']} devices",
            hint="server.log in the fleet's folder names the device",
        )
    show_table(values, json)


def _result(folder: Path) -> dict[str, Any]:
    """Return a fleet's status without its charter and its list of rounds."""
    values = status_of(folder)
    return {
        name: value for name, value in values.items() if name not in ("charter", "rounds_table")
    }


def device(
    data: Annotated[str, common.OwnRows],
    target_dir: Copy,
    first: flags.FirstModel = None,
    task: flags.Task = None,
    columns: flags.Columns = None,
    strict_columns: flags.StrictColumns = False,
    model: flags.Model = None,
    artifact: Artifact = None,
    batch_size: flags.BatchSize = None,
    gives_subspace: Annotated[
        bool,
        typer.Option(
            "--gives-subspace", help="Let the fleet take subspaces from this device's gradient."
        ),
    ] = False,
    host: common.FleetHost = "127.0.0.1",
    port: common.FleetPort = 9092,
    certificates: common.Certificates = None,
    key: common.DeviceKey = None,
    insecure: common.Insecure = False,
    epsilon: common.Epsilon = None,
    json: common.Json = False,
) -> None:
    """Take part in a fleet over Flower until interrupted, or until the server ends the fleet.

    The device connects again whenever the server or its network comes back."""
    check_source(data)
    settings = DeviceSettings(
        folder=str(target_dir),
        data=str(Path(data).absolute()),
        task=task,
        columns=flags.columns_of(columns),
        strict_columns=strict_columns,
        model=one_of(first, model, "model"),
        artifact=None if artifact is None else str(artifact.absolute()),
        batch_size=batch_size or 4,
        gives_subspace=gives_subspace,
        key=None if key is None else str(key.absolute()),
        epsilon=epsilon,
    )
    join(settings, Link(host, port, certificates, insecure), key, _line)
    show_table(progress(target_dir) or {}, json)


def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="Name or address of the server (repeat for more)."),
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", min=0, help="Also make keys for this many devices.")
    ] = 0,
    json: common.Json = False,
) -> None:
    """Make TLS certificates for a fleet's server and key pairs for its devices."""
    files = [str(file) for file in make(folder, tuple(host or ["localhost"]), devices)]
    if json:
        print_json({"files": files})
    else:
        table(dict.fromkeys(files, ""))


def _line(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)
