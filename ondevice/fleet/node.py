"""A device's process for the network: `-m ondevice.fleet.node SETTINGS`, JSON of
`link.NodeSettings`.

It fetches the server's messages through Flower's Fleet API, and hands them to the process with the
model (`device`). Flower's SuperNode would also fetch an app from the server and start it. This
never does: a message is data for the code that is installed, whoever sent it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supernode.fleet_http_connection import http_request_response

from ondevice.fleet.client import answer
from ondevice.fleet.confine import confine
from ondevice.fleet.link import NodeSettings

log = logging.getLogger("ondevice.fleet")
POLL_S = (0.2, 3.0)
"""First and longest wait between two polls; it grows while no message comes."""
ENDED = 1


def main(settings: NodeSettings) -> int:
    """Take part until the server is gone; returns the exit status."""
    authority = keys = None
    if settings.authority is not None:
        authority = Path(settings.authority).read_bytes()
    if settings.key is not None:
        private: Any = load_ssh_private_key(Path(settings.key).read_bytes(), None)
        keys = (private, private.public_key())
    confine([Path(settings.device)], settings.ports)
    with http_request_response(settings.address, authority is None, authority, keys) as connection:
        log.info("connected as device %s", connection[0])
        wait_s = POLL_S[0]
        while True:
            if exchange(connection, Path(settings.device)):
                wait_s = POLL_S[0]
            else:
                time.sleep(wait_s)
                wait_s = min(1.5 * wait_s, POLL_S[1])
    return ENDED  # Flower's connection logs why it ended, and ends the context


def exchange(connection: Any, device: Path) -> bool:
    """Take a message and push the reply to it; return False without a message."""
    number, receive, send, _run, _app, pull, push, confirm = connection
    received = receive()
    if received is None:
        return False
    head, tree = received
    run = head.metadata.run_id
    message = pull_and_inflate_object_from_tree(
        tree, partial(pull, run), partial(confirm, run), return_type=Message
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    try:
        reply = answer(message, device, number)
    except Exception:  # a server can send anything; the error stays in this log
        log.exception("a message could not be read")
        error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "not a message of a fleet")
        reply = Message(error, reply_to=message)
    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        missing, session = send(reply, get_object_tree(reply), 0.0)
        objects = get_all_nested_objects(reply)
        push_objects(objects, partial(push, run, session), object_ids_to_push=missing)
    return True


def _end_with_the_device() -> None:
    """End once standard input does: the process with the model is gone, killed perhaps."""
    sys.stdin.buffer.read()
    os._exit(ENDED)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_device, daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    sys.exit(main(NodeSettings.from_json(sys.argv[1])))
