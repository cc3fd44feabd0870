"""`ondevice push` and `ondevice pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ondevice.api.phone import pull as bring
from ondevice.api.phone import push as send
from ondevice.cli import common
from ondevice.cli.common import err, mebibytes, out, print_json, table

Serial = Annotated[
    str | None, typer.Option("--serial", help="Serial number of the phone, from `adb devices`.")
]


def push(
    artifact: Annotated[Path, typer.Argument(help="An artifact that `ondevice export` wrote.")],
    name: Annotated[str | None, typer.Option("--name", help="Name in the app.")] = None,
    serial: Serial = None,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Copy an artifact to the app on a phone that is connected by USB."""
    columns = (
        "pushing",
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=quiet or json, transient=True) as bar:
        task = bar.add_task("push", total=None)
        sent = send(
            artifact,
            name=name,
            serial=serial,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json:
        print_json(sent)
        return
    table({"phone": sent["phone"], "place": sent["place"], "size": mebibytes(sent["bytes"])})
    if sent["import_by_hand"]:
        err.print(
            "The app cannot be reached from here. In the app, choose Models, then Import, "
            "and the zip in Download."
        )


def pull(target_dir: common.Out = None, serial: Serial = None, json: common.Json = False) -> None:
    """Copy the app's adapters from the phone into DIR/MODEL/ADAPTER."""
    adapters = bring(target_dir or Path("adapters-from-phone"), serial=serial)
    if json:
        print_json({"adapters": [str(path) for path in adapters]})
        return
    for path in adapters:
        out.print(str(path), markup=False, soft_wrap=True)
