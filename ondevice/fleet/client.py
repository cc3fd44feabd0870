"""Flower's ClientApp: hands each message of the server to the process that holds the device's model.

Flower starts a process for each message; it would load the model each time, and what it imports is the most of what a
round costs a device. So it imports little here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from ondevice.fleet.asking import ask

if TYPE_CHECKING:
    from flwr.app import Context

RECORD = "fleet"
client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a message of the server, through the device's process (`device.Device`)."""
    device = Path(str(context.node_config["device"]))
    if RECORD not in message.content:
        from ondevice.fleet.averaging.records import reply_of, request_of

        reply = ask(device, request_of(message.content), context.node_id)
        return Message(content=reply_of(reply), reply_to=message)
    reply = ask(device, dict(message.content[RECORD]), context.node_id)
    return Message(content=RecordDict({RECORD: ConfigRecord(reply)}), reply_to=message)
