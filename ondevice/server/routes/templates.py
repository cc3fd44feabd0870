"""Prompt templates of one's own."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ondevice.server import schemas, templates
from ondevice.server.routes import Id, Serving
from ondevice.server.templates import TemplateRequest

router = APIRouter(prefix="/v1/templates", tags=["data"])


@router.get("", response_model=list[schemas.TemplateForm])
def list_templates(daemon: Serving) -> list[dict[str, Any]]:
    """Return the prompt templates of the store; GET /v1/settings has the built-in ones."""
    return templates.list_templates(daemon.store)


@router.post("", status_code=201, response_model=schemas.TemplateForm)
def create_template(daemon: Serving, body: TemplateRequest) -> dict[str, Any]:
    """Store a prompt template. 409 if its name is taken: a template never changes."""
    return templates.create(daemon.store, body)


@router.delete("/{template}", response_model=schemas.Done)
def delete_template(daemon: Serving, template: Id) -> dict[str, bool]:
    """Delete a template that no data set and no waiting or running job uses."""
    templates.remove(daemon.store, template)
    return {"ok": True}
