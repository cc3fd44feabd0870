"""Answers for rows: labels with probabilities, or generated text, as the training asked for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ondevice.data.tasks.trained import TrainedTask
from ondevice.server import schemas
from ondevice.server.daemon import Daemon
from ondevice.server.engine.answer import Answer
from ondevice.server.jobs import adapter_folder, locate_task
from ondevice.server.openai import REFUSALS
from ondevice.server.predict import task_of
from ondevice.server.routes import Id, Serving, json_response
from ondevice.server.routes.asking import client_of, while_connected
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
    body has at most 1 MiB. If the client disconnects, the work ends. Requests that wait together
    for one model and task are predicted together.
    """
    asked = await run_in_threadpool(_asked, daemon, body)
    answers = daemon.engine.ask(client_of(request), "predict", [asked])
    await while_connected(request, answers, _last(answers[0]))
    values = {"model": body.model, **answers[0].value}
    response = schemas.PredictResponse.model_validate(values)
    return json_response(200, response.model_dump(mode="json"))


def _asked(daemon: Daemon, body: schemas.PredictRequest) -> dict[str, Any]:
    """Return the arguments of the engine's `predict`."""
    place = locate(daemon, body.model, body.adapter)
    folder = place["adapter"] or place["artifact"]
    if folder is None and place["model"] is not None and Path(place["model"]).is_dir():
        folder = place["model"]
    name = body.adapter or body.model
    task = locate_task(daemon.store, body.task)
    task_of(None if folder is None else Path(folder), name, task)
    own = body.model_dump(include={"rows", "max_new_tokens"})
    return {**place, **own, "task": task, "folder": folder, "name": name}


async def _last(answer: Answer) -> None:
    async for _ in answer:
        pass
