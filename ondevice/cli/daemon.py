"""What the commands of a daemon share: flags, the client, and how a job and a plan are printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ondevice.cli.common import mebibytes, out, print_json, table
from ondevice.core.config import parse_bytes
from ondevice.core.errors import ConfigError
from ondevice.server.client import Client

if TYPE_CHECKING:
    from ondevice.server.client import Client

Url = Annotated[
    str | None,
    typer.Option(
        "--url", help="URL of the daemon (default: $ONDEVICE_URL, then http://127.0.0.1:8765)."
    ),
]
Ca = Annotated[
    Path | None, typer.Option("--ca", help="Also trust this certificate (PEM), such as your own.")
]
Job = Annotated[str, typer.Argument(help="Id of the job.")]


def open_client(url: str | None, ca: Path | None) -> Client:
    """Build the client of the daemon at `url`, which trusts `ca` and the system's certificates."""
    return Client(url, ca=ca)


def window_of(text: str | None) -> dict[str, str] | None:
    """Parse a daily window such as `22:00-06:00`; return None for `none` and for None."""
    if text is None or text == "none":
        return None
    start, dash, end = text.partition("-")
    if not dash:
        raise ConfigError("not a valid window", expected="22:00-06:00", received=text)
    return {"start": start.strip(), "end": end.strip()}


def bytes_of(text: str | None) -> int | None:
    """Parse a memory limit such as `6GiB` into bytes; return None for `none` and for None."""
    try:
        if text is None or text == "none":
            return None
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(
            "not a valid memory limit", expected="6GiB", received=str(error)
        ) from None


def show_job(job: dict[str, Any], json: bool) -> None:
    """Print a job as JSON, as the API has it, or as a table."""
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
    """Print the plan of a dry run: bytes by part, and whether it fits."""
    parts = {part: mebibytes(size) for part, size in plan["parts_bytes"].items()}
    table(parts, title=plan["model"])
    verdict = "does not fit"
    if plan["fits"]:
        verdict = "fits"
    total = mebibytes(plan["total_bytes"])
    usable = mebibytes(plan["usable_bytes"])
    out.print(f"{total} of {usable} usable: {verdict}", markup=False)
