"""The daemon as a model server for OpenAI's clients: chat and text completions."""

from __future__ import annotations

import asyncio
import json
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from ondevice.core.errors import ConfigError, OndeviceError
from ondevice.server.daemon import Daemon
from ondevice.server.engine.answer import Answer, probabilities
from ondevice.server.jobs import (
    ARTIFACT,
    adapter_folder,
    artifact_folder,
    is_program,
    locate_model,
)
from ondevice.server.openai import REFUSALS, error_body, error_fields
from ondevice.server.openai_answers import Built, tokens_of
from ondevice.server.openai_requests import (
    MOST_PROBABILITIES,
    ChatRequest,
    TextRequest,
    too_many_probabilities,
)
from ondevice.server.recent import Remembered
from ondevice.server.routes import Serving, json_response
from ondevice.server.routes.asking import KEEP_ALIVE_S, Events, client_of, while_connected
from ondevice.server.store import MissingError

router = APIRouter(prefix="/v1", tags=["completions"])
DONE = b"data: [DONE]\n\n"
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"application/json": {}, "text/event-stream": {}},
        "description": "As in OpenAI's API; events if `stream` is set.",
    },
    **REFUSALS,
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


def _place(daemon: Daemon, body: ChatRequest | TextRequest) -> dict[str, Any]:
    return in_turns(locate(daemon, body.model, body.adapter))


def in_turns(place: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the arguments that say where a model is, and whether its texts run one at a time."""
    artifact = place["artifact"]
    return {**place, "one_at_a_time": artifact is not None and is_program(Path(artifact))}


async def _answer(
    daemon: Daemon, body: ChatRequest | TextRequest, request: Request, built: Built
) -> Response:
    asked = body.asked(daemon.allows_unknown_fields)
    place = await run_in_threadpool(_place, daemon, body)
    body.check_size(asked)
    answers = daemon.engine.ask(client_of(request), "complete", [one | place for one in asked])
    if not body.stream:
        response = await while_connected(request, answers, _whole(built, answers))
        _remember(daemon, body, built, asked)
        return response
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
    events = _events(built, answers, begun, usage)
    return Events(answers, _then(events, lambda: _remember(daemon, body, built, asked)))


def _remember(
    daemon: Daemon, body: ChatRequest | TextRequest, built: Built, asked: list[dict[str, Any]]
) -> None:
    """Remember the answers, so that POST /v1/feedback can rate them by the response's id."""
    for index, one in enumerate(asked):
        prompt = one["prompt"]
        if not isinstance(prompt, str) and not all(isinstance(turn, dict) for turn in prompt):
            prompt = []  # token ids, which nobody can rate, would take much memory
        answer = Remembered(prompt, built.texts.get(index, ""), body.model, body.adapter)
        daemon.recent.add(built.head["id"], index, answer)


async def _then(events: AsyncIterator[bytes], call: Callable[[], None]) -> AsyncIterator[bytes]:
    """Yield events, and call before the last one of a stream that ends well."""
    async for event in events:
        if event == DONE:
            call()
        yield event


async def _whole(built: Built, answers: list[Answer]) -> Response:
    counted = 0

    async def read(index: int, answer: Answer) -> dict[str, Any]:
        nonlocal counted
        first = await answer.next()
        text = StringIO()
        tokens: list[dict[str, Any]] = []
        async for part in answer:
            text.write(part.get("text", ""))
            own = tokens_of(part)
            counted += probabilities(own)
            if counted > MOST_PROBABILITIES:
                raise too_many_probabilities(f"more than {MOST_PROBABILITIES}")
            tokens += own
        built.count(index, first, answer.value)
        return built.choice(index, first, text.getvalue(), tokens, answer.value)

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
    """Yield server-sent events: the pieces of all choices, as they come.

    What a slow client has not read stays in the answers, which limit it.
    """
    pieces: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue(maxsize=1)

    async def read(index: int, answer: Answer) -> None:
        first = await begun[index]
        for piece in built.first(index, first):
            await pieces.put(piece)
        async for part in answer:
            await pieces.put(built.part(index, part))
        built.count(index, first, answer.value)
        await pieces.put(built.last(index, answer.value))

    async def read_all() -> None:
        try:
            await _together(read(*each) for each in enumerate(answers))
        except Exception as error:
            await pieces.put(error)
        else:
            await pieces.put(None)

    reading = asyncio.ensure_future(read_all())
    try:
        while (piece := await pieces.get()) is not None:
            if isinstance(piece, OndeviceError):
                yield _event(error_body(500, error_fields(piece)))
                return
            if isinstance(piece, Exception):
                raise piece
            yield _event(piece)
    finally:
        reading.cancel()
    if usage:
        yield _event(built.counts())
    yield DONE


def _event(values: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"
