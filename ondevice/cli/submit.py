"""The requests of `ondevice jobs` to a daemon: files, a new job, and changes of one that waits or runs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ondevice.artifact.files import sha256_file
from ondevice.cli import common
from ondevice.cli.common import out, overrides, print_json
from ondevice.cli.daemon import Ca, Job, Url, bytes_of, open_client, show_job, show_plan, window_of
from ondevice.core.errors import ConfigError, OndeviceError

if TYPE_CHECKING:
    from ondevice.server.client import Client


@common.with_run_options(without=("--data", "--eval-data", "--memory-limit", "--out"))
@common.with_method_options
def create(
    first: common.FirstModel = None,
    config: common.Config = None,
    model: common.Model = None,
    artifact: Annotated[
        str | None, typer.Option("--artifact", help="An artifact of the daemon, not a model.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="A file to upload, or a data set's id.")
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option("--eval-data", help="Likewise, only evaluated.")
    ] = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", "-a", help="An adapter's id to start from.")
    ] = None,
    settings: common.Settings = None,
    name: Annotated[str, typer.Option("--name", help="For people.")] = "",
    priority: Annotated[int, typer.Option("--priority", help="Higher runs first.")] = 0,
    window: Annotated[
        str | None, typer.Option("--window", help="Only between these times: 22:00-06:00.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="Memory that the job may take: 6GiB.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", help="Seconds of running, in all.")
    ] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", help="Crashes in a row before it fails.")
    ] = None,
    force: common.Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; queue nothing, keep no upload.")
    ] = False,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
    *,
    method_options: dict[str, Any],
    run_options: dict[str, Any],
) -> None:
    """Queue a job; a data file is uploaded first, unless the daemon has it, and deleted again if the job is refused."""
    from ondevice.api.runfile import read_yaml

    model = common.model_of(first, model)
    client = open_client(url, ca)
    values = read_yaml(config) if config is not None else {}
    flags = overrides(settings) | method_options | run_options
    sections = _sections(values, flags)
    source = sections.get("model", {}).pop("source", None)
    # A run file works here as it is: paths become uploads, and what only the daemon can say is left out.
    paths = {key: sections.get("data", {}).pop(key, None) for key in ("path", "eval_path")}
    sections.get("train", {}).pop("out", None)
    sections.pop("export", None)
    if (rows := data or paths["path"]) is None:
        raise ConfigError("no data is given", expected="--data FILE, or a data set's id")
    eval_rows, sent = eval_data or paths["eval_path"], []
    limits = {"memory_bytes": bytes_of(memory_limit), "time_s": time_limit, "retries": retries}
    job: dict[str, Any] = {
        "name": name,
        "model": None if artifact else model or source,
        "artifact": artifact,
        "adapter": adapter,
        "config": {section: values for section, values in sections.items() if values},
        "priority": priority,
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
            print_json(planned) if json else show_plan(planned["plan"])
            return
        created = client.create_job(**job)
        print_json(created) if json else out.print(created["id"], markup=False)
    finally:
        for dataset in sent if created is None else ():
            with suppress(OndeviceError):
                client.delete_dataset(dataset)


def upload(
    kind: Annotated[str, typer.Argument(help="model, artifact, adapter or dataset.")],
    path: Annotated[Path, typer.Argument(help="A folder, a zip of one, or a file with rows.")],
    name: Annotated[
        str | None, typer.Option("--name", help="Its name there; the file's by default.")
    ] = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Send a model, an exported program, an adapter or rows; prints the id that a job names."""
    placed = open_client(url, ca).upload(kind, path, name)
    print_json(placed) if json else out.print(placed["id"], markup=False)


def change(
    job: Job,
    priority: Annotated[int | None, typer.Option("--priority", help="Higher runs first.")] = None,
    window: Annotated[
        str | None, typer.Option("--window", help="22:00-06:00; none for always.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option("--memory-limit", help="6GiB; none for no limit.")
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option("--time-limit", help="Seconds in all; none for no limit.")
    ] = None,
    retries: Annotated[
        int | None, typer.Option("--retries", help="Crashes in a row before it fails.")
    ] = None,
    url: Url = None,
    ca: Ca = None,
    json: common.Json = False,
) -> None:
    """Change priority, window or limits of a job that is not done; what is not given stays."""
    client, values = open_client(url, ca), {}
    if priority is not None:
        values["priority"] = priority
    if window is not None:
        values["window"] = window_of(window)
    # `none` takes a limit away, which is not the same as a flag that is not given.
    parsed = {
        "memory_bytes": bytes_of(memory_limit),
        "time_s": _seconds(time_limit),
        "retries": retries,
    }
    flags = {"memory_bytes": memory_limit, "time_s": time_limit, "retries": retries}
    if limits := {key: parsed[key] for key, text in flags.items() if text is not None}:
        values["limits"] = client.job(job)["limits"] | limits
    if not values:
        raise ConfigError(
            "nothing is to be changed", expected="--priority, --window, --memory-limit, ..."
        )
    show_job(client.change_job(job, **values), json)


def _dataset(client: Client, rows: str | Path, sections: dict[str, Any], sent: list[str]) -> str:
    """Return the id of `rows`; a file that the daemon does not have is uploaded, and its id is appended to `sent`."""
    if not Path(rows).is_file():
        return str(rows)
    named = {key: sections.get("data", {}).get(key) for key in ("task", "columns")}
    digest, name = sha256_file(Path(rows)), Path(rows).name
    for known in client.datasets():
        options = {key: known.get(key) for key in named}
        if (known["sha256"], known["name"], options) == (digest, name, named):
            return known["id"]
    sent.append(
        client.upload("dataset", rows, **{key: value for key, value in named.items() if value})[
            "id"
        ]
    )
    return sent[-1]


def _sections(values: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    from ondevice.api.runfile import NULL

    sections: dict[str, Any] = {key: {"name": value} if key == "method" and isinstance(value, str) else dict(value)
                for key, value in values.items()}  # fmt: skip
    for key, value in flags.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = None if value is NULL else value
    return sections


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None or text == "none" else float(text)
    except ValueError:
        raise ConfigError(
            "the time limit cannot be read", expected="seconds, or none", received=text
        ) from None
