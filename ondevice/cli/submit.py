"""The requests of `ondevice jobs` to a daemon: uploads, new jobs, and changes of jobs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ondevice.api.runfile import NULL, read_yaml
from ondevice.artifact.files import sha256_file
from ondevice.cli import common, flags
from ondevice.cli.common import print_json, show
from ondevice.cli.daemon import Ca, Job, Url, bytes_of, open_client, show_job, show_plan, window_of
from ondevice.core.errors import ConfigError, OndeviceError

if TYPE_CHECKING:
    from ondevice.server.client import Client

Priority = Annotated[
    int | None, typer.Option("--priority", help="Jobs with a higher priority run first.")
]
Retries = Annotated[
    int | None, typer.Option("--retries", help="Crashes in a row before the job fails.")
]


@flags.with_settings(
    "model",
    "data",
    "method",
    "train",
    without=("data.path", "data.eval_path", "train.memory_limit_bytes", "train.out"),
)
def create(
    artifact: Annotated[
        str | None, typer.Option("--artifact", help="Train an artifact of the daemon, not a model.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="A file to upload, a data set's id, or thumbs."),
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option("--eval-data", help="Held-out rows: a file to upload, or an id.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", "-a", help="Id of an adapter to start from.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Name of the job, for people.")] = "",
    priority: Priority = 0,
    window: Annotated[
        str | None, typer.Option("--window", help="Run only between these times: 22:00-06:00.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Most memory the job may take: 6GiB.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Most seconds the job may run in total.")
    ] = None,
    retries: Retries = None,
    force: common.Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; queue nothing, keep no upload.")
    ] = False,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
    *,
    config: Path | None,
    overrides: dict[str, Any],
) -> None:
    """Queue a job. A data file that the daemon does not have is uploaded first.

    The upload is deleted again if the job is refused. `--data thumbs` trains on the ratings."""
    client = open_client(url, ca)
    sections = _sections(read_yaml(config) if config is not None else {}, overrides)
    source = sections.get("model", {}).pop("source", None)
    # Any run file works here: its paths become uploads, and what the daemon decides is left out.
    paths = {key: sections.get("data", {}).pop(key, None) for key in ("path", "eval_path")}
    sections.get("train", {}).pop("out", None)
    sections.pop("export", None)
    if (rows := data or paths["path"]) is None:
        raise ConfigError("no data is given", expected="--data FILE, or a data set's id")
    eval_rows = eval_data or paths["eval_path"]
    sent: list[str] = []
    limits = {"memory_bytes": bytes_of(memory_limit), "time_s": time_limit, "retries": retries}
    job: dict[str, Any] = {
        "name": name,
        "model": None if artifact else source,
        "artifact": artifact,
        "adapter": adapter,
        "config": {section: values for section, values in sections.items() if values},
        "priority": priority or 0,
        "window": window_of(window),
        "limits": {key: value for key, value in limits.items() if value is not None},
        "force": force,
    }
    created = None
    try:
        job["dataset"] = _dataset(client, rows, sections, sent)
        job["eval_dataset"] = _dataset(client, eval_rows, sections, sent) if eval_rows else None
        if dry_run:
            planned = client.plan(**job)
            if json:
                print_json(planned)
            else:
                show_plan(planned["plan"])
            return
        created = client.create_job(**job)
        show(created, created["id"], json)
    finally:
        for dataset in sent if created is None else ():
            with suppress(OndeviceError):
                client.delete_dataset(dataset)


def upload(
    kind: Annotated[str, typer.Argument(help="Kind: model, artifact, adapter or dataset.")],
    path: Annotated[Path, typer.Argument(help="A folder, its zip, or a file of rows.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Name in the store (default: the file's).")
    ] = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Upload a model, an artifact, an adapter or rows, and print the id for a job."""
    stored = open_client(url, ca).upload(kind, path, name)
    show(stored, stored["id"], json)


def change(
    job: Job,
    priority: Priority = None,
    window: Annotated[
        str | None, typer.Option("--window", help="Daily window, such as 22:00-06:00, or none.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Memory limit, such as 6GiB, or none.")
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", help="Seconds in total, or none for no limit.")
    ] = None,
    retries: Retries = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Change the priority, window or limits of an unfinished job. Omitted flags change nothing."""
    client = open_client(url, ca)
    values: dict[str, Any] = {}
    if priority is not None:
        values["priority"] = priority
    if window is not None:
        values["window"] = window_of(window)
    # `none` removes a limit; an omitted flag keeps it.
    parsed = {
        "memory_bytes": bytes_of(memory_limit),
        "time_s": _seconds(time_limit),
        "retries": retries,
    }
    flags = {"memory_bytes": memory_limit, "time_s": time_limit, "retries": retries}
    if limits := {key: parsed[key] for key, text in flags.items() if text is not None}:
        values["limits"] = client.job(job)["limits"] | limits
    if not values:
        raise ConfigError("nothing to change", expected="--priority, --window, --memory-limit, ...")
    show_job(client.change_job(job, **values), json)


def _dataset(client: Client, rows: str | Path, sections: dict[str, Any], sent: list[str]) -> str:
    """Return the id of `rows`; upload a file that the daemon lacks, and note its id in `sent`."""
    if not Path(rows).is_file():
        return str(rows)
    options = {key: sections.get("data", {}).get(key) for key in ("task", "columns")}
    wanted = {"sha256": sha256_file(Path(rows)), "name": Path(rows).name, **options}
    for known in client.datasets():
        if all(known.get(key) == value for key, value in wanted.items()):
            return known["id"]
    options = {key: value for key, value in options.items() if value}
    sent.append(client.upload("dataset", rows, **options)["id"])
    return sent[-1]


def _sections(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a run file's sections with the overrides on top."""
    if isinstance(values.get("method"), str):
        values = values | {"method": {"name": values["method"]}}
    sections = {key: dict(section) for key, section in values.items()}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = None if value is NULL else value
    return sections


def _seconds(text: str | None) -> float | None:
    try:
        if text is None or text == "none":
            return None
        return float(text)
    except ValueError:
        raise ConfigError(
            "the time limit cannot be read", expected="seconds, or none", received=text
        ) from None
