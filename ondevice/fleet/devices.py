"""The devices of a running fleet: how far each is, and which of their replies are taken."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, RecordDict

from ondevice.fleet.client import RECORD
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.failures import Failures
from ondevice.fleet.post import Post
from ondevice.fleet.replies import Failed, Followed, Greeted, Reply, reply_of
from ondevice.fleet.store import Store

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("ondevice.fleet")
GREET_S = 10.0
"""A device that could not report its progress is asked again after so long."""


class Devices:
    """What a server knows of its devices, and sends to them.

    Args:
        grid: reaches the devices.
        store: the fleet.
        post: over `grid`.

    Attributes:
        places: by device, how many events it has.
        new: devices that have no charter yet.
        givers: devices that compute a new subspace.
        barred: devices whose lies spoiled a secure sum; they are not asked again while this server
            runs.
        refused, failed: replies that were not taken, and devices' errors, by code.
    """

    def __init__(self, grid: Grid, store: Store, post: Post) -> None:
        self.grid = grid
        self.store = store
        self.post = post
        self.places: dict[int, int] = {}
        self.new: set[int] = set()
        self.givers: set[int] = set()
        self.barred: set[int] = set()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.failures = Failures(store)
        self._greeted: dict[int, float] = {}

    @property
    def here(self) -> set[int]:
        """The devices that are connected."""
        return set(self.grid.get_node_ids())

    @property
    def free(self) -> set[int]:
        """The devices that say how far they are, and are not busy."""
        return (self.here & set(self.places)) - self.post.busy

    def greet(self) -> None:
        """Ask new devices for their progress and send the charter; before the first round it comes
        with their task. A device that fails is asked again later."""
        now = time.monotonic()
        busy = self.post.busy
        new = [
            node
            for node in self.grid.get_node_ids()
            if node not in self.places
            and node not in busy
            and now >= self._greeted.get(node, -math.inf) + GREET_S
        ]
        self._greeted.update(dict.fromkeys(new, now))
        if (
            not self.store.count() and self.store.charter.subspace == "seed"
        ):  # they cannot lack anything
            self.places.update(dict.fromkeys(new, 0))
            self.new.update(new)
            return
        self.send({node: {"charter": self.store.charter.to_bytes()} for node in new})

    def content(self, node: int, more: dict[str, Any]) -> dict[str, Any]:
        """Return a device's message: the events that it lacks, and a task."""
        place = self.places[node]
        files = [file.to_bytes() for file in self.store.files(place)]
        first = {}
        if node in self.new:
            first = {"charter": self.store.charter.to_bytes()}
        return {
            **first,
            "events": self.store.events(place),
            **({"frozen": files} if files else {}),
            **more,
        }

    def send(self, contents: dict[int, dict[str, Any]]) -> None:
        self.post.send(_messages(contents))

    def exchange(self, contents: dict[int, dict[str, Any]]) -> dict[int, Reply]:
        """Send to devices, wait, and return what they reply; those that do not are left out."""
        found = {}
        for node, reply in self.post.exchange(_messages(contents)):
            taken = self.reply(node, reply)
            if taken is not None:
                found[node] = taken
        return found

    def reply(self, node: int, message: Message | None) -> Reply | None:
        """Return a device's reply; None without a usable one."""
        if message is None:
            return None
        if message.has_error():
            log.warning("device %s: Flower could not ask it", node)
            self.failures.note("no_connection")
            return None
        try:
            reply = reply_of(record_of(message))
            if isinstance(reply, Greeted | Followed) and reply.place > self.store.count():
                raise Refusal(Code.MALFORMED, "a device has more events than there are")
        except Refusal as error:
            self.refuse(node, error.code)
            self.places.pop(node, None)
            return None
        if isinstance(reply, Failed):
            self.failed[reply.error] += 1
            self.failures.note(reply.error)
            log.warning("device %s: %s", node, reply.error)
            self.places.pop(node, None)  # it says again how far it is
        else:
            self.new.discard(node)
        return reply

    def refuse(self, node: int, code: Code) -> None:
        """Count a reply that is not taken."""
        self.refused[code] += 1
        self.failures.note(code)
        log.warning("device %s: its reply is refused: %s", node, code)

    def bar(self, node: int, code: Code) -> None:
        """Refuse a device's reply, and ask it no more."""
        self.barred.add(node)
        self.refuse(node, code)


def record_of(message: Message) -> Any:
    """Return the content of a device's message.

    Raises:
        Refusal: it has no content of a fleet.
    """
    try:
        return dict(message.content[RECORD])  # type: ignore[arg-type]
    except Exception:
        raise Refusal(Code.MALFORMED, "the message has no record of a fleet") from None


def _messages(contents: dict[int, dict[str, Any]]) -> list[Message]:
    return [
        Message(
            content=RecordDict({RECORD: ConfigRecord(content)}),
            message_type="train",
            dst_node_id=node,
        )
        for node, content in contents.items()
    ]
