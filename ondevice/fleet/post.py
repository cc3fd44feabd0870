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
RETURN_S = 60.0
"""A device that has gone is expected back for so long, if others are here."""


@dataclass(frozen=True)
class Sent:
    """A message without a reply so far.

    Attributes:
        node: whom it went to.
        until: when the wait for it is over, seconds of `time.monotonic`.
        overdue: it is over, and `Post.take` has said so.
        message: to send again; None in a test.
        number: of the message as it was sent first.
        at: when it was sent last.
        gone: when its device was found to be gone; None if it is here.
    """

    node: int
    until: float
    overdue: bool = False
    message: Message | None = None
    number: str = ""
    at: float = 0.0
    gone: float | None = None


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
        now = time.monotonic()
        accepted = set(self.grid.push_messages(given))
        for message in given:  # a grid gives each message its number when it is pushed
            number = message.metadata.message_id
            until = now
            if number in accepted:
                until = now + self.wait_s
            node = message.metadata.dst_node_id
            self.sent[number] = Sent(node, until, message=message, number=number, at=now)

    def take(self, numbers: Iterable[str] | None = None) -> list[tuple[Sent, Message | None]]:
        """Return (sent, reply) for each new reply, and (sent, None) once for each whose wait is
        over.

        Args:
            numbers: of messages, as they were sent first; all by default.
        """
        self._send_again()
        wanted = None if numbers is None else set(numbers)
        asked = {
            number: sent
            for number, sent in self.sent.items()
            if wanted is None or sent.number in wanted
        }
        here = [number for number, sent in asked.items() if sent.gone is None]
        came: list[tuple[Sent, Message | None]] = []
        replies: Iterable[Message] = ()
        if here:
            replies = self.grid.pull_messages(here)
        for reply in replies:
            number = reply.metadata.reply_to_message_id
            sent = self.sent.pop(number, None)
            if sent is None:
                continue
            if self._has_gone(reply):
                self.sent[number] = replace(sent, gone=time.monotonic())
            else:
                came.append((sent, reply))
        return came + self._overdue(set(asked))

    def _overdue(self, asked: set[str]) -> list[tuple[Sent, Message | None]]:
        """Return the messages whose wait is over by now."""
        came: list[tuple[Sent, Message | None]] = []
        now = time.monotonic()
        is_alone = any(sent.gone is not None for sent in self.sent.values()) and not list(
            self.grid.get_node_ids()
        )
        for number, sent in list(self.sent.items()):
            until = sent.until
            if sent.gone is not None and not is_alone:
                until = min(until, sent.gone + RETURN_S)
            if now > until and not sent.overdue and number in asked:
                came.append((sent, None))
                self.sent[number] = replace(sent, overdue=True)
            elif now > sent.until + self.wait_s:
                del self.sent[number]
        return came

    def _has_gone(self, reply: Message) -> bool:
        """Return True if a reply says that its device has gone, and may come back."""
        return False

    def _send_again(self) -> None:
        """Send messages again to devices that have come back."""

    def exchange(self, messages: Iterable[Message]) -> list[tuple[int, Message]]:
        """Send messages, wait for the replies to them, and return (device, reply) of those that
        came."""
        given = list(messages)
        replies = []
        self.send(given)
        numbers = {message.metadata.message_id for message in given}
        while numbers := numbers & {sent.number for sent in self.sent.values() if not sent.overdue}:
            came = self.take(numbers)
            replies += [(sent.node, reply) for sent, reply in came if reply is not None]
            if not came:
                time.sleep(POLL_S)
        return replies
