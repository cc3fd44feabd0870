"""Ratings of replies, thumbs up or down: stored, listed, exported as rows."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import ValidationError

from ondevice.core.errors import ConfigError
from ondevice.server import schemas, thumbs
from ondevice.server.daemon import Daemon
from ondevice.server.openai import REFUSALS
from ondevice.server.routes import After, Id, Limit, Serving, name_next

router = APIRouter(prefix="/v1", tags=["thumbs"])


@router.post("/thumbs", response_model=schemas.Thumb)
def judge_answer(daemon: Serving, body: schemas.ThumbRequest) -> dict[str, Any]:
    """Store a rating of a reply. Rating the same reply again keeps its id."""
    return _judge(daemon, body)


def _judge(daemon: Daemon, body: schemas.ThumbRequest) -> dict[str, Any]:
    if isinstance(body.prompt, str):
        prompt = body.prompt
    else:
        prompt = [turn.model_dump() for turn in body.prompt]
    return thumbs.judge(daemon.store, prompt, body.answer, body.liked, body.model, body.adapter)


@router.post("/feedback", response_model=schemas.Thumb, responses=REFUSALS)
def rate_response(daemon: Serving, body: schemas.FeedbackRequest) -> dict[str, Any]:
    """Rate one of the last answers by the id of its response, up or down, as POST /v1/thumbs does.

    The daemon remembers answers in memory only: the last 1,000 since it started.
    """
    answer = daemon.recent.get(body.id, body.index)
    model, adapter = answer.model, answer.adapter
    row = daemon.store.row("SELECT base_model FROM adapters WHERE id = ?", model)
    if row is not None:
        adapter = model
        model = row["base_model"]
    values = {
        "prompt": answer.prompt,
        "answer": answer.answer,
        "liked": body.rating == "up",
        "model": model,
        "adapter": adapter,
    }
    try:
        request = schemas.ThumbRequest.model_validate(values)
    except ValidationError:
        raise ConfigError(
            "'id' names an answer that cannot be rated",
            expected="a prompt of text, no empty turn, and an answer with text",
            received=f"{body.id}, index {body.index}",
            hint="rate an answer to text or to messages",
        ) from None
    return _judge(daemon, request)


@router.get("/thumbs/counts", response_model=schemas.ThumbCounts)
def count_thumbs(daemon: Serving) -> dict[str, int]:
    """Return the number of ratings of each kind."""
    return thumbs.count(daemon.store)


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
