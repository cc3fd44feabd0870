"""The daemon as a model server for OpenAI's clients: chat and text completions."""

from __future__ import annotations

import asyncio
import json
from asyncio import Future
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.server.daemon import Daemon
from ondevice.server.engine.answer import Answer
from ondevice.server.jobs import ARTIFACT, adapter_folder, artifact_folder, locate_model
from ondevice.server.openai import RefusalResponse, error_body, error_fields
from ondevice.server.openai_answers import Built
from ondevice.server.openai_requests import ChatRequest, TextRequest
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
    built = Built(True, body.model, body.n or 1, bool(body.logprobs))
    return await _answer(daemon, body, request, built)


@router.post("/completions", response_class=Response, responses=_ANSWERS)
async def complete(daemon: Serving, body: TextRequest, request: Request) -> Response:
    """Continue texts. 409 if the model does not fit next to a job."""
    built = Built(False, body.model, body.n or 1, body.logprobs is not None)
    return await _answer(daemon, body, request, built)


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
    daemon: Daemon, body: ChatRequest | TextRequest, request: Request, built: Built
) -> Response:
    asked = body.asked(daemon.allows_unknown_fields)
    place = await run_in_threadpool(locate, daemon, body.model, body.adapter)
    answers = daemon.engine.ask(client_of(request), "complete", [one | place for one in asked])
    if not body.stream:
        return await while_connected(request, answers, _whole(built, answers))
    begun = [asyncio.ensure_future(answer.next()) for answer in answers]
    waiting = asyncio.wait(begun, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
    try:
        # A refusal has its own status if it comes early; later it is an event.
        await while_connected(request, answers, waiting)
        for one in begun:
            if one.done():
                one.result()
    except BaseException:
        for answer, one in zip(answers, begun, strict=True):
            answer.cancel()
            one.cancel()
        raise
    usage = body.stream_options is not None and body.stream_options.include_usage
    return Events(answers, _events(built, answers, begun, usage))


async def _whole(built: Built, answers: list[Answer]) -> Response:
    async def read(index: int, answer: Answer) -> dict[str, Any]:
        first = await answer.next()
        parts = [part async for part in answer]
        built.count(index, first, answer.value)
        return built.choice(index, first, parts, answer.value)

    choices = await _together(read(*each) for each in enumerate(answers))
    return json_response(200, built.whole(choices))


async def _together(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Wait for all; the first failure ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _events(
    built: Built, answers: list[Answer], begun: Sequence[Future[Any]], usage: bool
) -> AsyncIterator[bytes]:
    """Yield server-sent events: the pieces of all choices, as they come."""
    pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def read(index: int, answer: Answer) -> None:
        first = await begun[index]
        for piece in built.first(index, first):
            pieces.put_nowait(piece)
        async for part in answer:
            pieces.put_nowait(built.part(index, part))
        built.count(index, first, answer.value)
        pieces.put_nowait(built.last(index, answer.value))

    reading = asyncio.ensure_future(_together(read(*each) for each in enumerate(answers)))
    reading.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield _event(piece)
        await reading
    except OndeviceError as error:
        yield _event(error_body(500, error_fields(error)))
        return
    finally:
        reading.cancel()
    if usage:
        yield _event(built.counts())
    yield b"data: [DONE]\n\n"


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
