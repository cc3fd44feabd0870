"""`ondevice fleet begin`, `server`, `device` and `certificates`: a fleet over Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, overrides, print_json, table

LocalSteps = Annotated[
    int | None, typer.Option("--local-steps", min=1, help="Steps of a device before it answers.")
]
Host = Annotated[str, typer.Option("--host", help="Address of the fleet's server.")]
Port = Annotated[int, typer.Option("--port", help="Port of the fleet's server.")]
Certificates = Annotated[
    Path | None,
    typer.Option(
        "--certificates", help="Folder with ca.crt, and for the server server.pem and server.key."
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS: on one machine only.")]
Epsilon = Annotated[
    float | None,
    typer.Option(
        "--epsilon", min=0, help="Privacy budget: this device stops at it. 8 in a fleet with noise."
    ),
]
Folder = Annotated[Path, typer.Argument(help="The fleet's folder, from `ondevice fleet begin`.")]
Copy = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of this device's copy of the fleet.")
]
Artifact = Annotated[
    Path | None, typer.Option("--artifact", help="An exported program instead of the model.")
]


@common.with_run_options(
    "--method",
    "--revision",
    "--dtype",
    "--task",
    "--max-length",
    "--learning-rate",
    "--seed",
    "--out",
    loop=False,
)
@common.with_method_options
def begin(
    first: common.FirstModel = None,
    config: common.Config = None,
    model: common.Model = None,
    local_steps: LocalSteps = None,
    device_keys: Annotated[
        Path | None,
        typer.Option(
            "--device-keys",
            help="Folder of the devices' public keys (*.pub): the charter names them.",
        ),
    ] = None,
    settings: common.Settings = None,
    json: common.Json = False,
    *,
    method_options: dict[str, Any],
    run_options: dict[str, Any],
) -> None:
    """Begin a fleet: write its charter, which every device will check. Needs the model, and no data."""
    from ondevice.fleet.config import FleetRun

    flags = overrides(
        settings, model__source=common.model_of(first, model), fleet__local_steps=local_steps
    )
    run = FleetRun.load(config, flags | method_options | run_options)
    run.check_device_keys(device_keys)
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
        charter = run.charter(session, source, device_keys)
        Store.create(run.train.out, charter).close()
        elements = charter.size
    values = {"fleet": f"{charter.id:08x}", "folder": str(run.train.out), "elements": elements}
    print_json({**values, "charter": charter.model_dump(mode="json")}) if json else table(values)


def server(
    folder: Folder,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Rounds in all.")] = 100,
    devices: Annotated[int, typer.Option("--devices", min=1, help="Wait for so many devices.")] = 1,
    sample: Annotated[
        float, typer.Option("--sample", help="Share of the devices that a round asks.")
    ] = 1.0,
    wait: Annotated[
        float, typer.Option("--wait", help="Longest wait for devices or answers, seconds.")
    ] = 600.0,
    host: Host = "127.0.0.1",
    port: Port = 9092,
    certificates: Certificates = None,
    insecure: Insecure = False,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Listen for devices and run a fleet's rounds over Flower. Started again, it goes on from the last round."""
    from ondevice.fleet.flower import serve
    from ondevice.fleet.link import Link
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


def device(
    data: Annotated[str, typer.Option("--data", "-d", help="This device's rows; they stay here.")],
    target_dir: Copy,
    first: common.FirstModel = None,
    task: common.Task = None,
    columns: common.Columns = None,
    strict_columns: common.StrictColumns = False,
    model: common.Model = None,
    artifact: Artifact = None,
    batch_size: common.BatchSize = None,
    gives_subspace: Annotated[
        bool,
        typer.Option(
            "--gives-subspace", help="This device's gradient may give the fleet's subspaces."
        ),
    ] = False,
    host: Host = "127.0.0.1",
    port: Port = 9092,
    certificates: Certificates = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="This device's private key (devices/NAME.key).")
    ] = None,
    insecure: Insecure = False,
    epsilon: Epsilon = None,
) -> None:
    """Take part in a fleet over Flower, until it is stopped."""
    from ondevice.data.readers.records import check_source
    from ondevice.fleet.device import DeviceSettings
    from ondevice.fleet.flower import join
    from ondevice.fleet.link import Link

    check_source(data)
    settings = DeviceSettings(
        folder=str(target_dir),
        data=str(Path(data).absolute()),
        task=task,
        columns=common.columns_of(columns),
        strict_columns=strict_columns,
        model=common.model_of(first, model),
        artifact=None if artifact is None else str(artifact.absolute()),
        batch_size=batch_size or 4,
        gives_subspace=gives_subspace,
        key=None if key is None else str(key.absolute()),
        epsilon=epsilon,
    )
    raise typer.Exit(join(settings, Link(host, port, certificates, insecure), key, _line))


def certificates(
    folder: Annotated[Path, typer.Argument(help="Folder to make them in.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="Name or address of the server (repeat).")
    ] = None,
    devices: Annotated[
        int, typer.Option("--devices", min=0, help="Make keys for so many devices.")
    ] = 0,
    json: common.Json = False,
) -> None:
    """Make TLS certificates for a fleet's server, and key pairs for its devices."""
    from ondevice.fleet.certificates import make

    files = [str(file) for file in make(folder, tuple(host or ["localhost"]), devices)]
    print_json({"files": files}) if json else table(dict.fromkeys(files, ""))


def _line(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)
