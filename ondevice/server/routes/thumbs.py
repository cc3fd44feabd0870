"""Ratings of replies, thumbs up or down: stored, listed, exported as rows."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from ondevice.server import schemas, thumbs
from ondevice.server.routes import After, Id, Limit, Serving, name_next

router = APIRouter(prefix="/v1", tags=["thumbs"])


@router.post("/thumbs", response_model=schemas.Thumb)
def judge_answer(daemon: Serving, body: schemas.ThumbRequest) -> dict[str, Any]:
    """Store a rating of a reply. Rating the same reply again keeps its id."""
    if isinstance(body.prompt, str):
        prompt = body.prompt
    else:
        prompt = [turn.model_dump() for turn in body.prompt]
    return thumbs.judge(daemon.store, prompt, body.answer, body.liked, body.model, body.adapter)


@router.get("/thumbs", response_model=list[schemas.Thumb])
def list_thumbs(
    daemon: Serving, request: Request, response: Response, limit: Limit = 100, after: After = None
) -> list[dict[str, Any]]:
    """Return the rated replies, the newest first."""
    found, more = thumbs.list_thumbs(daemon.store, limit, after)
    name_next(found, more, limit, request, response)
    return found


@router.get(
    "/thumbs/export",
    response_class=Response,
    responses={
        200: {"content": {"application/jsonl": {}}, "description": "Rows of the format `thumbs`."}
    },
)
def export_thumbs(daemon: Serving) -> Response:
    """Download all ratings as rows to train on: prompt, completion, label, model, adapter."""
    headers = {"Content-Disposition": 'attachment; filename="thumbs.jsonl"'}
    return StreamingResponse(
        thumbs.lines(daemon.store), headers=headers, media_type="application/jsonl"
    )


@router.delete("/thumbs/{thumb}", response_model=schemas.Done)
def delete_thumb(daemon: Serving, thumb: Id) -> dict[str, bool]:
    """Forget one judgement."""
    thumbs.remove(daemon.store, thumb)
    return {"ok": True}
