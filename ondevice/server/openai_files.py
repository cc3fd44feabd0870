"""The daemon's data sets of conversations as OpenAI's clients see them: files to fine-tune with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ondevice.core.errors import ConfigError
from ondevice.server.jobs import dataset_file
from ondevice.server.schemas import ResponseBody
from ondevice.server.store import MissingError, Store

PURPOSE = "fine-tune"
FILE_BYTES = 512 << 20
"""Longest form with a file, as in OpenAI's API."""
EXAMPLE = '{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]} on each line'
Order = Literal["asc", "desc"]
_KNOWN = ("purpose",)


class File(ResponseBody):
    """A data set of conversations."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: None = None
    filename: str
    purpose: Literal["fine-tune"] = PURPOSE
    status: Literal["processed"] = "processed"
    status_details: None = None
    rows: int
    """Conversations; not in OpenAI's API."""


class FileList(ResponseBody):
    """GET /v1/files."""

    object: Literal["list"] = "list"
    data: list[File]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedFile(ResponseBody):
    """DELETE /v1/files/ID."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


def checked_name(name: str) -> str:
    """Return a file's name without folders; ConfigError if it is not JSON lines."""
    plain = name.replace("\\", "/").rpartition("/")[2].strip()[:200] or "upload"
    if "." not in plain:  # clients name bytes without a name so
        plain += ".jsonl"
    if Path(plain).suffix.lower() not in (".jsonl", ".ndjson"):
        raise ConfigError(
            "unsupported kind of file",
            expected=f"JSON lines, with a name that ends with .jsonl: {EXAMPLE}",
            received=plain,
            hint="POST /v1/uploads takes CSV, Excel and Parquet",
        )
    return plain


def check_fields(fields: dict[str, str]) -> None:
    """Raise ConfigError unless the form asks for a file to fine-tune with."""
    for name in fields:
        if name not in _KNOWN:
            raise ConfigError(
                f"'{name[:80]}' is not supported", expected="the fields purpose and file",
                received=name[:80],
            )  # fmt: skip
    if fields.get("purpose") != PURPOSE:
        raise ConfigError(
            "'purpose' is not supported",
            expected=PURPOSE,
            received=fields.get("purpose", "none")[:80],
        )


def get(store: Store, name: str) -> dict[str, Any]:
    """Return a data set of conversations as a file; raise MissingError if there is none."""
    row = store.row("SELECT * FROM datasets WHERE id = ? AND format = 'chat'", name)
    if row is None:
        raise MissingError(f"no such file: {name}", hint="GET /v1/files lists them")
    return _file(row)


def list_files(store: Store, limit: int, after: str | None, order: Order) -> dict[str, Any]:
    """Return a page of the data sets of conversations."""
    sign = "-"
    if order == "asc":
        sign = ""
    rows, more = store.page(
        "datasets", f"{sign}created_s, id", limit, after, where="format = 'chat'"
    )
    data = [_file(row) for row in rows]
    ids = [file["id"] for file in data] or [None]
    return {"data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


def path_of(store: Store, name: str) -> Path:
    """Return the path of a file; raise MissingError if there is none."""
    get(store, name)
    return dataset_file(store, name)


def _file(row: Any) -> dict[str, Any]:
    return {
        "id": row["id"],
        "bytes": row["bytes"],
        "created_at": int(row["created_s"]),
        "filename": row["name"],
        "rows": row["rows"],
    }
