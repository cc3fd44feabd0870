"""Messages on their way over Flower's grid: sent together, and their replies taken one by one as
they come.

Flower's own `send_and_receive` waits for the slowest device, and polls every three seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

POLL_S = 0.2


@dataclass(frozen=True)
class Sent:
    """A message without a reply so far.

    Attributes:
        node: whom it went to.
        until: when the wait for it is over, seconds of `time.monotonic`.
        overdue: it is over, and `Post.take` has said so.
    """

    node: int
    until: float
    overdue: bool = False


class Post:
    """Messages without a reply so far; a device has one message at a time.

    Args:
        grid: Flower's.
        wait_s: longest wait for a reply. One that comes later is still taken, within as long again.
    """

    def __init__(self, grid: Grid, wait_s: float) -> None:
        self.grid = grid
        self.wait_s = wait_s
        self.sent: dict[str, Sent] = {}

    @property
    def busy(self) -> set[int]:
        """Devices that have a message, and time to reply to it."""
        return {sent.node for sent in self.sent.values() if not sent.overdue}

    def send(self, messages: Iterable[Message]) -> None:
        """Send messages, one a device at most."""
        given = list(messages)
        if not given:
            return
        accepted = set(self.grid.push_messages(given))
        now = time.monotonic()
        for message in given:  # a grid gives each message its number when it is pushed
            number = message.metadata.message_id
            until = now
            if number in accepted:
                until = now + self.wait_s
            self.sent[number] = Sent(message.metadata.dst_node_id, until)

    def take(self, numbers: Iterable[str] | None = None) -> list[tuple[Sent, Message | None]]:
        """Return (sent, reply) for each new reply, and (sent, None) once for each whose wait is
        over.

        Args:
            numbers: of messages; all by default.
        """
        asked = [
            number for number in (self.sent if numbers is None else numbers) if number in self.sent
        ]
        if not asked:
            return []
        came: list[tuple[Sent, Message | None]] = []
        for reply in self.grid.pull_messages(asked):
            sent = self.sent.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                came.append((sent, reply))
        now = time.monotonic()
        for number, sent in list(self.sent.items()):
            if now > sent.until and not sent.overdue and number in asked:
                came.append((sent, None))
                self.sent[number] = replace(sent, overdue=True)
            elif now > sent.until + self.wait_s:
                del self.sent[number]
        return came

    def exchange(self, messages: Iterable[Message]) -> list[tuple[int, Message]]:
        """Send messages, wait for the replies to them, and return (device, reply) of those that
        came."""
        given = list(messages)
        replies = []
        self.send(given)
        waiting = {message.metadata.message_id for message in given}
        while waiting := {
            number for number in waiting if number in self.sent and not self.sent[number].overdue
        }:
            came = self.take(waiting)
            replies += [(sent.node, reply) for sent, reply in came if reply is not None]
            if not came:
                time.sleep(POLL_S)
        return replies
