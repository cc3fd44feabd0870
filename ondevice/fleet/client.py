"""A device's reply to a message of Flower: asks the process that has the device's model and rows.

This runs in the process that talks to the network (`node`).
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict

from ondevice.fleet.asking import ask
from ondevice.fleet.averaging.records import content_of, request_of

RECORD = "fleet"


def answer(message: Message, device: Path, number: int) -> Message:
    """Return the reply to a message of the server.

    Args:
        device: the file that names the process's socket (`device.answering`).
        number: the device's, as the server knows it.
    """
    if RECORD not in message.content:
        reply = ask(device, request_of(message.content), number)
        return Message(content=content_of(reply), reply_to=message)
    reply = ask(device, dict(message.content[RECORD]), number)
    return Message(content=RecordDict({RECORD: ConfigRecord(reply)}), reply_to=message)
