"""Connections to the daemon: how long a request may take to arrive, and how many of them a client
holds.

uvicorn waits forever for the rest of a request, and at its limit it refuses everybody. Here a
request has a deadline, first for its head and then for its body. If there are too many connections,
the one with an incomplete request that has been silent for the longest is closed. So a client that
opens thousands and sends nothing only loses its own connections. All of this happens before any
token is checked.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import resource
import socket
import sys
import termios
import time
from collections import OrderedDict
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from ondevice.server.openai import error_body, is_openai
from ondevice.server.security import network_of

_log = logging.getLogger(__name__)
HEAD_S = 10.0
"""Seconds for the head of a request, from the start of the connection or the last response."""
SILENT_S = 20.0
"""Longest silence within a body, in seconds."""
SLOWEST_BYTES_S = 4096
"""A body has `SILENT_S`, plus a second for each of this many bytes that have arrived."""
READER_S = 20.0
"""Seconds that a reader of a response may take nothing."""
CLOSE_S = 5.0
"""Seconds for a closed connection to send the rest."""
CONNECTIONS = 2000
OTHER_FILES = 1000
"""Open files that are not connections: the database in each thread, pipes, uploads."""
FILES = 8192
_ACKED = 120
"""Offset of `tcpi_bytes_acked`, 64 bits, in Linux's `struct tcp_info`."""


class Connection(H11Protocol):
    """uvicorn's protocol with deadlines; `Crowd` holds all connections."""

    server_state: Crowd

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.heard = self._since = self._moved = time.monotonic()
        self._taken = self._given = 0
        self._phase: object = h11.IDLE
        self._closing: float | None = None

    @property
    def address(self) -> str:
        """The client that the connection counts for."""
        return network_of(self.client[0] if self.client else "unknown")

    @property
    def is_arriving(self) -> bool:
        """True while a request is incomplete or has not begun."""
        return self._phase in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self.server_state.enter(self):
            self._refuse(
                HTTPStatus.SERVICE_UNAVAILABLE, "too many open connections", "wait, and try again"
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.heard = time.monotonic()
        self._taken += len(data)
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(HTTPStatus.BAD_REQUEST, "the request is not valid HTTP", "send it again")
        else:
            self.drop()

    def drop(self) -> None:
        """Close at once, without sending more."""
        self.server_state.leave(self)
        self.transport.abort()

    def close_if_late(self, now: float) -> None:
        """Close the connection if its request or its reader is late."""
        if self.transport.is_closing():
            self._closing = self._closing or now
            if now - self._closing > CLOSE_S:
                self.drop()
            return
        unread, taken = reader_state(self.transport)
        if not unread or taken > self._given:
            self._moved = now
        self._given = taken
        if now - self._moved > READER_S:
            self.drop()
        elif self._phase is h11.IDLE and now - self._since > HEAD_S:
            self._refuse_late(f"the request's head within {HEAD_S:g} s")
        elif self._phase is h11.SEND_BODY and not self.flow.read_paused:
            deadline = self._since + SILENT_S + self._taken / SLOWEST_BYTES_S
            if now > min(deadline, self.heard + SILENT_S):
                self._refuse_late(
                    f"no pause of {SILENT_S:g} s in the body, and at least {SLOWEST_BYTES_S} bytes/s"
                )

    def _note(self) -> None:
        """Start the deadline of the next part of a request when one has arrived."""
        if self.conn.their_state is not self._phase:
            self._phase = self.conn.their_state
            self._since = time.monotonic()
            self._taken = 0
        self.server_state.moved(self)

    def _refuse_late(self, expected: str) -> None:
        is_answered = self._phase is h11.SEND_BODY and self.cycle.response_started
        if is_answered or (self._phase is h11.IDLE and not self._taken):
            self.drop()
        else:
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT,
                "the request did not arrive in time",
                "send it again",
                expected,
            )

    def _refuse(
        self, status: HTTPStatus, message: str, hint: str, expected: str | None = None
    ) -> None:
        values = {
            "error": "Refused",
            "message": message,
            "expected": expected,
            "received": None,
            "hint": hint,
        }
        # The path of a request without a head is not known; OpenAI's form is read by every client.
        if self._phase is not h11.SEND_BODY or is_openai(self.scope["path"]):
            values = error_body(status, values)
        body = json.dumps(values).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


class Crowd(ServerState):
    """All connections by client.

    Args:
        most: connections of all clients.
        most_of_one: connections of one address; an IPv6 /64 network counts as one.
    """

    def __init__(self, most: int = CONNECTIONS, most_of_one: int | None = None) -> None:
        super().__init__()
        self.most = most
        self.most_of_one = most_of_one or max(1, most // 2)
        self.clients: dict[str, OrderedDict[Connection, None]] = {}
        """Connections of each client, in the order of their last sign of life."""

    def enter(self, connection: Connection) -> bool:
        """Add a connection, for which another may be closed. Return False if none can be."""
        own = self.clients.get(connection.address, OrderedDict())
        if len(own) >= self.most_of_one and not _drop_silent(own):
            return False
        if sum(map(len, self.clients.values())) >= self.most:
            crowds = sorted(self.clients.values(), key=len, reverse=True)
            if not any(_drop_silent(crowd) for crowd in crowds):
                return False
        self.clients.setdefault(connection.address, OrderedDict())[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """Forget a connection."""
        own = self.clients.get(connection.address, OrderedDict())
        own.pop(connection, None)
        if not own:
            self.clients.pop(connection.address, None)

    def moved(self, connection: Connection) -> None:
        """Note a sign of life of a connection."""
        own = self.clients.get(connection.address)
        if own is not None and connection in own:
            own.move_to_end(connection)

    def close_late(self) -> None:
        """Close the connections that are late; call this about once a second."""
        now = time.monotonic()
        for connection in [one for own in self.clients.values() for one in own]:
            connection.close_if_late(now)


def reader_state(transport: asyncio.Transport) -> tuple[int, int]:
    """Return bytes that the client has not taken, and a number that rises when it takes some.

    On Linux the kernel's buffer counts too, which holds megabytes of an answer that nobody reads.
    """
    unread = transport.get_write_buffer_size()
    own = transport.get_extra_info("socket")
    if sys.platform != "linux" or own is None:
        return unread, -unread
    try:
        waiting = fcntl.ioctl(own.fileno(), termios.TIOCOUTQ, bytes(4))
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED + 8)
    except OSError:  # it is closed
        return 0, 0
    unread += int.from_bytes(waiting, sys.byteorder)
    return unread, int.from_bytes(info[_ACKED:], sys.byteorder)


def _drop_silent(crowd: OrderedDict[Connection, None]) -> bool:
    """Drop the connection with an incomplete request that has been silent for the longest."""
    for connection in crowd:
        if connection.is_arriving:
            connection.drop()
            return True
    return False


def connection_limit() -> int:
    """Raise this process's limit of open files if allowed; return how many connections fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError) as error:
            _log.warning("the limit of open files stays at %d: %s", soft, error)
    room = CONNECTIONS
    if soft != resource.RLIM_INFINITY:
        room = soft - OTHER_FILES
    return max(100, min(CONNECTIONS, room))
