"""Small tables as JSON and back, for pages: the rows to predict, and the answers to download."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ondevice.server import schemas
from ondevice.server.daemon import Daemon
from ondevice.server.placing import naming
from ondevice.server.routes import Serving, json_response

router = APIRouter(prefix="/v1/tables", tags=["predict"])
MOST_ROWS = 10_000
Name = Annotated[
    str,
    Query(
        max_length=200,
        pattern=r"[^./\\]\.(csv|tsv|jsonl|ndjson|json|xlsx|txt)$",
        description="The file's name; its ending says what kind of table it is.",
    ),
]


@router.post(
    "/read",
    response_model=schemas.Table,
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "The file, at most 8 MiB of it.",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def read_table(daemon: Serving, name: Name, request: Request) -> Response:
    """Return the rows of a CSV, Excel, JSON or text file; nothing is stored."""
    content = await request.body()
    return json_response(200, await daemon.pools.rows.run(_read, daemon, name, content))


def _read(daemon: Daemon, name: str, content: bytes) -> dict[str, Any]:
    with _folder(daemon) as folder:
        file = Path(folder) / f"rows{Path(name).suffix.lower()}"
        file.write_bytes(content)
        with naming(file, name):
            return daemon.data_helper("read_table", file=str(file), most=MOST_ROWS)


@router.post(
    "/write",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The file."}},
)
async def write_table(daemon: Serving, body: schemas.TableRequest) -> Response:
    """Return rows as a CSV, Excel or JSON lines file; nothing is stored."""
    content = await daemon.pools.rows.run(_write, daemon, body)
    headers = {"Content-Disposition": f'attachment; filename="answers{Path(body.name).suffix}"'}
    return Response(content, headers=headers, media_type="application/octet-stream")


def _write(daemon: Daemon, body: schemas.TableRequest) -> bytes:
    with _folder(daemon) as folder:
        file = Path(folder) / f"answers{Path(body.name).suffix.lower()}"
        values = body.model_dump(include={"columns", "rows", "like"})
        daemon.data_helper("write_table", file=str(file), **values)
        return file.read_bytes()


def _folder(daemon: Daemon) -> tempfile.TemporaryDirectory[str]:
    """Make a folder that the next start removes, if a kill leaves it."""
    return tempfile.TemporaryDirectory(prefix=".table-", dir=daemon.store.root / "uploads")
