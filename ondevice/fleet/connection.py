"""A device's connection to its server's Fleet API: one attempt, which ends with the first error.

Flower's own connection waits inside each call, for ever, and ends its process if a server does not
know the device. Here whoever opens the connection (`node`) decides when to try again.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any, Self

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

log = logging.getLogger("ondevice.fleet")
HEARTBEAT_S = 10.0
"""Seconds between two heartbeats: a server misses a device after a minute without."""


class Connection:
    """A device that its server knows; a context manager.

    Args:
        address: the server's, `host:port`.
        authority: certificate of the authority that signed the server's; None without TLS.
        key: the device's private key.

    Attributes:
        number: the device's, as the server knows it.
    """

    def __init__(self, address: str, authority: bytes | None, key: ec.EllipticCurvePrivateKey):
        self.is_insecure = authority is None
        public = key.public_key()
        self.public_key = public_key_to_bytes(public)
        self.client = FleetHttpClient.from_server_address(
            address,
            self.is_insecure,
            authority,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, public),
            ],
        )
        self.number = 0
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        if self.is_insecure:
            self._register()
        request = ActivateNodeRequest(
            public_key=self.public_key, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        self.number = self.client.ActivateNode(request).node_id
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        try:
            if error[0] is None or error[0] in (KeyboardInterrupt, SystemExit):
                self.client.DeactivateNode(DeactivateNodeRequest(node_id=self.number))
        except (httpx.HTTPError, RuntimeError) as refusal:
            log.info("the server was not told that this device leaves: %s", refusal)
        finally:
            self.client.close()

    @property
    def node(self) -> Node:
        return Node(node_id=self.number)

    def _register(self) -> None:
        """Introduce this device to a server that admits everybody; it may know it already."""
        try:
            self.client.RegisterNode(RegisterNodeFleetRequest(public_key=self.public_key))
        except httpx.HTTPStatusError as error:
            known = FlowerError.from_json(error.response.text)
            if known is None or known.code != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                raise

    def _beat(self) -> None:
        """Say that this device is here, also while it computes a reply."""
        request = SendNodeHeartbeatRequest(
            node=self.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
        )
        while not self._ending.wait(HEARTBEAT_S):
            try:
                self.client.SendNodeHeartbeat(request)
            except (httpx.HTTPError, RuntimeError) as error:
                log.info("no heartbeat: %s", error)  # the next message finds out

    def receive(self) -> Message | None:
        """Return the next message of the server; None if there is none."""
        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        run = message_from_proto(found.messages_list[0]).metadata.run_id
        tree = found.message_object_trees[0]
        pull = make_pull_object_fn_protobuf(self.client.PullObject, self.node, run)
        confirm = make_confirm_message_received_fn_protobuf(
            self.client.ConfirmMessageReceived, self.node, run
        )
        message = pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def send(self, reply: Message) -> None:
        """Send the reply to a message."""
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            head = remove_content_from_message(reply) if reply.has_content() else reply
            pushed = self.client.PushMessages(
                PushMessagesRequest(
                    node=self.node,
                    messages_list=[message_to_proto(head)],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[0.0],
                )
            )
            push: Any = partial(make_push_object_fn_protobuf, self.client.PushObject, self.node)
            objects = get_all_nested_objects(reply)
            push_objects(
                objects,
                push(reply.metadata.run_id, pushed.session_id),
                object_ids_to_push=set(pushed.objects_to_push),
            )
