"""Flower's grid over messages in this process: no port between the rounds and what devices sent.

Flower would install the app that somebody submits to its Control API, and start it in a process
that asks its Runtime API. Here the server is the code that is installed, and calls what those APIs
would call.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.app import Message, Metadata
from flwr.common.constant import (
    HEARTBEAT_DEFAULT_INTERVAL,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
)
from flwr.common.serde import message_from_proto
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.linkstate import LinkState, LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import HttpGrid
from flwr.superlink.servicer.runtime import runtime_handlers

from ondevice.core.errors import ConfigError
from ondevice.fleet.certificates import DEVICES
from ondevice.fleet.mailbox import Mailbox

log = logging.getLogger("ondevice.fleet")


def in_memory() -> LinkStateFactory:
    """Return an empty store for messages.

    A restarted server begins with another: what counts is in the fleet's store.
    """
    objects = ObjectStoreFactory()
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), objects)
    factory.state_instance = Mailbox(factory.federation_manager, objects.store())
    return factory


def admit(state: LinkState, certificates: Path) -> frozenset[bytes]:
    """Register the devices whose public keys lie next to the certificates; return them, PEM.

    Raises:
        ConfigError: the folder has none, or one cannot be used.
    """
    files = sorted((certificates / DEVICES).glob("*.pub"))
    if not files:
        raise ConfigError(
            f"{certificates} has no device's public key",
            expected=f"{DEVICES}/NAME.pub for each device",
        )
    keys: set[bytes] = set()
    for file in files:
        try:
            key = load_ssh_public_key(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is not a device's public key", received=error) from None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"{file} is of another kind", expected="ssh-keygen -t ecdsa -b 384")
        pem = public_key_to_bytes(key)
        if pem not in keys:  # two names of one device
            state.create_node(
                NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, pem, HEARTBEAT_DEFAULT_INTERVAL, name=file.stem
            )
        keys.add(pem)
    return frozenset(keys)


@contextmanager
def open_grid(state: LinkState) -> Iterator[OwnGrid]:
    """Begin a run, which every message belongs to, and yield the grid that sends its messages."""
    number = state.create_run(
        None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )
    (run,) = state.get_run_info(run_ids=[number])
    assert run.primary_task_id is not None  # noqa: S101
    task = state.get_task_by_token(state.claim_task(run.primary_task_id) or "")
    assert task is not None  # noqa: S101
    state.activate_task(task.task_id)
    TaskIdentity.task_id = task.task_id
    TaskIdentity.run_id = number
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    heartbeat = HeartbeatSender(partial(state.acknowledge_task_heartbeat, task.task_id))
    heartbeat.start()
    try:
        grid = OwnGrid(state, task)
        grid.set_run(run)
        yield grid
    finally:
        heartbeat.stop()


class OwnGrid(HttpGrid):
    """Flower's grid, with its Runtime API's handlers instead of a client of that API.

    Replies are taken in another way than Flower's: its grid waits up to two hours for the content
    of one reply, fails with a content that cannot be read, and believes who a reply says it is of.
    """

    def __init__(self, state: LinkState, task: Task) -> None:
        super().__init__(token="unused: the API is in this process")
        handlers = {
            "GetNodes": runtime_handlers.get_nodes,
            "PushMessages": runtime_handlers.push_messages,
            "PullMessages": runtime_handlers.pull_messages,
            "PushObject": runtime_handlers.push_object,
        }
        calls = {name: partial(call, state=state, task=task) for name, call in handlers.items()}
        self._client = SimpleNamespace(**calls)  # type: ignore[assignment]
        self._state = state
        self._coming: dict[str, tuple[Metadata, list[str]]] = {}

    def arrived(self) -> dict[int, float]:
        """Return when each device came, or came back, last; seconds of `time.monotonic`."""
        if isinstance(self._state, Mailbox):
            return dict(self._state.arrived)
        return {}

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to these messages whose content has come; others wait or are lost."""
        # Flower has forgotten a message whose reply's head it gave: asked again, it says so.
        asked = set(message_ids) - {head.reply_to_message_id for head, _ in self._coming.values()}
        found = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        for head, tree in zip(found.messages_list, found.message_object_trees, strict=True):
            parts = [part.object_id for part in iterate_object_tree(tree)]
            # The head was checked when it came: who sent it, and which message it replies to.
            self._coming[tree.object_id] = (message_from_proto(head).metadata, parts)
        replies = [self._take(number) for number in list(self._coming)]
        return [reply for reply in replies if reply is not None]

    def _take(self, number: str) -> Message | None:
        metadata, parts = self._coming[number]
        contents = {part: self._state.get_object(metadata.run_id, part) for part in parts}
        if b"" in contents.values():  # its device is still sending; Flower deletes late content
            return None
        del self._coming[number]
        self._state.object_store.delete(number)
        try:
            reply = inflate_object_from_contents(number, contents)  # type: ignore[arg-type]
            if not isinstance(reply, Message):
                raise TypeError(f"expected a message, received {type(reply).__name__}")
        except Exception as error:  # a device can send anything
            log.warning("device %s: a reply cannot be read: %r", metadata.src_node_id, error)
            return None
        reply.__dict__["_metadata"] = metadata
        return reply
