"""Answers for rows: labels with probabilities, or generated text, as the training asked for them."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

from anyio import CancelScope
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ondevice.data.tasks.trained import TrainedTask
from ondevice.server import schemas
from ondevice.server.daemon import Daemon, running_job
from ondevice.server.jobs import adapter_folder
from ondevice.server.openai import REFUSALS
from ondevice.server.predict import task_of
from ondevice.server.routes import Id, Serving, json_response
from ondevice.server.routes.completions import locate

router = APIRouter(prefix="/v1", tags=["predict"])


@router.get("/adapters/{adapter}/task", response_model=schemas.TaskResponse)
def get_task(daemon: Serving, adapter: Id) -> dict[str, Any]:
    """Return what an adapter was trained to do. 409 if it has no record."""
    return _shown(task_of(adapter_folder(daemon.store, adapter), f"adapter {adapter}"))


def _shown(task: TrainedTask) -> dict[str, Any]:
    labels = list(task.labels.values())
    found = task.found_task()
    if found is not None and not labels:
        labels = [choice.text.strip() for choice in found.choices]
    return {
        "format": task.format,
        "task": task.task,
        "inputs": task.inputs,
        "labels": labels,
        "generates": not task.has_candidates,
        "max_length_tokens": task.max_length_tokens,
    }


@router.post("/predict", response_model=schemas.PredictResponse, responses=REFUSALS)
async def predict_rows(daemon: Serving, body: schemas.PredictRequest, request: Request) -> Response:
    """Predict rows, which need no labels, by the functions of `ondevice predict`.

    409 if the model does not fit next to a job, or does not record its task. A
    body has at most 1 MiB. If the client disconnects, the work ends at the next row.
    """
    parts = await daemon.pools.questions.run(_begin, daemon, body)
    try:
        while (found := await daemon.pools.answers.run(_next, parts)) is None:
            if await request.is_disconnected():
                return Response(status_code=400)  # nobody reads it
    finally:
        with CancelScope(shield=True):
            await daemon.pools.answers.run(parts.close)
    answer = schemas.PredictResponse.model_validate({"model": body.model, **found})
    return json_response(200, answer.model_dump(mode="json"))


def _begin(daemon: Daemon, body: schemas.PredictRequest) -> Generator[None, None, dict[str, Any]]:
    """Wait for the model and the first row, so that other answers are not delayed."""
    places = locate(daemon, body.model, body.adapter)
    folder = places["adapter"] or places["artifact"]
    if folder is None and places["model"] is not None and Path(places["model"]).is_dir():
        folder = places["model"]
    name = body.adapter or body.model
    task_of(None if folder is None else Path(folder), name, body.task)
    parts = daemon.model_helper.stream(
        "predict",
        **places,
        rows=body.rows,
        folder=folder,
        name=name,
        task=body.task,
        max_new_tokens=body.max_new_tokens,
        job=running_job(daemon),
    )
    next(parts)
    return parts


def _next(parts: Generator[None, None, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the predictions once the last row is done, else None."""
    try:
        next(parts)
    except StopIteration as end:
        return end.value
    return None
