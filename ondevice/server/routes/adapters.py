"""Adapters, and generation with and without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from ondevice.core.errors import BusyError, ConfigError
from ondevice.server import adapters, schemas
from ondevice.server.daemon import Daemon, running_job
from ondevice.server.jobs import adapter_folder, artifact_folder, locate_model
from ondevice.server.routes import MOST, After, Id, Limit, Serving, name_next

router = APIRouter(prefix="/v1", tags=["adapters"])
PIECE_BYTES = 1 << 20


@router.get("/adapters", response_model=list[schemas.Adapter])
def list_adapters(
    daemon: Serving, request: Request, response: Response, limit: Limit = MOST, after: After = None
) -> list[dict[str, Any]]:
    """Return the adapters, the newest first."""
    found, more = adapters.list_adapters(daemon.store, limit, after)
    name_next(found, more, limit, request, response)
    return found


@router.post("/adapters/rollback", response_model=schemas.Active)
def roll_back(daemon: Serving) -> dict[str, str | None]:
    """Activate the previous adapter, or the base model."""
    return {"active": adapters.roll_back(daemon.store)}


@router.get("/adapters/{adapter}", response_model=schemas.Adapter)
def get_adapter(daemon: Serving, adapter: Id) -> dict[str, Any]:
    """Return one adapter."""
    return adapters.get_adapter(daemon.store, adapter)


@router.get(
    "/adapters/{adapter}/download",
    response_class=Response,
    responses={
        200: {"content": {"application/zip": {}}, "description": "PEFT's two files and the task."}
    },
)
async def download_adapter(daemon: Serving, adapter: Id) -> Response:
    """Download a zip of the two files that PEFT loads, and of the task that the adapter learned."""
    folder = adapter_folder(daemon.store, adapter)
    packed = await daemon.pools.files.run(
        adapters.zipped_stream, folder, daemon.store.root / "uploads"
    )
    headers = {
        "Content-Disposition": f'attachment; filename="{adapter}.zip"',
        "Content-Length": str(os.fstat(packed.fileno()).st_size),
    }
    return StreamingResponse(_pieces(packed), headers=headers, media_type="application/zip")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


@router.post("/adapters/{adapter}/activate", response_model=schemas.Active)
def activate_adapter(daemon: Serving, adapter: Id) -> dict[str, str | None]:
    """Activate an adapter: the link `active` points to it, and POST /v1/generate uses it."""
    adapters.activate(daemon.store, adapter)
    return {"active": adapter}


@router.delete("/adapters/{adapter}", response_model=schemas.Done)
def delete_adapter(daemon: Serving, adapter: Id) -> dict[str, bool]:
    """Delete an adapter that is not active and that no waiting or running job starts from."""
    if job := daemon.queue.needing("adapter", adapter):
        raise BusyError(f"job {job} needs the adapter", hint="cancel the job first")
    adapters.remove_adapter(daemon.store, adapter)
    return {"ok": True}


@router.post("/generate", response_model=schemas.GenerateResponse)
async def generate(daemon: Serving, body: schemas.GenerateRequest) -> dict[str, Any]:
    """Generate with the base model and with the adapter. 409 if it does not fit next to a job."""
    return await daemon.pools.questions.run(_generate, daemon, body)


def _generate(daemon: Daemon, body: schemas.GenerateRequest) -> dict[str, Any]:
    if (body.model is None) == (body.artifact is None):
        raise ConfigError(
            "give a model or an artifact", expected="one of them", received="both or none"
        )
    adapter = body.adapter or adapters.active_adapter(daemon.store)
    prompt = body.prompt
    if not isinstance(body.prompt, str):
        prompt = [turn.model_dump() for turn in body.prompt]
    replies = daemon.model_helper(
        "generate",
        model=None if body.model is None else locate_model(daemon.store, body.model),
        artifact=None
        if body.artifact is None
        else str(artifact_folder(daemon.store, body.artifact)),
        adapter=str(adapter_folder(daemon.store, adapter)) if adapter else None,
        prompt=prompt,
        max_new_tokens=body.max_new_tokens,
        temperature=body.temperature,
        seed=body.seed,
        job=running_job(daemon),
    )
    return replies | {"adapter": adapter}
