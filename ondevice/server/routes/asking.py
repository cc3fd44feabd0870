"""How a route asks the engine: whose request it is, and what ends it when its client leaves."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from ondevice.server.engine.answer import Answer
from ondevice.server.security import network_of

T = TypeVar("T")
KEEP_ALIVE_S = 5.0
"""Seconds between comments in a stream. A stream that has no part by then begins with one."""
LEFT = 499
"""Status in the log of a request whose client left; nobody receives it."""


class ClientLeft(Exception):
    """The client has closed the connection."""


def client_of(request: Request) -> str:
    """Return whose request it is, for the order of the queue: an address with its token or program."""
    headers = request.headers
    own = headers.get("authorization") or headers.get("cookie") or headers.get("user-agent", "")
    address = "unknown"
    if request.client is not None:
        address = network_of(request.client.host)
    return f"{address} {hashlib.sha256(own.encode()).hexdigest()[:16]}"


async def while_connected(
    request: Request, answers: Sequence[Answer], work: Coroutine[Any, Any, T]
) -> T:
    """Wait for work; if the client leaves, or the work fails, cancel the answers.

    Raises:
        ClientLeft: the client has left.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    except BaseException:
        for answer in answers:
            answer.cancel()
        raise
    finally:
        task.cancel()
        watch.cancel()


class Events(EventSourceResponse):
    """Server-sent events of answers, which are cancelled when nobody reads them any more."""

    def __init__(self, answers: Sequence[Answer], events: AsyncIterator[bytes]) -> None:
        super().__init__(
            events,
            ping=KEEP_ALIVE_S,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            sep="\n",
        )
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for answer in self.answers:
                answer.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
