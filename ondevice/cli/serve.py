"""`ondevice serve`, `serve token` and `serve install`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import err, out, print_json
from ondevice.cli.daemon import bytes_of, window_of

app = typer.Typer(
    help="The daemon: a queue of jobs, an API and a page.",
    invoke_without_command=True,
    no_args_is_help=False,
)
Store = Annotated[
    Path | None,
    typer.Option(
        "--store", help="Folder of jobs, data and adapters; ~/.local/share/ondevice by default."
    ),
]
Host = Annotated[
    str,
    typer.Option("--host", help="Address to listen on; another than this machine needs a token."),
]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
Cert = Annotated[Path | None, typer.Option("--tls-cert", help="Certificate (PEM), with --tls-key.")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")]


@app.callback()
def serve(
    context: typer.Context,
    store: Store = None,
    host: Host = "127.0.0.1",
    port: Port = 8765,
    tls_cert: Cert = None,
    tls_key: Key = None,
    json: common.Json = False,
) -> None:
    """Run the daemon: train what is queued, answer under /v1, show the page. Ctrl-C saves and ends."""
    if context.invoked_subcommand is not None:
        return
    from ondevice.server.serve import serve as run

    def ready(address: str) -> None:
        print_json({"address": address}) if json else out.print(f"ready on {address}", markup=False)

    run(store, host, port, tls_cert, tls_key, ready)


@app.command()
def token(
    store: Store = None,
    name: Annotated[str, typer.Option("--name", help="What it is for.")] = "",
    show: Annotated[
        bool, typer.Option("--list", help="List tokens, without their secrets.")
    ] = False,
    revoke: Annotated[
        str | None, typer.Option("--revoke", help="Make the token of this id worthless.")
    ] = None,
    json: common.Json = False,
) -> None:
    """Make a token and say it once; from then on every request to this store's daemon needs one."""
    from ondevice.server import security
    from ondevice.server.serve import default_store
    from ondevice.server.store import Store as Opened

    opened = Opened(store or default_store())
    if revoke is not None:
        security.revoke(opened, revoke)
    if show or revoke is not None:
        tokens = security.list_tokens(opened)
        if json:
            print_json({"tokens": tokens})
        else:
            for item in tokens:
                out.print(f"{item['id']}  {item['name']}", markup=False)
        if revoke is not None and not tokens:
            err.print(
                "No token is left: the daemon answers nobody until `ondevice serve token` makes a new one."
            )
        return
    secret = security.create_token(opened, name)
    if json:
        print_json({"token": secret})
    else:
        out.print(secret, markup=False, soft_wrap=True)
        err.print("It is shown this once. Clients read it from ONDEVICE_TOKEN.")


@app.command()
def fleet(
    name: Annotated[str, typer.Argument(help="A name for the fleet, on this machine.")],
    store: Store = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="This machine's rows; they stay here.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="The fleet's server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port of the fleet's server.")] = 9092,
    certificates: Annotated[
        Path | None, typer.Option("--certificates", help="Folder with ca.crt.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="This device's private key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS: on one machine only.")
    ] = False,
    model: common.Model = None,
    batch_size: common.BatchSize = None,
    task: common.Task = None,
    columns: common.Columns = None,
    epsilon: Annotated[
        float | None, typer.Option("--epsilon", min=0, help="Privacy budget: it stops at it.")
    ] = None,
    strict_columns: common.StrictColumns = False,
    window: Annotated[
        str | None, typer.Option("--window", help="When it may train, as 22:00-06:00.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Of its processes: 6GiB.")
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take part no more; its copy of the fleet stays.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Let the daemon be a device of a fleet: in a window, and never beside a job. It sees this within a second."""
    from ondevice.core.errors import ConfigError
    from ondevice.data.readers.records import check_source
    from ondevice.server.fleets import Seat, write_seat
    from ondevice.server.serve import default_store

    root = store or default_store()
    seat = None
    if not remove:
        if data is None:
            raise ConfigError(
                "no rows are named", expected="--data FILE, which stays on this machine"
            )
        if not insecure and (certificates is None or key is None):
            raise ConfigError(
                "a fleet's connections are encrypted",
                expected="--certificates and --key, or --insecure",
            )
        check_source(data)
        values = {
            "data": str(Path(data).absolute()), "host": host, "port": port, "insecure": insecure, "model": model,
            "certificates": certificates and str(certificates.absolute()), "key": key and str(key.absolute()),
            "batch_size": batch_size or 4, "memory_bytes": bytes_of(memory_limit), "window": window_of(window),
            "task": task, "columns": common.columns_of(columns), "epsilon": epsilon,
            "strict_columns": strict_columns,
        }  # fmt: skip
        seat = Seat.parse(values, "flags")
    path = write_seat(root, name, seat)
    values = {"fleet": name, "file": str(path), "removed": remove}
    print_json(values) if json else out.print(
        f"{path} is {'removed' if remove else 'written'}", markup=False
    )


@app.command()
def install(
    host: Host = "127.0.0.1",
    port: Port = 8765,
    tls_cert: Cert = None,
    tls_key: Key = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Let the kernel drop packets of other machines.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Write it here, not to /etc/systemd/system.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the unit and write nothing.")
    ] = False,
    json: common.Json = False,
) -> None:
    """Write a systemd unit: started at boot, restarted when it hangs or dies, hardened."""
    from ondevice.server import systemd

    text = systemd.unit(
        host, port, tls_cert, tls_key, offline=offline, groups=systemd.existing_groups()
    )
    if show:
        print_json({"unit": text}) if json else typer.echo(text, nl=False)
        return
    path = systemd.install(text, folder or systemd.SYSTEM_FOLDER)
    if json:
        print_json({"file": str(path)})
        return
    out.print(f"{path} is written. To start it:", markup=False)
    out.print(
        "  sudo systemctl daemon-reload && sudo systemctl enable --now ondevice", markup=False
    )
