"""Flower's store of messages, for devices and servers that come back.

Flower gives each device a random number, and turns a device away that is killed and returns before
its heartbeats are missed. Here a device's number follows from its key, so that a restarted server
knows it again, and a device that returns takes the place of its dead predecessor.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from flwr.app import Message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate import InMemoryLinkState
from flwr.supercore.constant import NodeStatus

NUMBER_BYTES = 8


def number_of(public_key: bytes) -> int:
    """Return the number of the device that has this public key (PEM)."""
    number = int.from_bytes(hashlib.sha256(public_key).digest()[:NUMBER_BYTES], "little")
    if number in (0, SUPERLINK_NODE_ID):  # these two are Flower's own
        return number + 2
    return number


class Mailbox(InMemoryLinkState):
    """Messages to and from devices, in memory.

    Attributes:
        arrived: when each device came, or came back, last; seconds of `time.monotonic`.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.arrived: dict[int, float] = {}

    def create_node(
        self,
        owner_aid: str,
        owner_name: str,
        public_key: bytes,
        heartbeat_interval: float,
        **more: Any,
    ) -> int:
        """Register a device, with the number that follows from its key."""
        number = number_of(public_key)
        with self.lock:
            drawn = super().create_node(
                owner_aid, owner_name, public_key, heartbeat_interval, **more
            )
            node = self.nodes.pop(drawn)
            node.node_id = number
            self.nodes[number] = node
            self.node_public_key_to_node_id[public_key] = number
            owned = self.owner_to_node_ids[owner_aid]
            owned.discard(drawn)
            owned.add(number)
        return number

    def activate_node(self, node_id: int, heartbeat_interval: float) -> bool:
        """Let a device in, also if its predecessor seems to be here still."""
        with self.lock:
            self.deactivate_node(node_id)
            done = super().activate_node(node_id, heartbeat_interval)
            if done:
                self.arrived[node_id] = time.monotonic()
        return done

    def acknowledge_node_heartbeat(self, node_id: int, heartbeat_interval: float) -> bool:
        """Take a sign of life; a device that was missing has come back with it."""
        with self.lock:
            was_away = not self.is_online(node_id)
            known = super().acknowledge_node_heartbeat(node_id, heartbeat_interval)
            if known and was_away:
                self.arrived[node_id] = time.monotonic()
        return known

    def get_message_ins(self, node_id: int, limit: int | None, **more: Any) -> list[Message]:
        """Return a device's messages. Who asks for messages is here."""
        if not self.is_online(node_id):
            self.acknowledge_node_heartbeat(node_id, HEARTBEAT_DEFAULT_INTERVAL)
        return super().get_message_ins(node_id, limit, **more)

    def is_online(self, node_id: int) -> bool:
        """Return True if the device's heartbeats come."""
        found = self.get_node_info(node_ids=[node_id], statuses=[NodeStatus.ONLINE])
        return bool(found)
