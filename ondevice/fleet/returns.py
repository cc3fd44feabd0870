"""Messages for devices that go and come back: who was killed has lost its message."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.common.constant import ErrorCode

from ondevice.fleet.post import Post

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Arrived = Callable[[], dict[int, float]]


class ReturningPost(Post):
    """Sends a message again to a device that comes back, and waits a while for one that has gone.

    Args:
        arrived: returns when each device came, or came back, last; seconds of `time.monotonic`.
    """

    def __init__(self, grid: Grid, wait_s: float, arrived: Arrived) -> None:
        super().__init__(grid, wait_s)
        self.arrived = arrived

    def _has_gone(self, reply: Message) -> bool:
        """Return True for Flower's own reply in the name of a device that has gone."""
        return reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE

    def _send_again(self) -> None:
        """Send each message again whose device came back after it was sent."""
        arrived = self.arrived()
        for number, sent in list(self.sent.items()):
            if sent.message is None or sent.overdue or arrived.get(sent.node, 0.0) <= sent.at:
                continue
            del self.sent[number]
            message = Message(
                content=sent.message.content,
                message_type=sent.message.metadata.message_type,
                dst_node_id=sent.node,
            )
            now = time.monotonic()
            self.grid.push_messages([message])
            again = replace(sent, message=message, at=now, gone=None)
            self.sent[message.metadata.message_id] = again
