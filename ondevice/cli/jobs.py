"""`ondevice jobs`: the queue of a daemon, from anywhere."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ondevice.cli import common
from ondevice.cli.common import err, mebibytes, out, overrides, print_json, table
from ondevice.core.errors import ConfigError, OndeviceError, TrainingError

if TYPE_CHECKING:
    from ondevice.server.client import Client

app = typer.Typer(help="The queue of a daemon; a token is read from ONDEVICE_TOKEN.", no_args_is_help=True)
adapters = typer.Typer(help="Adapters of the daemon.", no_args_is_help=True)
app.add_typer(adapters, name="adapters")
Url = Annotated[str | None, typer.Option("--url", help="Of the daemon; ONDEVICE_URL, or http://127.0.0.1:8765.")]
Ca = Annotated[Path | None, typer.Option("--ca", help="Certificate (PEM) to trust, for one of your own.")]
Job = Annotated[str, typer.Argument(help="The job's id.")]
Adapter = Annotated[str, typer.Argument(help="The adapter's id.")]


def _client(url: str | None, ca: Path | None) -> Client:
    from ondevice.server.client import Client

    return Client(url, ca=ca)


@app.command("list")
def list_jobs(
    url: Url = None,
    ca: Ca = None,
    state: Annotated[list[str] | None, typer.Option("--state", help="Only jobs in this state (repeat).")] = None,
    json: common.Json = False,
) -> None:
    """List the jobs that run, wait, and have ended."""
    jobs = _client(url, ca).jobs(*(state or []))
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


@app.command()
def create(
    config: common.Config = None,
    model: common.Model = None,
    artifact: Annotated[str | None, typer.Option("--artifact", help="An artifact of the daemon, not a model.")] = None,
    method: common.Method = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="A file to upload, or a data set's id.")] = None,
    eval_data: Annotated[str | None, typer.Option("--eval-data", help="Likewise, only evaluated.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", "-a", help="An adapter's id to start from.")] = None,
    task: common.Task = None,
    steps: common.Steps = None,
    batch_size: common.BatchSize = None,
    max_length: common.MaxLength = None,
    learning_rate: common.LearningRate = None,
    seed: common.Seed = None,
    settings: common.Settings = None,
    name: Annotated[str, typer.Option("--name", help="For people.")] = "",
    priority: Annotated[int, typer.Option("--priority", help="Higher runs first.")] = 0,
    window: Annotated[str | None, typer.Option("--window", help="Only between these times: 22:00-06:00.")] = None,
    memory_limit: common.MemoryLimit = None,
    time_limit: Annotated[float | None, typer.Option("--time-limit", help="Seconds of running, in all.")] = None,
    retries: Annotated[int | None, typer.Option("--retries", help="Crashes in a row before it fails.")] = None,
    force: common.Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; queue nothing, keep no upload.")] = False,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Queue a job; a data file is uploaded first, and deleted again if the job is refused."""
    from ondevice.api.runfile import read_yaml

    client = _client(url, ca)
    values = read_yaml(config) if config is not None else {}
    flags = overrides(
        settings,
        method__name=method,
        data__task=task,
        train__steps=steps,
        train__batch_size=batch_size,
        data__max_length_tokens=max_length,
        method__learning_rate=learning_rate,
        train__seed=seed,
    )
    sections = _sections(values, flags)
    source = sections.get("model", {}).pop("source", None)
    # A run file works here as it is: paths become uploads, and what only the daemon can say is left out.
    paths = {key: sections.get("data", {}).pop(key, None) for key in ("path", "eval_path")}
    sections.get("train", {}).pop("out", None)
    sections.pop("export", None)
    if (rows := data or paths["path"]) is None:
        raise ConfigError("no data is given", expected="--data FILE, or a data set's id")
    eval_rows, sent = eval_data or paths["eval_path"], []
    limits = {"memory_bytes": _bytes(memory_limit), "time_s": time_limit, "retries": retries}
    job: dict[str, Any] = {
        "name": name,
        "model": None if artifact else model or source,
        "artifact": artifact,
        "adapter": adapter,
        "config": {section: values for section, values in sections.items() if values},
        "priority": priority,
        "window": _window(window),
        "limits": {key: value for key, value in limits.items() if value is not None},
        "force": force,
    }
    created = None
    try:
        job["dataset"] = _dataset(client, rows, sections, sent)
        job["eval_dataset"] = _dataset(client, eval_rows, sections, sent) if eval_rows else None
        if dry_run:
            planned = client.plan(**job)
            print_json(planned) if json else _show_plan(planned["plan"])
            return
        created = client.create_job(**job)
        print_json(created) if json else out.print(created["id"], markup=False)
    finally:
        for dataset in sent if created is None else ():
            with suppress(OndeviceError):
                client.delete_dataset(dataset)


@app.command()
def upload(
    kind: Annotated[str, typer.Argument(help="model, artifact, adapter or dataset.")],
    path: Annotated[Path, typer.Argument(help="A folder, a zip of one, or a file with rows.")],
    name: Annotated[str | None, typer.Option("--name", help="Its name there; the file's by default.")] = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Send a model, an exported program, an adapter or rows; prints the id that a job names."""
    placed = _client(url, ca).upload(kind, path, name)
    print_json(placed) if json else out.print(placed["id"], markup=False)


@app.command()
def change(
    job: Job,
    priority: Annotated[int | None, typer.Option("--priority", help="Higher runs first.")] = None,
    window: Annotated[str | None, typer.Option("--window", help="22:00-06:00; none for always.")] = None,
    memory_limit: Annotated[str | None, typer.Option("--memory-limit", help="6GiB; none for no limit.")] = None,
    time_limit: Annotated[str | None, typer.Option("--time-limit", help="Seconds in all; none for no limit.")] = None,
    retries: Annotated[int | None, typer.Option("--retries", help="Crashes in a row before it fails.")] = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Change priority, window or limits of a job that is not done; what is not given stays."""
    client, values = _client(url, ca), {}
    if priority is not None:
        values["priority"] = priority
    if window is not None:
        values["window"] = _window(window)
    # `none` takes a limit away, which is not the same as a flag that is not given.
    parsed = {"memory_bytes": _bytes(memory_limit), "time_s": _seconds(time_limit), "retries": retries}
    flags = {"memory_bytes": memory_limit, "time_s": time_limit, "retries": retries}
    if limits := {key: parsed[key] for key, text in flags.items() if text is not None}:
        values["limits"] = client.job(job)["limits"] | limits
    if not values:
        raise ConfigError("nothing is to be changed", expected="--priority, --window, --memory-limit, ...")
    _show(client.change_job(job, **values), json)


@app.command()
def delete(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Forget an ended job, with its log, events and checkpoints; its adapters stay."""
    _client(url, ca).delete_job(job)
    print_json({"deleted": job}) if json else out.print(f"{job} is deleted", markup=False)


@app.command()
def show(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Show one job."""
    _show(_client(url, ca).job(job), json)


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

    client, last = _client(url, ca), {}
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
    _show(_client(url, ca).pause(job), json)


@app.command()
def resume(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Go on with a paused or failed job."""
    _show(_client(url, ca).resume(job), json)


@app.command()
def cancel(job: Job, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """End a job for good."""
    _show(_client(url, ca).cancel(job), json)


@app.command()
def log(job: Job, url: Url = None, ca: Ca = None) -> None:
    """Print the end of the log of the job's workers."""
    typer.echo(_client(url, ca).log(job), nl=False)


@adapters.command("list")
def list_adapters(url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """List all adapters, the newest first."""
    rows = _client(url, ca).adapters()
    if json:
        print_json({"adapters": rows})
        return
    for row in rows:
        active = "  active" if row["active"] else ""
        out.print(f"{row['id']}  rank {row['rank']}  {row['base_model']}  {row['name']}{active}", markup=False)


@adapters.command()
def download(
    adapter: Adapter, folder: common.Out = None, url: Url = None, ca: Ca = None, json: common.Json = False
) -> None:
    """Write an adapter's two files, as PEFT loads them; into a folder of its name without --out."""
    written = _client(url, ca).download_adapter(adapter, folder or Path(adapter))
    print_json({"adapter": adapter, "folder": str(written)}) if json else out.print(str(written), markup=False)


@adapters.command()
def activate(adapter: Adapter, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Use an adapter: the store's link `active` points to it."""
    _show_active(_client(url, ca).activate(adapter), json)


@adapters.command("rollback")
def roll_back(url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Use what was in use before: another adapter, or the base model."""
    _show_active(_client(url, ca).roll_back(), json)


@adapters.command("delete")
def delete_adapter(adapter: Adapter, url: Url = None, ca: Ca = None, json: common.Json = False) -> None:
    """Delete an adapter that is not active and that no waiting or running job starts from."""
    _client(url, ca).delete_adapter(adapter)
    print_json({"deleted": adapter}) if json else out.print(f"{adapter} is deleted", markup=False)


def _show_active(answer: dict[str, Any], json: bool) -> None:
    print_json(answer) if json else out.print(f"in use: {answer['active'] or 'the base model'}", markup=False)


def _show(job: dict[str, Any], json: bool) -> None:
    if json:
        print_json(job)
        return
    progress = job["progress"]
    table(
        {
            "job": job["id"],
            "name": job["name"] or None,
            "state": job["state"],
            "reason": job["reason"] or None,
            "error": (job["error"] or {}).get("message"),
            "model": job["model"] or job["artifact"],
            "dataset": job["dataset"],
            "step": f"{progress['step']} of {progress['steps']}" if "step" in progress else None,
            "loss": progress.get("loss"),
            "tokens_per_s": progress.get("tokens_per_s"),
            "peak_memory": mebibytes(progress.get("peak_memory_bytes")),
            "adapters": ", ".join(job["adapters"]) or None,
        }
    )


def _show_plan(plan: dict[str, Any]) -> None:
    table({part: mebibytes(size) for part, size in plan["parts_bytes"].items()}, title=plan["model"])
    verdict = "fits" if plan["fits"] else "does not fit"
    out.print(f"{mebibytes(plan['total_bytes'])} of {mebibytes(plan['usable_bytes'])} usable: {verdict}", markup=False)


def _dataset(client: Client, rows: str | Path, sections: dict[str, Any], sent: list[str]) -> str:
    """Return the id of `rows`; a file is uploaded, and its id is appended to `sent`."""
    if not Path(rows).is_file():
        return str(rows)
    sent.append(client.upload("dataset", rows, task=sections.get("data", {}).get("task"))["id"])
    return sent[-1]


def _sections(values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    sections = {key: {"name": value} if key == "method" and isinstance(value, str) else dict(value)
                for key, value in values.items()}  # fmt: skip
    for key, value in flags.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def _window(text: str | None) -> dict[str, str] | None:
    if text is None or text == "none":
        return None
    start, dash, end = text.partition("-")
    if not dash:
        raise ConfigError("the window cannot be read", expected="22:00-06:00", received=text)
    return {"start": start.strip(), "end": end.strip()}


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None or text == "none" else float(text)
    except ValueError:
        raise ConfigError("the time limit cannot be read", expected="seconds, or none", received=text) from None


def _bytes(text: str | None) -> int | None:
    from ondevice.core.config import parse_bytes

    try:
        return None if text is None or text == "none" else parse_bytes(text)
    except ValueError as error:
        raise ConfigError("the memory limit cannot be read", expected="6GiB", received=str(error)) from None
