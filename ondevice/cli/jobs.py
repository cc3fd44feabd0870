"""`ondevice jobs`: the jobs, adapters and ratings of a daemon, from any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ondevice.cli import common, submit
from ondevice.cli.adapters import To, WeightsDtype
from ondevice.cli.common import err, out, print_json, show
from ondevice.cli.daemon import Ca, Job, Url, open_client, show_job
from ondevice.core.errors import TrainingError
from ondevice.core.table import Table
from ondevice.training import events
from ondevice.training.progress import ProgressSink

app = typer.Typer(
    help="Create, watch and control the jobs of a daemon. The token is read from ONDEVICE_TOKEN.",
    no_args_is_help=True,
)
adapters = typer.Typer(help="List, fetch, convert or activate adapters.", no_args_is_help=True)
app.add_typer(adapters, name="adapters")
thumbs = typer.Typer(help="List, export or delete rated replies.", no_args_is_help=True)
app.add_typer(thumbs, name="thumbs")
Adapter = Annotated[str, typer.Argument(help="Id of the adapter.")]


@app.command("list")
def list_jobs(
    url: Url = None,
    ca: Ca = None,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", help="List only jobs in this state (repeat for more)."),
    ] = None,
    json: common.Json = False,
) -> None:
    """List the jobs: running, waiting and ended."""
    jobs = open_client(url, ca).jobs(*(state or []))
    if json:
        print_json({"jobs": jobs})
        return
    grid = Table(box=None, pad_edge=False)
    for heading in ("job", "state", "step", "loss", "name"):
        grid.add_column(heading, justify="right" if heading in ("step", "loss") else "left")
    for job in jobs:
        progress = job["progress"]
        step = ""
        if "step" in progress:
            step = f"{progress['step']}/{progress['steps']}"
        loss = ""
        if progress.get("loss") is not None:
            loss = f"{float(progress['loss']):.4f}"
        grid.add_row(job["id"], job["state"], step, loss, escape(job["name"]))
    out.print(grid)


app.command("create")(submit.create)
app.command("upload")(submit.upload)
app.command("change")(submit.change)


@app.command()
def delete(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Delete an ended job with its log, events and checkpoints; its adapters stay."""
    open_client(url, ca).delete_job(job)
    show({"deleted": job}, f"deleted {job}", json)


@app.command("show")
def show_one(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Show a job: its state, progress, limits and adapters."""
    show_job(open_client(url, ca).job(job), json)


@app.command()
def watch(
    job: Job,
    after: Annotated[
        int, typer.Option("--after", min=0, help="Show only events after this id.")
    ] = 0,
    url: Url = None,
    ca: Ca = None,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Follow a job until it ends. With --json, print one event per line."""
    import json as json_module

    client = open_client(url, ca)
    last: dict[str, Any] = {}
    with ProgressSink(silent=json or quiet) as sink:
        for event in client.events(job, after):
            if json:
                print_json(event)
            if event["event"] == "job":
                last = event
                if not json and not quiet:
                    err.print(f"{event['state']} {event['reason']}".rstrip(), markup=False)
            elif (parsed := events.parse(json_module.dumps(event))) is not None:
                sink(parsed)
    if last.get("state") != "done":
        problem = last.get("error") or {}
        raise TrainingError(
            f"job {job} is {last.get('state', 'gone')}",
            received=problem.get("message") or last.get("reason"),
            hint=f"`ondevice jobs log {job}` shows its output",
        )


@app.command()
def pause(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Pause a job after the current step, and save its state."""
    show_job(open_client(url, ca).pause(job), json)


@app.command()
def resume(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Resume a paused or failed job."""
    show_job(open_client(url, ca).resume(job), json)


@app.command()
def cancel(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Cancel a job for good."""
    show_job(open_client(url, ca).cancel(job), json)


@app.command()
def log(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Print the last part of a job's log."""
    text = open_client(url, ca).log(job)
    if json:
        print_json({"log": text})
    else:
        typer.echo(text, nl=False)


@adapters.command("list")
def list_adapters(url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """List the adapters, the newest first."""
    rows = open_client(url, ca).adapters()
    if json:
        print_json({"adapters": rows})
        return
    for row in rows:
        active = ""
        if row["active"]:
            active = "  active"
        out.print(
            f"{row['id']}  rank {row['rank']}  {row['base_model']}  {row['name']}{active}",
            markup=False,
        )


@adapters.command()
def download(
    adapter: Adapter,
    folder: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder to write to (default: ./ID).")
    ] = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Download an adapter in PEFT's format."""
    written = open_client(url, ca).download_adapter(adapter, folder or Path(adapter))
    show({"adapter": adapter, "folder": str(written)}, str(written), json)


@adapters.command("convert")
def convert_adapter(
    adapter: Adapter,
    to: To,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Base model, if it is not the one the adapter names."),
    ] = None,
    dtype: WeightsDtype = None,
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; a folder comes as a zip.")
    ] = None,
    url: Url = None,
    ca: Ca = None,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Convert an adapter on the daemon's machine, as `ondevice convert` does, and download it."""
    client = open_client(url, ca)
    begun = client.convert(adapter, to, model=model, dtype=dtype)

    def report(stage: str) -> None:
        if not quiet and not json:
            err.print(stage, markup=False)

    try:
        done = client.wait_for_conversion(begun["id"], report)
        path = client.download_conversion(done["id"], target or Path(done["file"]))
    finally:
        client.delete_conversion(begun["id"])
    if json:
        print_json(done["report"] | {"adapter": adapter, "file": str(path)})
        return
    out.print(str(path), markup=False)
    for note in done["report"]["notes"]:
        err.print(note, markup=False, soft_wrap=True)


@adapters.command()
def activate(adapter: Adapter, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Activate an adapter: the store's link `active` then points to it."""
    _show_active(open_client(url, ca).activate(adapter), json)


@adapters.command("rollback")
def roll_back(url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Go back to what was active before: another adapter, or the base model."""
    _show_active(open_client(url, ca).roll_back(), json)


@adapters.command("delete")
def delete_adapter(
    adapter: Adapter, url: Url = None, ca: Ca = None, json: common.Json = False
) -> None:
    """Delete an adapter that is neither active nor used by a waiting or running job."""
    open_client(url, ca).delete_adapter(adapter)
    show({"deleted": adapter}, f"deleted {adapter}", json)


@thumbs.command("list")
def list_thumbs(
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1000, help="Most ratings to list.")
    ] = 100,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """List rated replies, the newest first."""
    rows = open_client(url, ca).thumbs(limit)
    if json:
        print_json({"thumbs": rows})
        return
    for row in rows:
        model = f"{row['model']} with {row['adapter']}" if row["adapter"] else row["model"]
        thumb = "down"
        if row["liked"]:
            thumb = "up"
        reply = " ".join(row["answer"].split())
        out.print(f"{row['id']}  {thumb:4}  {model}  {reply[:60]}", markup=False)


@thumbs.command()
def export(
    target: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path(
        "thumbs.jsonl"
    ),
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Write all rated replies as JSON lines, ready to train on."""
    rows = open_client(url, ca).export_thumbs(target)
    show({"file": str(target), "rows": rows}, f"{rows} rows in {target}", json)


@thumbs.command("delete")
def delete_thumb(
    thumb: Annotated[str, typer.Argument(help="Id of the rating.")],
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Delete a rating."""
    open_client(url, ca).delete_thumb(thumb)
    show({"deleted": thumb}, f"deleted {thumb}", json)


def _show_active(response: dict[str, Any], json: bool) -> None:
    show(response, f"active: {response['active'] or 'the base model'}", json)
