"""Adapters in other programs' formats: converted in a helper process, then downloaded."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response

from ondevice.server import conversions, schemas
from ondevice.server.conversions import ConversionRequest
from ondevice.server.routes import MOST, After, Id, Limit, Serving, name_next

router = APIRouter(prefix="/v1", tags=["conversions"])


@router.get("/forms", response_model=list[schemas.ExitForm])
def list_forms() -> list[dict[str, Any]]:
    """Return the formats that an adapter can be converted to."""
    return conversions.forms()


@router.post("/conversions", status_code=202, response_model=schemas.Conversion)
def convert_adapter(daemon: Serving, body: ConversionRequest) -> dict[str, Any]:
    """Start converting an adapter, one at a time. It fails if it does not fit next to a job."""
    return daemon.conversions.create(body)


@router.get("/conversions", response_model=list[schemas.Conversion])
def list_conversions(
    daemon: Serving, request: Request, response: Response, limit: Limit = MOST, after: After = None
) -> list[dict[str, Any]]:
    """Return the conversions, the newest first. They are stored for a day."""
    found, more = daemon.conversions.page(limit, after)
    name_next(found, more, limit, request, response)
    return found


@router.get("/conversions/{conversion}", response_model=schemas.Conversion)
def get_conversion(daemon: Serving, conversion: Id) -> dict[str, Any]:
    """Return one conversion."""
    return daemon.conversions.get(conversion)


@router.get(
    "/conversions/{conversion}/download",
    response_class=Response,
    responses={
        200: {
            "content": {"application/octet-stream": {}},
            "description": "The file, or a zip of the folder.",
        }
    },
)
def download_conversion(daemon: Serving, conversion: Id) -> Response:
    """Download the result: one file, or a zip of the folder. 409 until it is done."""
    path = daemon.conversions.file(conversion)
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


@router.delete("/conversions/{conversion}", response_model=schemas.Done)
def delete_conversion(daemon: Serving, conversion: Id) -> dict[str, bool]:
    """Delete a conversion and its file; a running one is stopped."""
    daemon.conversions.remove(conversion)
    return {"ok": True}
