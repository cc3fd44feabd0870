"""The daemon as a model server for OpenAI's clients: chat and text completions."""

from __future__ import annotations

import asyncio
import json
from asyncio import Future
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.server.daemon import Daemon
from ondevice.server.engine.answer import Answer
from ondevice.server.jobs import ARTIFACT, adapter_folder, artifact_folder, locate_model
from ondevice.server.openai import (
    ChatRequest,
    Completion,
    RefusalResponse,
    TextRequest,
    error_body,
    error_fields,
)
from ondevice.server.routes import Serving, json_response
from ondevice.server.routes.asking import KEEP_ALIVE_S, Events, client_of, while_connected
from ondevice.server.schemas import ErrorResponse
from ondevice.server.store import MissingError

router = APIRouter(prefix="/v1", tags=["completions"])
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/json": {}, "text/event-stream": {}},
        "description": "As in OpenAI's API; events if `stream` is set.",
    },
    "4XX": {
        "model": RefusalResponse | ErrorResponse,
        "description": "Refused, in OpenAI's format; before the body is read, in the daemon's.",
    },
}


@router.post("/chat/completions", response_class=Response, responses=_ANSWERS)
async def chat(daemon: Serving, body: ChatRequest, request: Request) -> Response:
    """Reply to a conversation. 409 if the model does not fit next to a job."""
    return await _answer(daemon, body, request, chat=True, probabilities=bool(body.logprobs))


@router.post("/completions", response_class=Response, responses=_ANSWERS)
async def complete(daemon: Serving, body: TextRequest, request: Request) -> Response:
    """Continue a text. 409 if the model does not fit next to a job."""
    return await _answer(daemon, body, request, chat=False, probabilities=body.logprobs is not None)


def locate(daemon: Daemon, name: str, over: str | None = None) -> dict[str, str | None]:
    """Return `model` or `artifact`, and `adapter`, for the name of a model, an artifact or an
    adapter.

    Args:
        over: an adapter for the model, if `name` is not an adapter's.

    Raises:
        ConfigError: two adapters.
        MissingError: the name is unknown.
    """
    row = daemon.store.row("SELECT job, base_model FROM adapters WHERE id = ?", name)
    if row is None:
        adapter = None
        if over is not None:
            adapter = str(adapter_folder(daemon.store, over))
        if name.startswith(ARTIFACT):
            folder = artifact_folder(daemon.store, name.removeprefix(ARTIFACT))
            return {"model": None, "artifact": str(folder), "adapter": adapter}
        return {"model": locate_model(daemon.store, name), "artifact": None, "adapter": adapter}
    if over is not None:
        raise ConfigError(
            "two adapters are named", expected="one", received=f"model {name}, adapter {over}"
        )
    adapter = str(adapter_folder(daemon.store, name))
    try:
        spec = {}
        if row["job"]:
            spec = daemon.queue.get(row["job"]).spec
    except MissingError:  # the job was deleted; its adapter stays
        spec = {}
    if spec.get("artifact"):
        return {
            "model": None,
            "artifact": str(artifact_folder(daemon.store, spec["artifact"])),
            "adapter": adapter,
        }
    base = spec.get("model") or row["base_model"]
    return {"model": locate_model(daemon.store, base), "artifact": None, "adapter": adapter}


async def _answer(
    daemon: Daemon,
    body: ChatRequest | TextRequest,
    request: Request,
    *,
    chat: bool,
    probabilities: bool,
) -> Response:
    asked = body.asked()
    place = await run_in_threadpool(locate, daemon, body.model, body.adapter)
    answers = daemon.engine.ask(client_of(request), "complete", [asked | place])
    (answer,) = answers
    if not body.stream:
        return await while_connected(
            request, answers, _whole(chat, body.model, probabilities, answer)
        )
    begun = asyncio.ensure_future(answer.next())
    # A refusal has its own status if it comes early; later it is an event.
    await while_connected(request, answers, asyncio.wait({begun}, timeout=KEEP_ALIVE_S))
    if begun.done():
        begun.result()
    usage = body.stream_options is not None and body.stream_options.include_usage
    return Events(answers, _events(chat, body.model, probabilities, usage, begun, answer))


async def _whole(chat: bool, model: str, probabilities: bool, answer: Answer) -> Response:
    begun = await answer.next()
    completion = Completion(chat, model, begun["prompt_tokens"], probabilities)
    collected = [part async for part in answer]
    return json_response(200, completion.whole(collected, answer.value))


async def _events(
    chat: bool, model: str, probabilities: bool, usage: bool, begun: Future[Any], answer: Answer
) -> AsyncIterator[bytes]:
    """Yield server-sent events."""
    try:
        first = await begun
        completion = Completion(chat, model, first["prompt_tokens"], probabilities)
        for chunk in completion.first():
            yield _event(chunk)
        async for part in answer:
            yield _event(completion.part(part))
    except OndeviceError as error:
        yield _event(error_body(500, error_fields(error)))
        return
    for chunk in completion.last(answer.value, usage):
        yield _event(chunk)
    yield b"data: [DONE]\n\n"


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
