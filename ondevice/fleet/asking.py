"""Ask the process of a device (`device.answering`) over its socket."""

from __future__ import annotations

import base64
import json
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any


def ask(file: Path, content: dict[str, Any], number: int) -> dict[str, Any]:
    """Ask the device whose `answering` wrote `file`.

    Args:
        content: a message's, bytes and numbers and lists of bytes.
        number: the device's, as the transport has it.
    """
    try:
        address = json.loads(file.read_text(encoding="utf-8"))["socket"]
        with Client(address, family="AF_UNIX") as connection:
            connection.send_bytes(encoded(number, content))
            return received(connection)[1]
    except Exception:
        return {"error": "no_process"}  # only a code leaves a device: see `codes`


def encoded(number: int, content: dict[str, Any]) -> bytes:
    """Return a message to or from device `number` as it travels: JSON, bytes in base 64."""

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return {"bytes": base64.b64encode(value).decode()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value

    return json.dumps(
        {"number": number, "content": {key: plain(value) for key, value in content.items()}}
    ).encode()


def received(connection: Connection) -> tuple[int, dict[str, Any]]:
    """Return the number and the message that come over a connection."""

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            return base64.b64decode(value["bytes"])
        if isinstance(value, list):
            return [restored(item) for item in value]
        return value

    message = json.loads(connection.recv_bytes())
    return message["number"], {key: restored(value) for key, value in message["content"].items()}
