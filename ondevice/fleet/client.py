"""Flower's ClientApp: hands each message of the server to the process that holds the device's model.

Flower starts a process for each message; it would load the model each time, and what it imports is the most of what a
round costs a device. So it imports little here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from ondevice.fleet.asking import ask

if TYPE_CHECKING:
    from flwr.app import Context

RECORD = "fleet"
log = logging.getLogger("ondevice.fleet")
client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a message of the server, through the device's process (`device.Device`)."""
    first_order = RECORD not in message.content
    try:
        device = Path(str(context.node_config["device"]))
        if first_order:
            from ondevice.fleet.averaging.records import request_of

            asked = request_of(message.content)
        else:
            asked = dict(message.content[RECORD])
        reply = ask(device, asked, context.node_id)
    except Exception:  # Flower would send the error's text to the server
        log.exception("a message could not be answered")
        reply = {"error": "failed"}
    if first_order:
        from ondevice.fleet.averaging.records import content_of

        return Message(content=content_of(reply), reply_to=message)
    return Message(content=RecordDict({RECORD: ConfigRecord(reply)}), reply_to=message)
