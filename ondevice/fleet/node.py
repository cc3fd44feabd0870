"""A device's process for the network: `-m ondevice.fleet.node SETTINGS`, JSON of
`link.NodeSettings`.

It fetches the server's messages through Flower's Fleet API, and hands them to the process with the
model (`device`). Flower's SuperNode would also fetch an app from the server and start it. This
never does: a message is data for the code that is installed, whoever sent it.

Each line of its standard output is one of `link.News`, for the process that started it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.error import Error
from flwr.common.constant import ErrorCode

from ondevice.fleet.client import answer
from ondevice.fleet.confine import confine
from ondevice.fleet.connection import Connection
from ondevice.fleet.link import Delays, News, NodeSettings

log = logging.getLogger("ondevice.fleet")
POLL_S = (0.2, 3.0)
"""First and longest wait between two polls; it grows while no message comes."""
ENDED = 1


def main(settings: NodeSettings) -> None:
    """Take part until this process is stopped; connect again whenever the connection is lost."""
    authority = None
    if settings.authority is not None:
        authority = Path(settings.authority).read_bytes()
    key: Any = load_ssh_private_key(Path(settings.key).read_bytes(), None)
    confine([Path(settings.device)], settings.ports)
    delays = Delays()
    said: set[News] = set()
    while True:
        try:
            with Connection(settings.address, authority, key) as connection:
                log.info("connected as device %s", connection.number)
                delays.reset()
                said.clear()
                tell(News.CONNECTED)
                take_part(connection, Path(settings.device))
        except Exception as error:  # a server, or who sits in between, can send anything
            news = news_of(error)
            if news not in said:  # once per outage, and per reason
                log.warning("the connection is lost: %s: %s", news, error)
                tell(news)
            said.add(news)
        time.sleep(next(delays))


def take_part(connection: Connection, device: Path) -> None:
    """Reply to messages until the connection is lost, which is an error."""
    wait_s = POLL_S[0]
    while True:
        if exchange(connection, device):
            wait_s = POLL_S[0]
            tell(News.REPLIED)
        else:
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, POLL_S[1])


def exchange(connection: Connection, device: Path) -> bool:
    """Take a message and send the reply to it; return False without a message."""
    message = connection.receive()
    if message is None:
        return False
    try:
        reply = answer(message, device, connection.number)
    except Exception:  # a server can send anything; the error stays in this log
        log.exception("a message could not be read")
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "not a message of a fleet")
        reply = Message(error, reply_to=message)
    connection.send(reply)
    return True


def news_of(error: Exception) -> News:
    """Return the reason for a lost connection."""
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code in (401, 403):
            return News.NOT_ADMITTED
        return News.REFUSED
    if isinstance(error, httpx.TransportError):
        if "certificate" in str(error).lower():
            return News.OTHER_CERTIFICATE
        return News.UNREACHABLE
    return News.REFUSED


def tell(news: News) -> None:
    """Say it to the process that started this one."""
    print(news, flush=True)


def end_with_the_device(end: Callable[[int], None] = os._exit) -> None:
    """End once standard input does: the process with the model is gone, killed perhaps."""
    sys.stdin.buffer.read()
    end(ENDED)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_device, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each poll
    main(NodeSettings.from_json(sys.argv[1]))
