"""The server's network interface over real connections: what one registered device cannot do to another, and bounds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from ondevice.core.errors import ConfigError, FleetError
from ondevice.fleet.certificates import make
from ondevice.fleet.grid import admit, in_memory, open_grid
from ondevice.fleet.link import Link
from ondevice.fleet.network import MOST_BYTES, fleet_api, listening
from tests.fleet.test_doors import signed
from tests.ports import free_port

pytestmark = pytest.mark.flower


def write_public(
    folder: Path, name: str, key: ec.EllipticCurvePublicKey | rsa.RSAPublicKey
) -> None:
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    (folder / "devices").mkdir(exist_ok=True)
    (folder / "devices" / f"{name}.pub").write_bytes(key.public_bytes(*form))


@dataclass(frozen=True)
class Device:
    """A registered device's own client, and its number."""

    key: ec.EllipticCurvePrivateKey
    client: FleetHttpClient
    number: int

    @property
    def node(self) -> Node:
        return Node(node_id=self.number)


@dataclass(frozen=True)
class Server:
    address: str
    grid: HttpGrid
    devices: list[Device]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server with two registered devices that are connected."""
    keys = [generate_key_pairs() for _ in range(2)]
    for place, (_, public) in enumerate(keys):
        write_public(tmp_path, str(place), public)
    link, messages = Link("127.0.0.1", free_port(), insecure=True), in_memory()
    api = fleet_api(messages, admit(messages.state(), tmp_path))
    with listening(link, api), open_grid(messages.state()) as grid:
        devices = []
        for private, public in keys:
            client = FleetHttpClient.from_server_address(
                link.address, True, None, [NodeAuthHttpInterceptor(private, public)]
            )
            pem = public_key_to_bytes(public)
            node = client.ActivateNode(ActivateNodeRequest(public_key=pem, heartbeat_interval=30))
            devices.append(Device(private, client, node.node_id))
        yield Server(link.address, grid, devices)
        for device in devices:
            device.client.close()


def test_a_device_cannot_reply_in_another_devices_name(server: Server) -> None:
    """Even one that knows the number of the other's message, which only the other and the server should."""
    liar, honest = server.devices
    content = RecordDict({"fleet": ConfigRecord({"task": b"1"})})
    message = Message(content=content, dst_node_id=honest.number, message_type="train")
    (number,) = server.grid.push_messages([message])
    reply = Message(content=content, reply_to=message)

    def push(device: Device, client: FleetHttpClient) -> None:
        tree = ObjectTree(object_id=reply.object_id)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        head = message_to_proto(Message(metadata=reply.metadata, error=None, content=RecordDict()))
        client.PushMessages(
            PushMessagesRequest(node=device.node, messages_list=[head], message_object_trees=[tree])
        )

    with pytest.raises(httpx.HTTPStatusError) as forbidden:
        push(liar, liar.client)
    assert forbidden.value.response.status_code == 403
    with pytest.raises(httpx.HTTPStatusError) as unknown:
        push(honest, liar.client)
    assert unknown.value.response.status_code == 401
    assert list(server.grid.pull_messages([number])) == []
    push(honest, honest.client)


def asked_of(server: Server, device: Device) -> Message:
    content = RecordDict({"fleet": ConfigRecord({"task": b"1"})})
    message = Message(content=content, dst_node_id=device.number, message_type="train")
    assert list(server.grid.push_messages([message])) == [message.metadata.message_id]
    return message


def push_reply(
    device: Device,
    reply: Message,
    objects: dict[str, bytes],
    root: str,
    head: Message | None = None,
    parts: list[str] | None = None,
) -> str:
    """Push a reply as a device's client does, with whatever objects; returns the session to push more of them."""
    head = head or reply
    head.metadata.__dict__["_message_id"] = root
    tree = ObjectTree(object_id=root)
    tree.children.extend(ObjectTree(object_id=part) for part in parts or objects if part != root)
    bare = Message(metadata=head.metadata, error=None, content=RecordDict())
    done = device.client.PushMessages(PushMessagesRequest(
        node=device.node, messages_list=[message_to_proto(bare)], message_object_trees=[tree]
    ))  # fmt: skip
    push_objects(device, reply.metadata.run_id, done.session_id, objects)
    return done.session_id


def push_objects(device: Device, run: int, session: str, objects: dict[str, bytes]) -> None:
    for part, content in objects.items():
        device.client.PushObject(PushObjectRequest(
            node=device.node, run_id=run, object_id=part, object_content=content, session_id=session
        ))  # fmt: skip


def honest_reply(device: Device, message: Message) -> tuple[Message, dict[str, bytes]]:
    reply = Message(content=RecordDict({"fleet": ConfigRecord({"answer": b"2"})}), reply_to=message)
    return reply, {part: one.deflate() for part, one in get_all_nested_objects(reply).items()}


@pytest.mark.parametrize(
    "kind", ["nonsense", "another kind of object", "a child that is not there"]
)
def test_a_reply_that_cannot_be_read_is_left_out_and_the_others_are_taken(
    server: Server, kind: str
) -> None:
    liar, honest = server.devices
    bad, good = asked_of(server, liar), asked_of(server, honest)
    content = {
        "nonsense": object_of("Message", b"\xff" * 9),
        "another kind of object": object_of("ConfigRecord", b""),
        "a child that is not there": object_of("RecordDict", b"{}", "a" * 64),
    }[kind]
    root = sha256(content).hexdigest()
    push_reply(liar, Message(content=RecordDict(), reply_to=bad), {root: content}, root)
    reply, objects = honest_reply(honest, good)
    push_reply(honest, reply, objects, reply.object_id)
    numbers = [bad.metadata.message_id, good.metadata.message_id]
    (taken,) = server.grid.pull_messages(numbers)
    assert (taken.metadata.src_node_id, taken.content["fleet"]["answer"]) == (honest.number, b"2")
    (nothing,) = server.grid.pull_messages(numbers[:1])
    assert nothing.has_error(), "the round does not wait for it"


def test_a_device_that_keeps_the_content_of_its_reply_holds_nobody_up(server: Server) -> None:
    slow, honest = server.devices
    late, good = asked_of(server, slow), asked_of(server, honest)
    reply, objects = honest_reply(slow, late)
    session = push_reply(slow, reply, {}, reply.object_id, parts=list(objects))
    other, more = honest_reply(honest, good)
    push_reply(honest, other, more, other.object_id)
    began, numbers = time.monotonic(), [late.metadata.message_id, good.metadata.message_id]
    assert [one.metadata.src_node_id for one in server.grid.pull_messages(numbers)] == [
        honest.number
    ]
    assert list(server.grid.pull_messages(numbers[:1])) == []
    assert time.monotonic() - began < 1
    push_objects(slow, reply.metadata.run_id, session, objects)
    (taken,) = server.grid.pull_messages(numbers[:1])
    assert (taken.metadata.src_node_id, taken.content["fleet"]["answer"]) == (slow.number, b"2")


def test_a_reply_counts_for_the_device_that_pushed_it_whatever_is_inside(server: Server) -> None:
    """The head of a reply is checked when it comes; the same fields inside the content are not."""
    liar, honest = server.devices
    own, others = asked_of(server, liar), asked_of(server, honest)
    inside, objects = honest_reply(liar, others)
    push_reply(
        liar, inside, objects, inside.object_id, head=Message(content=RecordDict(), reply_to=own)
    )
    (taken,) = server.grid.pull_messages([own.metadata.message_id, others.metadata.message_id])
    assert taken.metadata.src_node_id == liar.number
    assert taken.metadata.reply_to_message_id == own.metadata.message_id


def object_of(kind: str, body: bytes, children: str = "") -> bytes:
    """An object as Flower's store takes it: a head with its kind, children and length, and a body."""
    return f"{kind} {children} {len(body)}".encode() + b"\x00" + body


def test_a_device_cannot_take_another_devices_messages(server: Server) -> None:
    liar, honest = server.devices
    content = RecordDict({"fleet": ConfigRecord({"task": b"1"})})
    server.grid.push_messages(
        [Message(content=content, dst_node_id=honest.number, message_type="train")]
    )
    with pytest.raises(httpx.HTTPStatusError) as unknown:
        liar.client.PullMessages(PullMessagesRequest(node=honest.node))
    assert unknown.value.response.status_code == 401
    assert not liar.client.PullMessages(PullMessagesRequest(node=liar.node)).messages_list
    assert honest.client.PullMessages(PullMessagesRequest(node=honest.node)).messages_list


def test_a_device_refuses_a_server_of_another_authority(tmp_path: Path) -> None:
    """Over the client that a device uses, with the server's own certificate and with one of another fleet."""
    for fleet in ("own", "other"):
        make(tmp_path / fleet, ("localhost",), 1)
    link, messages = Link("0.0.0.0", free_port(), tmp_path / "own"), in_memory()
    private = load_ssh_private_key((tmp_path / "own/devices/1.key").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    public = private.public_key()
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=30)

    def activate(fleet: str, host: str = "localhost") -> None:
        authority = (tmp_path / fleet / "ca.crt").read_bytes()
        signs = [NodeAuthHttpInterceptor(private, public)]
        address = f"{host}:{link.port}"
        with FleetHttpClient.from_server_address(address, False, authority, signs) as client:
            client.ActivateNode(asked)

    with listening(link, fleet_api(messages, admit(messages.state(), tmp_path / "own"))):
        activate("own")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            activate("other")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            activate("own", "127.0.0.2")  # a name that the certificate is not for


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (f"content-length: {MOST_BYTES + 1}", 413),
        (f"content-length: {'9' * 18}", 413),
        ("transfer-encoding: chunked", 411),
    ],
)
def test_a_request_that_is_too_long_or_of_no_length_is_refused_before_it_is_read(
    server: Server, length: str, expected: int
) -> None:
    """Not a byte of the body is sent: the answer does not wait for one."""
    heads = [f"{name}: {value}" for name, value in signed(server.devices[0].key).items()]
    lines = ["POST /v1/fleet/push-messages HTTP/1.1", "host: fleet", length, *heads, "", ""]
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall("\r\n".join(lines).encode())
        assert connection.recv(1000).split()[1] == str(expected).encode()


def test_a_public_key_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    state = in_memory().state()
    with pytest.raises(ConfigError):  # no key at all
        admit(state, tmp_path)
    write_public(tmp_path, "one", rsa.generate_private_key(65537, 2048).public_key())
    with pytest.raises(ConfigError) as other:
        admit(state, tmp_path)
    assert "one.pub" in other.value.message
    (tmp_path / "devices" / "one.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(ConfigError) as nonsense:
        admit(state, tmp_path)
    assert "one.pub" in nonsense.value.message
    (tmp_path / "devices" / "one.pub").unlink()
    _, public = generate_key_pairs()
    for name in ("a", "b"):
        write_public(tmp_path, name, public)
    assert admit(state, tmp_path) == {public_key_to_bytes(public)}


def test_a_port_in_use_is_reported(server: Server) -> None:
    host, port = server.address.split(":")
    link = Link(host, int(port), insecure=True)
    with (
        pytest.raises(FleetError),
        listening(link, fleet_api(in_memory(), None)),
    ):
        pass
