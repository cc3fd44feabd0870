"""Secure aggregation: a server learns the sum of the devices' numbers and no device's own (SecAgg+).

Each device adds masks to its vector of whole numbers modulo 2^64: one of its own, and one with each of its neighbours,
which cancel in the sum. Secrets of a device that goes away are rebuilt from shares that its neighbours hold. Bonawitz
et al., 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", figure 4; neighbours in a ring as
in Bell et al., 2020, "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead".

Key agreement, shares and their encryption are Flower's (`flwr.common.secure_aggregation`). Its masks are not used: they
come of 32 bits of a key and of a generator that is not for secrets. Here they are ChaCha20's. Nor is its rounding,
which draws numbers: a fleet's sum must be the plain sum to the bit.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import FleetError, MissingPackageError
from ondevice.core.untrusted import parse_json
from ondevice.fleet.numbers import LIMIT, Numbers

if TYPE_CHECKING:
    from ondevice.fleet.charter import Agreement
    from ondevice.fleet.messages import Answer

LEAST = 3
"""Devices of a sum: of two, each would know the other's numbers."""
HALF_RING = 16
"""Neighbours on either side of a device that it shares masks and secrets with."""
LOSS_UNIT = -10
"""A loss is summed in whole numbers of 2^-10, below 1,024 nats."""
MOST_LOSS = 1 << 20
MOST_ROWS = 1 << 24
"""So that the sums of 65,535 devices stay below 2^63."""

Keys = tuple[bytes, bytes]
Send = Callable[[dict[int, dict[str, Any]]], dict[int, dict[str, Any]]]


def exponent_of(config: Agreement, count: int) -> int:
    """Return the exponent that all answers of a secure fleet have: their numbers fit 15 bits of it."""
    return math.frexp(config.longest(count))[1] - 15


def vector_of(answer: Answer, most_rows: int) -> np.ndarray:
    """Return what is summed: uint64 [numbers + 2]: weight times each mantissa, weight times loss, weight."""
    rows = min(answer.rows, most_rows)
    loss = max(-MOST_LOSS, min(MOST_LOSS, round(math.ldexp(answer.loss, -LOSS_UNIT))))
    return np.array([*(rows * m for m in answer.numbers.mantissas), rows * loss, rows], np.int64).view(np.uint64)


def means_of(total: np.ndarray, config: Agreement) -> tuple[list[float], float]:
    """Return the numbers' means and the loss of a sum: the plain weighted mean, bit for bit.

    Raises:
        FleetError: no fleet's answers have this sum.
    """
    *sums, loss, rows = (int(value) for value in total.view(np.int64))
    if rows < 1 or abs(loss) > rows * MOST_LOSS or any(abs(value) > rows * LIMIT for value in sums):
        raise FleetError("the sum of the answers is none of numbers that devices may send", received=f"{rows} rows")
    exponent = exponent_of(config, len(sums))
    return [math.ldexp(value, exponent) / rows for value in sums], math.ldexp(loss, LOSS_UNIT) / rows


def check_exponent(numbers: Numbers, config: Agreement) -> None:
    """Refuse numbers that are not in a secure fleet's units.

    Raises:
        FleetError: they have another exponent.
    """
    expected = exponent_of(config, len(numbers.mantissas))
    if numbers.exponent != expected:
        raise FleetError("the answer's numbers have another exponent", expected=expected, received=numbers.exponent)


def _flower() -> Any:
    """Flower's primitives.

    Raises:
        MissingPackageError: Flower is not installed.
    """
    try:
        from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
        from flwr.supercore.primitives import asymmetric
    except ImportError:
        raise MissingPackageError("flwr is not installed", hint="pip install 'ondevice-train[fleet]'") from None
    return shamir, symmetric_encryption, asymmetric


def mask(key: bytes, size: int) -> np.ndarray:
    """Return a mask, uint64 [size], of a key of 32 bytes that is used once: ChaCha20's key stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)


def ring(devices: list[int]) -> dict[int, set[int]]:
    """Return each device's neighbours, itself among them: all devices of a small fleet."""
    count = len(devices)
    reach = range(-HALF_RING, HALF_RING + 1)
    return {device: {devices[(place + step) % count] for step in reach} for place, device in enumerate(devices)}


def threshold(neighbours: int) -> int:
    """Return how many of a device's neighbours rebuild its secrets: more than half."""
    return neighbours // 2 + 1


class Secrets:
    """A device's secrets in one round; they are in memory alone and used once.

    Args:
        device: the device's number, as its neighbours see it.
    """

    def __init__(self, device: int) -> None:
        _, _, asymmetric = _flower()
        self.device = device
        self._pairs = [asymmetric.generate_key_pairs() for _ in range(2)]
        self.public: Keys = tuple(asymmetric.public_key_to_bytes(public) for _, public in self._pairs)  # type: ignore[assignment]
        self._seed = os.urandom(32)
        self._peers: dict[int, Keys] = {}
        self._held: dict[int, Keys] = {}
        self._summed: set[int] | None = None
        self._revealed = False

    def _shared(self, which: int, peer: int) -> bytes:
        """The key that this device and a neighbour have in common, of their first or second pairs."""
        _, symmetric, asymmetric = _flower()
        public = asymmetric.bytes_to_public_key(self._peers[peer][which])
        return symmetric.generate_shared_key(self._pairs[which][0], public)

    def share(self, peers: dict[int, Keys]) -> dict[int, bytes]:
        """Return a share of this device's secrets for each neighbour, encrypted for it.

        Raises:
            FleetError: too few neighbours, keys that are not unique, or other keys than this device's in its place.
        """
        shamir, symmetric, asymmetric = _flower()
        keys = [key for pair in peers.values() for key in pair]
        if len(peers) < LEAST or self._peers:
            raise FleetError("too few devices for a secure sum", expected=LEAST, received=len(peers))
        if peers.get(self.device) != self.public or len(set(keys)) != len(keys):
            raise FleetError("the keys that the server shows are not those of different devices")
        self._peers = peers
        needed, count = threshold(len(peers)), len(peers)
        secrets = (self._seed, asymmetric.private_key_to_bytes(self._pairs[0][0]))
        shares = zip(*(shamir.create_shares(secret, needed, count) for secret in secrets), strict=True)
        sealed = {}
        for peer, (seed, key) in zip(sorted(peers), shares, strict=True):
            if peer == self.device:
                self._held[peer] = (seed, key)
            else:
                plain = json.dumps([self.device, peer, _text(seed), _text(key)]).encode()
                sealed[peer] = symmetric.encrypt(self._shared(1, peer), plain)
        return sealed

    def masked(self, vector: np.ndarray, sealed: Mapping[int, bytes]) -> np.ndarray:
        """Return the vector, uint64 [size], under this device's mask and those with the neighbours that sent shares.

        Raises:
            FleetError: too few have, a share is not of who sent it, or a vector was masked before.
        """
        _, symmetric, _ = _flower()
        if len(sealed) + 1 < max(LEAST, threshold(len(self._peers))) or self._summed is not None:
            raise FleetError("too few devices for a secure sum", expected=LEAST, received=len(sealed) + 1)
        total = vector + mask(self._seed, len(vector))
        for peer, data in sealed.items():
            try:
                source, target, seed, key = parse_json(symmetric.decrypt(self._shared(1, peer), data))
            except Exception:
                raise FleetError(f"the shares of device {peer} cannot be read") from None
            if (source, target) != (peer, self.device):
                raise FleetError(f"the shares of device {peer} are for somebody else")
            self._held[peer] = (_bytes(seed), _bytes(key))
            pair = mask(base64.urlsafe_b64decode(self._shared(0, peer)), len(vector))
            total = total + pair if self.device > peer else total - pair
        self._summed = set(self._held)
        return total

    def reveal(self, alive: set[int], gone: set[int]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return the shares of the masks of neighbours whose vectors came, and of the keys of those that went away.

        Raises:
            FleetError: both would be revealed of one device, which would show its vector, or too few are there.
        """
        if self._summed is None or self._revealed or alive & gone or (alive | gone) != self._summed:
            raise FleetError("the server asks for shares that would show a device's own numbers")
        if len(alive) < max(LEAST, threshold(len(self._peers))):
            raise FleetError("too few devices for a secure sum", expected=LEAST, received=len(alive))
        self._revealed = True
        return {peer: self._held[peer][0] for peer in alive}, {peer: self._held[peer][1] for peer in gone}

    def reply(self, message: dict[str, Any], vector: Callable[[], np.ndarray]) -> dict[str, Any]:
        """Answer a server's message of a round; `vector` is asked for when it is to be masked."""
        stage = message.get("stage")
        if stage == "keys":
            return {"keys": [_text(key) for key in self.public]}
        if stage == "shares":
            peers = {int(peer): (_bytes(a), _bytes(b)) for peer, (a, b) in message["peers"].items()}
            return {"shares": {str(peer): _text(data) for peer, data in self.share(peers).items()}}
        if stage == "mask":
            sealed = {int(peer): _bytes(data) for peer, data in message["shares"].items()}
            return {"masked": _text(self.masked(vector(), sealed).astype("<u8").tobytes())}
        if stage == "reveal":
            found = self.reveal(*(set(map(int, message[name])) for name in ("alive", "gone")))
            return {"held": [{str(peer): _text(data) for peer, data in shares.items()} for shares in found]}
        raise FleetError("this is no stage of a secure sum", received=stage)


def collect(send: Send, first: dict[int, dict[str, Any]], size: int) -> tuple[np.ndarray, list[int]]:
    """Take a round's sum from devices, some of which may go away at any stage.

    Args:
        send: sends `{"secure": bytes, ...}` to each device and returns what came back of those that answered.
        first: what else goes to each device with the first stage.
        size: of the vectors.

    Returns:
        the sum, uint64 [size], and the devices that are in it.

    Raises:
        FleetError: too few devices are left.
    """
    shamir, symmetric, asymmetric = _flower()

    def ask(messages: dict[int, dict[str, Any]], more: dict[int, dict[str, Any]], name: str) -> dict[int, Any]:
        contents = {node: {**more.get(node, {}), "secure": json.dumps(message).encode()}
                    for node, message in messages.items()}  # fmt: skip
        replies = {node: parse_json(reply["secure"]) for node, reply in send(contents).items() if "secure" in reply}
        found = {node: reply[name] for node, reply in replies.items() if name in reply}
        if len(found) < LEAST:
            raise FleetError("too few devices are left for a secure sum", expected=LEAST, received=len(found))
        return found

    keys = ask({node: {"stage": "keys"} for node in first}, first, "keys")
    near = ring(sorted(keys))
    peers = {node: {str(peer): keys[peer] for peer in near[node]} for node in keys}
    shares = ask({node: {"stage": "shares", "peers": peers[node]} for node in keys}, {}, "shares")
    given = {node: {str(peer): shares[peer][str(node)] for peer in near[node] - {node} if peer in shares}
             for node in shares}  # fmt: skip
    masked = ask({node: {"stage": "mask", "shares": given[node]} for node in shares}, {}, "masked")
    alive, gone = set(masked), set(shares) - set(masked)
    asked = {node: {"alive": sorted(near[node] & alive), "gone": sorted(near[node] & gone)} for node in alive}
    held = ask({node: {"stage": "reveal", **asked[node]} for node in alive}, {}, "held")

    def rebuilt(node: int, which: int) -> bytes:
        found = [_bytes(held[peer][which][str(node)]) for peer in sorted(near[node] & set(held))]
        needed = threshold(len(near[node]))
        if len(found) < needed:
            raise FleetError("too few devices are left for a secure sum", expected=needed, received=len(found))
        return shamir.combine_shares(found[:needed])

    total = np.zeros(size, np.uint64)
    for node, text in masked.items():
        vector = np.frombuffer(_bytes(text), "<u8")
        if len(vector) != size:
            raise FleetError(f"device {node} gave a vector of another size", expected=size, received=len(vector))
        total += vector - mask(rebuilt(node, 0), size)
    for node in gone:
        private = asymmetric.bytes_to_private_key(rebuilt(node, 1))
        for peer in near[node] & alive:
            public = asymmetric.bytes_to_public_key(_bytes(keys[peer][0]))
            pair = mask(base64.urlsafe_b64decode(symmetric.generate_shared_key(private, public)), size)
            total = total - pair if peer > node else total + pair
    return total, sorted(alive)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
