"""The common part of the commands over a daemon: their flags, its client, and how a job and a plan are printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ondevice.cli.common import mebibytes, out, print_json, table
from ondevice.core.errors import ConfigError

if TYPE_CHECKING:
    from ondevice.server.client import Client

Url = Annotated[
    str | None, typer.Option("--url", help="Of the daemon; ONDEVICE_URL, or http://127.0.0.1:8765.")
]
Ca = Annotated[
    Path | None, typer.Option("--ca", help="Certificate (PEM) to trust, for one of your own.")
]
Job = Annotated[str, typer.Argument(help="The job's id.")]


def open_client(url: str | None, ca: Path | None) -> Client:
    """Build the client of the daemon at `url`, and trust the certificate `ca` beside those of the system."""
    from ondevice.server.client import Client

    return Client(url, ca=ca)


def window_of(text: str | None) -> dict[str, str] | None:
    """Return the start and the end of a daily window as `22:00-06:00`; None of `none`, and where none is given."""
    if text is None or text == "none":
        return None
    start, dash, end = text.partition("-")
    if not dash:
        raise ConfigError("the window cannot be read", expected="22:00-06:00", received=text)
    return {"start": start.strip(), "end": end.strip()}


def bytes_of(text: str | None) -> int | None:
    """Return the bytes of a limit as `6GiB`; None of `none`, and where none is given."""
    from ondevice.core.config import parse_bytes

    try:
        return None if text is None or text == "none" else parse_bytes(text)
    except ValueError as error:
        raise ConfigError(
            "the memory limit cannot be read", expected="6GiB", received=str(error)
        ) from None


def show_job(job: dict[str, Any], json: bool) -> None:
    """Print a job as the API gives it, or as a table."""
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


def show_plan(plan: dict[str, Any]) -> None:
    """Print the plan of a dry run: bytes by part, and the verdict."""
    table(
        {part: mebibytes(size) for part, size in plan["parts_bytes"].items()}, title=plan["model"]
    )
    verdict = "fits" if plan["fits"] else "does not fit"
    out.print(
        f"{mebibytes(plan['total_bytes'])} of {mebibytes(plan['usable_bytes'])} usable: {verdict}",
        markup=False,
    )
