"""The daemon as a model server for OpenAI's clients: chat and text completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Generator
from typing import Any

from anyio import CancelScope
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.server.daemon import Daemon, running_job
from ondevice.server.jobs import ARTIFACT, adapter_folder, artifact_folder, locate_model
from ondevice.server.openai import (
    ChatRequest,
    Completion,
    RefusalResponse,
    TextRequest,
    error_body,
    error_fields,
)
from ondevice.server.pools import Pool
from ondevice.server.routes import Serving, json_response
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
    parts, begun = await daemon.pools.questions.run(_begin, daemon, body)
    completion = Completion(chat, body.model, begun["prompt_tokens"], probabilities)
    if not body.stream:
        return await daemon.pools.answers.run(_whole, completion, parts)
    usage = body.stream_options is not None and body.stream_options.include_usage
    events = _while_read(daemon.pools.answers, request, _events(completion, parts, usage))
    return StreamingResponse(events, media_type="text/event-stream")


def _begin(
    daemon: Daemon, body: ChatRequest | TextRequest
) -> tuple[Generator[Any, None, Any], dict[str, Any]]:
    """Wait for the model and the first part, so that a refusal has its own status."""
    asked = body.asked() | locate(daemon, body.model, body.adapter)
    parts = daemon.model_helper.stream("complete", **asked, job=running_job(daemon))
    return parts, next(parts)


def _whole(completion: Completion, parts: Generator[Any, None, Any]) -> Response:
    collected = []
    while True:
        try:
            collected.append(next(parts))
        except StopIteration as end:
            return json_response(200, completion.whole(collected, end.value))


async def _while_read(
    pool: Pool, request: Request, events: Generator[bytes, None, None]
) -> AsyncIterator[bytes]:
    """Yield events as long as somebody reads; a lost connection ends the generation."""
    try:
        while (event := await pool.run(next, events, None)) is not None:
            if await request.is_disconnected():
                return
            yield event
    finally:
        with CancelScope(shield=True):
            await pool.run(events.close)


def _events(
    completion: Completion, parts: Generator[Any, None, Any], usage: bool
) -> Generator[bytes, None, None]:
    """Yield server-sent events; closing this ends the generation."""
    try:
        for chunk in completion.first():
            yield _event(chunk)
        while True:
            try:
                part = next(parts)
            except StopIteration as end:
                for chunk in completion.last(end.value, usage):
                    yield _event(chunk)
                yield b"data: [DONE]\n\n"
                return
            except OndeviceError as error:
                yield _event(error_body(500, error_fields(error)))
                return
            yield _event(completion.part(part))
    finally:
        parts.close()


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
