"""Adapters, and generation with and without one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from ondevice.core.errors import BusyError, ConfigError
from ondevice.server import adapters, schemas
from ondevice.server.daemon import Daemon
from ondevice.server.engine.answer import Answer
from ondevice.server.jobs import adapter_folder, artifact_folder, locate_model
from ondevice.server.routes import MOST, After, Id, Limit, Serving, name_next
from ondevice.server.routes.asking import client_of, while_connected
from ondevice.server.routes.completions import in_turns

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
async def generate(
    daemon: Serving, body: schemas.GenerateRequest, request: Request
) -> dict[str, Any]:
    """Generate with the base model and with the adapter. 409 if it does not fit next to a job."""
    adapter, places = await run_in_threadpool(_places, daemon, body)
    prompt = body.prompt
    if not isinstance(body.prompt, str):
        prompt = [turn.model_dump() for turn in body.prompt]
    options = body.model_dump(include={"max_new_tokens", "temperature", "seed"})
    asked = [{**place, **options, "prompt": prompt} for place in places]
    answers = daemon.engine.ask(client_of(request), "complete", asked)
    texts = await while_connected(request, answers, _texts(answers))
    texts = [*texts, None][:2]  # None without an adapter
    return {"base": texts[0], "adapted": texts[1], "adapter": adapter}


def _places(
    daemon: Daemon, body: schemas.GenerateRequest
) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the adapter, and what generates: the model, and the model with the adapter."""
    if (body.model is None) == (body.artifact is None):
        raise ConfigError(
            "give a model or an artifact", expected="one of them", received="both or none"
        )
    base: dict[str, str | None] = {"model": None, "artifact": None, "adapter": None}
    if body.model is not None:
        base["model"] = locate_model(daemon.store, body.model)
    if body.artifact is not None:
        base["artifact"] = str(artifact_folder(daemon.store, body.artifact))
    adapter = body.adapter or adapters.active_adapter(daemon.store)
    places = [base]
    if adapter is not None:
        places.append(base | {"adapter": str(adapter_folder(daemon.store, adapter))})
    return adapter, [in_turns(place) for place in places]


async def _texts(answers: list[Answer]) -> list[str | None]:
    return ["".join([part.get("text", "") async for part in answer]) for answer in answers]
