"""Adapters, and what a model says with and without one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from ondevice.errors import BusyError
from ondevice.server import adapters, schemas
from ondevice.server.jobs import adapter_folder
from ondevice.server.models import locate_model
from ondevice.server.queue import ENDED
from ondevice.server.routes import Id, Serving

router = APIRouter(prefix="/v1", tags=["adapters"])


@router.get("/adapters", response_model=list[schemas.Adapter])
def list_adapters(daemon: Serving) -> list[dict[str, Any]]:
    """All adapters, the newest first."""
    return adapters.list_adapters(daemon.store)


@router.post("/adapters/rollback", response_model=schemas.Active)
def roll_back(daemon: Serving) -> dict[str, str | None]:
    """Use the adapter that was in use before the active one, or the base model."""
    return {"active": adapters.roll_back(daemon.store)}


@router.get("/adapters/{adapter}", response_model=schemas.Adapter)
def get_adapter(daemon: Serving, adapter: Id) -> dict[str, Any]:
    """One adapter."""
    return adapters.get_adapter(daemon.store, adapter)


@router.get(
    "/adapters/{adapter}/download",
    response_class=Response,
    responses={200: {"content": {"application/zip": {}}, "description": "PEFT's two files."}},
)
def download_adapter(daemon: Serving, adapter: Id) -> Response:
    """The adapter as a zip of adapter_config.json and adapter_model.safetensors, as PEFT loads them."""
    content = adapters.zipped(adapter_folder(daemon.store, adapter))
    return Response(content, media_type="application/zip",
                    headers={"Content-Disposition": f'attachment; filename="{adapter}.zip"'})  # fmt: skip


@router.post("/adapters/{adapter}/activate", response_model=schemas.Active)
def activate_adapter(daemon: Serving, adapter: Id) -> dict[str, str | None]:
    """Use an adapter: the store's link `active` points to it, and POST /v1/generate takes it."""
    adapters.activate(daemon.store, adapter)
    return {"active": adapter}


@router.delete("/adapters/{adapter}", response_model=schemas.Done)
def delete_adapter(daemon: Serving, adapter: Id) -> dict[str, bool]:
    """Delete an adapter that is not active and that no waiting or running job starts from."""
    for job in daemon.queue.list():
        if job.state not in ENDED and job.spec.get("adapter") == adapter:
            raise BusyError(f"job {job.id} needs the adapter", hint="cancel the job first")
    adapters.remove_adapter(daemon.store, adapter)
    return {"ok": True}


@router.post("/generate", response_model=schemas.GenerateAnswer)
def generate(daemon: Serving, body: schemas.GenerateRequest) -> dict[str, Any]:
    """What the base model answers, and what it answers with the adapter."""
    adapter = body.adapter or adapters.active_adapter(daemon.store)
    prompt = body.prompt if isinstance(body.prompt, str) else [turn.model_dump() for turn in body.prompt]
    found = daemon.model(
        "generate",
        model=locate_model(daemon.store, body.model),
        adapter=str(adapter_folder(daemon.store, adapter)) if adapter else None,
        prompt=prompt,
        max_new_tokens=body.max_new_tokens,
        temperature=body.temperature,
        seed=body.seed,
    )
    return found | {"adapter": adapter}
