"""`ondevice serve`, `serve token` and `serve install`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ondevice.cli import common
from ondevice.cli.common import err, out, print_json

app = typer.Typer(
    help="The daemon: a queue of jobs, an API and a page.", invoke_without_command=True, no_args_is_help=False
)
Store = Annotated[
    Path | None, typer.Option("--store", help="Folder of jobs, data and adapters; ~/.local/share/ondevice by default.")
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on; another than this machine needs a token.")]
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
    show: Annotated[bool, typer.Option("--list", help="List tokens, without their secrets.")] = False,
    revoke: Annotated[str | None, typer.Option("--revoke", help="Make the token of this id worthless.")] = None,
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
        return
    secret = security.create_token(opened, name)
    if json:
        print_json({"token": secret})
    else:
        out.print(secret, markup=False, soft_wrap=True)
        err.print("It is shown this once. Clients read it from ONDEVICE_TOKEN.")


@app.command()
def install(
    host: Host = "127.0.0.1",
    port: Port = 8765,
    tls_cert: Cert = None,
    tls_key: Key = None,
    offline: Annotated[bool, typer.Option("--offline", help="Let the kernel drop packets of other machines.")] = False,
    folder: Annotated[Path | None, typer.Option("--folder", help="Write it here, not to /etc/systemd/system.")] = None,
    show: Annotated[bool, typer.Option("--print", help="Print the unit and write nothing.")] = False,
) -> None:
    """Write a systemd unit: started at boot, restarted when it hangs or dies, hardened."""
    from ondevice.server import systemd

    text = systemd.unit(host, port, tls_cert, tls_key, offline=offline, groups=systemd.existing_groups())
    if show:
        typer.echo(text, nl=False)
        return
    path = systemd.install(text, folder or systemd.SYSTEM_FOLDER)
    out.print(f"{path} is written. To start it:", markup=False)
    out.print("  sudo systemctl daemon-reload && sudo systemctl enable --now ondevice", markup=False)
