"""Clients of a model server as they are in the wild: they read, leave, stall; and the server's
process is killed.

Each request is one connection. What becomes of it is a word: `answered`, `failed` (an error in the
server's words, as after a kill), `left` (by its own choice), `cut` (by the server, because it took
nothing), or `stuck`, if none of these happened in time.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from urllib.parse import urlsplit

STUCK_S = 300.0
STALL_S = 25.0
"""Seconds that a stalling client takes nothing; the server cuts it sooner."""
WAYS = (
    "reads",
    "streams",
    "leaves at once",
    "leaves in its answer",
    "leaves in its prompt",
    "stalls",
)


class Connection:
    """One request on its own connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    async def head(self) -> int:
        """Read the head of the response; return its status, 0 if there is none."""
        line = await self.reader.readline()
        if not line:
            return 0
        self.status = int(line.split()[1])
        while (line := await self.reader.readline()).strip():
            name, _, value = line.decode().partition(":")
            self.headers[name.strip().lower()] = value.strip()
        return self.status

    async def body(self) -> bytes:
        """Read the rest of the response."""
        if "content-length" in self.headers:
            return await self.reader.readexactly(int(self.headers["content-length"]))
        return await self.reader.read()

    async def lines(self) -> AsyncIterator[str]:
        """Yield the lines of a stream that are not empty; chunks' sizes are left out."""
        while line := await self.reader.readline():
            text = line.decode(errors="replace").strip()
            if text.startswith(("data:", ":")):
                yield text


@asynccontextmanager
async def request(
    address: str, path: str, body: dict[str, Any] | None = None, client: str = "one",
    receive_bytes: int | None = None,
) -> AsyncIterator[Connection]:  # fmt: skip
    """Send a request, and close its connection at the end of the block.

    Args:
        client: its `Authorization`, by which the server tells clients apart.
        receive_bytes: size of the socket's buffer.
    """
    place = urlsplit(address)
    own = socket.socket()
    own.setblocking(False)
    if receive_bytes is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    await asyncio.get_running_loop().sock_connect(own, (place.hostname, place.port))
    reader, writer = await asyncio.open_connection(sock=own, limit=1 << 24)
    content = b""
    if body is not None:
        content = json.dumps(body).encode()
    verb = "GET" if body is None else "POST"
    head = f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + content)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


async def get(address: str, path: str) -> dict[str, Any]:
    """Return the JSON of a path."""
    async with request(address, path) as connection:
        await connection.head()
        return json.loads(await connection.body())


async def complete(address: str, model: str, client: str = "one", **fields: Any) -> dict[str, Any]:
    """Return the response to a prompt, with its `status`."""
    body = {"model": model, "temperature": 0, **fields}
    async with request(address, "/v1/completions", body, client) as connection:
        status = await connection.head()
        return {**json.loads(await connection.body()), "status": status}


async def one_of_many(address: str, model: str, numbers: Random, client: str) -> str:
    """Send a request in one of `WAYS`; return what became of it."""
    way = numbers.choice(WAYS)
    body = {
        "model": model,
        "prompt": [numbers.randrange(200) for _ in range(numbers.choice((2, 20, 200)))],
        "max_tokens": numbers.choice((4, 40, 120)),
        "temperature": numbers.choice((0, 1)),
        "stream": way != "reads",
    }
    if way == "leaves in its prompt":
        body["prompt"] = [numbers.randrange(200) for _ in range(6000)]
    receive_bytes = None
    if way == "stalls":
        body |= {"logprobs": 20, "max_tokens": 2000}
        receive_bytes = 4096
    try:
        async with request(address, "/v1/completions", body, client, receive_bytes) as connection:
            return await _live(connection, way, numbers)
    except (ConnectionError, asyncio.IncompleteReadError):
        return "cut"


async def _live(connection: Connection, way: str, numbers: Random) -> str:
    if way.startswith("leaves") and way != "leaves in its answer":
        await asyncio.sleep(numbers.random() * 0.5)
        return "left"
    if way == "stalls":
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.sleep(STALL_S)
        connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
    if await connection.head() != 200:
        return "failed"
    if way == "reads":
        await connection.body()
        return "answered"
    count = numbers.randrange(1, 20)
    async for line in connection.lines():
        if line == "data: [DONE]":
            return "answered"
        if '"error"' in line:
            return "failed"
        count -= line.startswith("data:")
        if way == "leaves in its answer" and count == 0:
            return "left"
    return "cut"


async def storm(
    address: str, model: str, count: int, at_once: int, seed: int = 0,
    kill: Callable[[], Awaitable[bool]] | None = None, kills: int = 0,
) -> tuple[Counter[str], float]:  # fmt: skip
    """Send requests in random ways; return what became of them, and the longest time of one.

    Args:
        kill: kills the server's process of the model; returns whether there was one.
        kills: how often, at random moments.
    """
    numbers = Random(seed)
    outcomes: Counter[str] = Counter()
    gate = asyncio.Semaphore(at_once)
    longest = 0.0

    async def one(number: int) -> None:
        nonlocal longest
        async with gate:
            began = time.monotonic()
            own = Random(f"{seed} {number}")
            try:
                outcome = await asyncio.wait_for(
                    one_of_many(address, model, own, f"client {number % 5}"), STUCK_S
                )
            except TimeoutError:
                outcome = "stuck"
            outcomes[outcome] += 1
            longest = max(longest, time.monotonic() - began)

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    at = sorted(numbers.uniform(0.1, 0.8) for _ in range(kills))
    for share in at:
        while sum(outcomes.values()) < share * count:
            await asyncio.sleep(0.05)
        while kill is not None and not await kill() and sum(outcomes.values()) < count:
            await asyncio.sleep(0.05)
        outcomes["kills"] += 1
    await asyncio.gather(*tasks)
    return outcomes, longest
