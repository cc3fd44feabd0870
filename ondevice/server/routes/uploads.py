"""Uploads in parts: rows, models, artifacts, adapters."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ondevice.data.preview import Preview
from ondevice.server import schemas, uploads
from ondevice.server.routes import Id, Serving, json_response
from ondevice.server.routes.data import look_at_file, preview_file
from ondevice.server.upload_requests import FinishRequest, UploadRequest
from ondevice.server.uploads import PART_BYTES

router = APIRouter(prefix="/v1/uploads", tags=["uploads"])
PIECE_BYTES = 1 << 20
"""Bytes per write."""
HELD_BYTES = 32 << 20
"""Bytes of all parts in memory before they are written."""
_arriving = 0
"""Number of parts that arrive now."""


@router.post("", status_code=201, response_model=schemas.Upload)
def create_upload(daemon: Serving, body: UploadRequest) -> dict[str, Any]:
    """Start an upload of a known size."""
    return uploads.create(daemon.store, body)


@router.get("/{upload}", response_model=schemas.Upload)
def get_upload(daemon: Serving, upload: Id) -> dict[str, Any]:
    """Return how much has arrived."""
    return uploads.get(daemon.store, upload)


@router.put(
    "/{upload}",
    response_model=schemas.Upload,
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": f"The next bytes of the file, at most {PART_BYTES} of them.",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        }
    },
)
async def put_part(
    daemon: Serving,
    upload: Id,
    request: Request,
    offset: Annotated[
        int,
        Query(
            ge=0,
            lt=2**63,
            description="First byte of the part: the number of bytes that have arrived.",
        ),
    ],
) -> dict[str, Any]:
    """Append a part. A broken part keeps the bytes that arrived; GET returns their number."""
    global _arriving
    files = daemon.pools.files
    store = daemon.store
    size = int(request.headers.get("content-length", "0"))
    await files.run(uploads.check_part, store, upload, offset, size)
    _arriving += 1
    try:
        held = bytearray()
        async for chunk in request.stream():
            held += chunk
            # The more parts arrive at once, the smaller the pieces, to limit the memory.
            if len(held) >= min(PIECE_BYTES, HELD_BYTES // _arriving):
                await files.run(uploads.write, store, upload, offset, bytes(held))
                offset = offset + len(held)
                held = bytearray()
        return await files.run(uploads.write, store, upload, offset, bytes(held))
    finally:
        _arriving -= 1


@router.post("/{upload}/finish", status_code=201, response_model=schemas.Placed)
async def finish_upload(
    daemon: Serving, upload: Id, body: FinishRequest | None = None
) -> dict[str, Any]:
    """Check the file and store it. A refused file is deleted, and the response names the problem.

    One that cannot be checked now, as on a full disk, stays and can be finished later. A body
    changes how rows are read, after GET /v1/uploads/ID/columns."""
    return await daemon.pools.rows.run(uploads.finish, daemon.store, upload, daemon.check, body)


@router.get("/{upload}/columns", response_model=schemas.Columns)
async def upload_columns(daemon: Serving, upload: Id) -> Response:
    """Return the columns and first rows of a file that has arrived, before it is checked."""
    found = await daemon.pools.rows.run(
        lambda: look_at_file(daemon, uploads.rows_file(daemon.store, upload))
    )
    return json_response(200, found)


@router.post("/{upload}/preview", response_model=Preview)
async def preview_upload(
    daemon: Serving, upload: Id, body: schemas.PreviewRequest
) -> dict[str, Any]:
    """Return rows of a file that has arrived as the model sees them, before it is checked."""
    return await daemon.pools.rows.run(
        lambda: preview_file(daemon, uploads.rows_file(daemon.store, upload), body)
    )


@router.delete("/{upload}", response_model=schemas.Done)
def delete_upload(daemon: Serving, upload: Id) -> dict[str, bool]:
    """Forget an upload."""
    uploads.get(daemon.store, upload)
    uploads.remove(daemon.store, upload)
    return {"ok": True}
