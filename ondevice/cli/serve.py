"""`ondevice serve`, `serve token` and `serve install`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common, flags
from ondevice.cli.common import err, out, print_json, show
from ondevice.cli.daemon import bytes_of, window_of
from ondevice.core.errors import ConfigError
from ondevice.server import security
from ondevice.server.store import Store as Opened
from ondevice.server.store import default_store

app = typer.Typer(
    help="Run the daemon: a queue of jobs, an HTTP API and a web page.",
    invoke_without_command=True,
    no_args_is_help=False,
)
Store = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Folder of jobs, data and adapters (default: ~/.local/share/ondevice)."
    ),
]
Host = Annotated[
    str, typer.Option("--host", help="Address to listen on; any but this machine's needs a token.")
]
Port = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
]
Cert = Annotated[Path | None, typer.Option("--tls-cert", help="TLS certificate (PEM).")]
Unknown = Annotated[
    bool,
    typer.Option(
        "--allow-unknown-fields",
        help="Ignore fields of OpenAI's requests that are not known; else they are refused.",
    ),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-reward",
        help="Reward or score that jobs may name: module:function, or a command. May be repeated.",
    ),
]
Key = Annotated[Path | None, typer.Option("--tls-key", help="Private key of --tls-cert (PEM).")]


@app.callback()
def serve(
    context: typer.Context,
    store: Store = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    tls_cert: Cert = None,
    tls_key: Key = None,
    allow_unknown_fields: Unknown = False,
    allow_reward: Rewards = None,
    json: common.Json = False,
) -> None:
    """Run the daemon: a queue of jobs, an HTTP API and a web page. Ctrl-C saves and stops."""
    if context.invoked_subcommand is not None:
        return
    from ondevice.server import serve as daemon

    def fleet_progress(folder: Path) -> dict[str, Any] | None:
        from ondevice.fleet.status import progress  # only once somebody asks about fleets

        return progress(folder)

    def ready(address: str) -> None:
        show({"address": address}, f"ready on {address}", json)

    daemon.serve(
        store,
        host,
        port,
        tls_cert,
        tls_key,
        ready,
        fleet_progress,
        allow_unknown_fields,
        allow_reward or (),
    )


@app.command()
def token(
    store: Store = None,
    name: Annotated[str, typer.Option("--name", help="What the token is for.")] = "",
    list_tokens: Annotated[
        bool, typer.Option("--list", help="List the tokens, without their secrets.")
    ] = False,
    revoke: Annotated[
        str | None, typer.Option("--revoke", help="Revoke the token with this id.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Make a token and print it once. From then on every request to the daemon needs a token."""
    opened = Opened(store or default_store())
    if revoke is not None:
        security.revoke(opened, revoke)
    if list_tokens or revoke is not None:
        tokens = security.list_tokens(opened)
        if json:
            print_json({"tokens": tokens})
        else:
            for item in tokens:
                out.print(f"{item['id']}  {item['name']}", markup=False)
        if revoke is not None and not tokens:
            err.print(
                "No token is left. The daemon refuses all requests until `ondevice serve token` "
                "makes a new one."
            )
        return
    secret = security.create_token(opened, name)
    if json:
        print_json({"token": secret})
    else:
        out.print(secret, markup=False, soft_wrap=True)
        err.print("It is shown only once. Clients read it from ONDEVICE_TOKEN.")


@app.command()
def fleet(
    name: Annotated[str, typer.Argument(help="A name for the fleet on this machine.")],
    store: Store = None,
    data: Annotated[str | None, common.OwnRows] = None,
    host: common.FleetHost = "127.0.0.1",
    port: common.FleetPort = 9092,
    certificates: common.Certificates = None,
    key: common.DeviceKey = None,
    insecure: common.Insecure = False,
    model: flags.Model = None,
    batch_size: flags.BatchSize = None,
    task: flags.Task = None,
    columns: flags.Columns = None,
    epsilon: common.Epsilon = None,
    strict_columns: flags.StrictColumns = False,
    window: Annotated[
        str | None, typer.Option("--window", help="Train only between these times: 22:00-06:00.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Most memory it may take, such as 6GiB.")
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Leave the fleet; the local copy of it stays.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Make the daemon a device of a fleet. It trains within a window and never during a job.

    A running daemon notices within a second."""
    from ondevice.data.readers.files import check_source
    from ondevice.server.fleets import Seat, write_seat

    root = store or default_store()
    seat = None
    if not remove:
        if data is None:
            raise ConfigError(
                "no data is given", expected="--data FILE, which stays on this machine"
            )
        if not insecure and (certificates is None or key is None):
            raise ConfigError(
                "no certificate or key is given", expected="--certificates and --key, or --insecure"
            )
        check_source(data)
        values = {
            "data": str(Path(data).absolute()),
            "host": host,
            "port": port,
            "insecure": insecure,
            "model": model,
            "certificates": certificates and str(certificates.absolute()),
            "key": key and str(key.absolute()),
            "batch_size": batch_size or 4,
            "memory_bytes": bytes_of(memory_limit),
            "window": window_of(window),
            "task": task,
            "columns": flags.columns_of(columns),
            "epsilon": epsilon,
            "strict_columns": strict_columns,
        }
        seat = Seat.parse(values, "flags")
    path = write_seat(root, name, seat)
    values = {"fleet": name, "file": str(path), "removed": remove}
    show(values, f"removed {path}" if remove else f"wrote {path}", json)


@app.command()
def install(
    host: Host = "127.0.0.1",
    port: Port = 8765,
    tls_cert: Cert = None,
    tls_key: Key = None,
    allow_unknown_fields: Unknown = False,
    allow_reward: Rewards = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Let the kernel drop packets from other machines.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Write to this folder, not to /etc/systemd/system."),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the unit and write nothing.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Write a hardened systemd unit that starts the daemon at boot and after a crash."""
    from ondevice.server import systemd

    text = systemd.unit(
        host,
        port,
        tls_cert,
        tls_key,
        allow_unknown_fields=allow_unknown_fields,
        rewards=allow_reward or (),
        offline=offline,
        groups=systemd.existing_groups(),
    )
    if only_print:
        if json:
            print_json({"unit": text})
        else:
            typer.echo(text, nl=False)
        return
    path = systemd.install(text, folder or systemd.SYSTEM_FOLDER)
    if json:
        print_json({"file": str(path)})
        return
    out.print(f"wrote {path}. To start the daemon:", markup=False)
    out.print(
        "  sudo systemctl daemon-reload && sudo systemctl enable --now ondevice", markup=False
    )
