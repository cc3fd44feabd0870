"""`ondevice jobs`: the queue of a daemon, from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ondevice.cli import common, submit
from ondevice.cli.adapters import FORMS
from ondevice.cli.common import err, out, print_json
from ondevice.cli.daemon import Ca, Job, Url, open_client, show_job
from ondevice.core.errors import TrainingError

app = typer.Typer(
    help="The queue of a daemon; a token is read from ONDEVICE_TOKEN.", no_args_is_help=True
)
adapters = typer.Typer(help="Adapters of the daemon.", no_args_is_help=True)
app.add_typer(adapters, name="adapters")
thumbs = typer.Typer(help="Answers that were judged with thumbs up or down.", no_args_is_help=True)
app.add_typer(thumbs, name="thumbs")
Adapter = Annotated[str, typer.Argument(help="The adapter's id.")]


@app.command("list")
def list_jobs(
    url: Url = None,
    ca: Ca = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only jobs in this state (repeat).")
    ] = None,
    json: common.Json = False,
) -> None:
    """List the jobs that run, wait, and have ended."""
    jobs = open_client(url, ca).jobs(*(state or []))
    if json:
        print_json({"jobs": jobs})
        return
    from rich.markup import escape
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for heading in ("job", "state", "step", "loss", "name"):
        grid.add_column(heading, justify="right" if heading in ("step", "loss") else "left")
    for job in jobs:
        progress = job["progress"]
        step = f"{progress['step']}/{progress['steps']}" if "step" in progress else ""
        loss = f"{float(progress['loss']):.4f}" if progress.get("loss") is not None else ""
        grid.add_row(job["id"], job["state"], step, loss, escape(job["name"]))
    out.print(grid)


app.command("create")(submit.create)
app.command("upload")(submit.upload)
app.command("change")(submit.change)


@app.command()
def delete(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Forget an ended job, with its log, events and checkpoints; its adapters stay."""
    open_client(url, ca).delete_job(job)
    print_json({"deleted": job}) if json else out.print(f"{job} is deleted", markup=False)


@app.command()
def show(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Show one job."""
    show_job(open_client(url, ca).job(job), json)


@app.command()
def watch(
    job: Job,
    after: Annotated[int, typer.Option("--after", min=0, help="Only events with larger ids.")] = 0,
    url: Url = None,
    ca: Ca = None,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Follow a job until it ends; with --json, one event a line."""
    import json as json_module

    from ondevice.training import events
    from ondevice.training.progress import ProgressSink

    client, last = open_client(url, ca), {}
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
            hint=f"`ondevice jobs log {job}` shows what it printed",
        )


@app.command()
def pause(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Stop after the running step, with the state saved."""
    show_job(open_client(url, ca).pause(job), json)


@app.command()
def resume(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Go on with a paused or failed job."""
    show_job(open_client(url, ca).resume(job), json)


@app.command()
def cancel(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """End a job for good."""
    show_job(open_client(url, ca).cancel(job), json)


@app.command()
def log(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Print the end of the log of the job's workers."""
    text = open_client(url, ca).log(job)
    print_json({"log": text}) if json else typer.echo(text, nl=False)


@adapters.command("list")
def list_adapters(url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """List all adapters, the newest first."""
    rows = open_client(url, ca).adapters()
    if json:
        print_json({"adapters": rows})
        return
    for row in rows:
        active = "  active" if row["active"] else ""
        out.print(
            f"{row['id']}  rank {row['rank']}  {row['base_model']}  {row['name']}{active}",
            markup=False,
        )


@adapters.command()
def download(
    adapter: Adapter,
    folder: common.Out = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Write an adapter's two files, as PEFT loads them; into a folder of its name without --out."""
    written = open_client(url, ca).download_adapter(adapter, folder or Path(adapter))
    print_json({"adapter": adapter, "folder": str(written)}) if json else out.print(
        str(written), markup=False
    )


@adapters.command("convert")
def convert_adapter(
    adapter: Adapter,
    to: Annotated[str, typer.Option("--to", help=FORMS)],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="If not the adapter's own.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of the weights: float16, q8_0, ...")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write, a zip for a folder.")
    ] = None,
    url: Url = None,
    ca: Ca = None,
    quiet: common.Quiet = False,
    json: common.Json = False,
) -> None:
    """Convert an adapter on the daemon's machine, as `ondevice convert` does, and download what was written."""
    client = open_client(url, ca)
    begun = client.convert(adapter, to, model=model, dtype=dtype)
    try:
        done = client.wait_for_conversion(
            begun["id"], lambda stage: None if quiet or json else err.print(stage, markup=False)
        )
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
    """Use an adapter: the store's link `active` points to it."""
    _show_active(open_client(url, ca).activate(adapter), json)


@adapters.command("rollback")
def roll_back(url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Use what was in use before: another adapter, or the base model."""
    _show_active(open_client(url, ca).roll_back(), json)


@adapters.command("delete")
def delete_adapter(
    adapter: Adapter, url: Url = None, ca: Ca = None, json: common.Json = False
) -> None:
    """Delete an adapter that is not active and that no waiting or running job starts from."""
    open_client(url, ca).delete_adapter(adapter)
    print_json({"deleted": adapter}) if json else out.print(f"{adapter} is deleted", markup=False)


@thumbs.command("list")
def list_thumbs(
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1000, help="At most so many, the newest first.")
    ] = 100,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """List judged answers, the newest first."""
    rows = open_client(url, ca).thumbs(limit)
    if json:
        print_json({"thumbs": rows})
        return
    for row in rows:
        by = f"{row['model']} with {row['adapter']}" if row["adapter"] else row["model"]
        thumb, answer = "up" if row["liked"] else "down", " ".join(row["answer"].split())
        out.print(f"{row['id']}  {thumb:4}  {by}  {answer[:60]}", markup=False)


@thumbs.command()
def export(
    target: Annotated[Path | None, typer.Option("--out", "-o", help="File to write.")] = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Write all judged answers as JSON lines, which `ondevice data` reads; into thumbs.jsonl without --out."""
    path = target or Path("thumbs.jsonl")
    rows = open_client(url, ca).export_thumbs(path)
    print_json({"file": str(path), "rows": rows}) if json else out.print(
        f"{rows} rows in {path}", markup=False
    )


@thumbs.command("delete")
def delete_thumb(
    thumb: Annotated[str, typer.Argument(help="Its id.")],
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Forget a judgement."""
    open_client(url, ca).delete_thumb(thumb)
    print_json({"deleted": thumb}) if json else out.print(f"{thumb} is deleted", markup=False)


def _show_active(answer: dict[str, Any], json: bool) -> None:
    print_json(answer) if json else out.print(
        f"in use: {answer['active'] or 'the base model'}", markup=False
    )
