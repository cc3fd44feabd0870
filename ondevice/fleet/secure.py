"""Secure aggregation: a server learns the sum of the devices' numbers and no device's own
(SecAgg+).

This is a device's end; `sums` is the server's. Each device adds masks to its vector of whole
numbers modulo 2^64: one of its own, and one with each of its neighbours, which cancel in the sum.
Secrets of a device that goes away are rebuilt from shares that its neighbours hold. Bonawitz et
al., 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", figure 4;
neighbours in a ring as in Bell et al., 2020, "Secure Single-Server Aggregation with
(Poly)Logarithmic Overhead".

Key agreement, shares and their encryption are Flower's (`flwr.common.secure_aggregation`). Its
masks are not used: they come of 32 bits of a key and of a generator that is not for secrets. Here
they are ChaCha20's. Nor is its rounding, which draws numbers: a fleet's sum must be the plain sum
to the bit.

A device signs its keys of a round with its own key, and takes a neighbour's only with the signature
of a device that the charter names: otherwise a server could be all of a device's neighbours."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import FleetError, MissingPackageError
from ondevice.core.untrusted import parse_json
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.keys import Signed, fingerprint, verify
from ondevice.fleet.numbers import LIMIT, Numbers
from ondevice.fleet.stages import (
    AskKeys,
    AskMasked,
    AskShares,
    Keys,
    Masked,
    Revealed,
    Shares,
    Stage,
    read_request,
)

if TYPE_CHECKING:
    from ondevice.fleet.keys import DeviceKey
    from ondevice.fleet.messages import TaskReply

LEAST = 3
"""Devices of a sum: of two, each would know the other's numbers."""
HALF_RING = 16
"""Neighbours on either side of a device that it shares masks and secrets with."""
LOSS_UNIT = -10
"""A loss is summed in whole numbers of 2^-10, below 1,024 nats."""
MOST_LOSS = 1 << 20
DOMAIN = b"ondevice-fleet-keys-1\0"


def exponent_of(config: Agreement, count: int) -> int:
    """Return the exponent of all replies of a secure fleet: their numbers fit 15 bits of it."""
    return math.frexp(config.longest(count))[1] - 15


def vector_of(answer: TaskReply, most_rows: int) -> np.ndarray:
    """Return a reply's summand, uint64 [numbers + 2]: weight times each mantissa and loss, and
    weight."""
    rows = min(answer.rows, most_rows)
    loss = max(-MOST_LOSS, min(MOST_LOSS, round(math.ldexp(answer.loss, -LOSS_UNIT))))
    return np.array(
        [*(rows * m for m in answer.numbers.mantissas), rows * loss, rows], np.int64
    ).view(np.uint64)


def means_of(total: np.ndarray, config: Agreement, devices: int) -> tuple[list[float], float]:
    """Return the numbers' means and the loss of a sum: the plain weighted mean, bit for bit.

    Args:
        devices: how many are in the sum.

    Raises:
        FleetError: no replies of a fleet have this sum.
    """
    *sums, loss, rows = (int(value) for value in total.view(np.int64))
    if (
        not 1 <= rows <= devices * config.most_rows
        or abs(loss) > rows * MOST_LOSS
        or any(abs(value) > rows * LIMIT for value in sums)
    ):
        raise FleetError(
            "not a sum of numbers that devices may send",
            received=f"{rows} rows",
        )
    exponent = exponent_of(config, len(sums))
    return [math.ldexp(value, exponent) / rows for value in sums], math.ldexp(
        loss, LOSS_UNIT
    ) / rows


def check_exponent(numbers: Numbers, config: Agreement) -> None:
    """Refuse numbers that are not in a secure fleet's units.

    Raises:
        FleetError: they have another exponent.
    """
    expected = exponent_of(config, len(numbers.mantissas))
    if numbers.exponent != expected:
        raise Refusal(
            Code.NUMBERS,
            "the reply's numbers have another exponent",
            expected=expected,
            received=numbers.exponent,
        )


def primitives() -> Any:
    """Return Flower's primitives: shares, encryption, key agreement.

    Raises:
        MissingPackageError: Flower is not installed.
    """
    try:
        from flwr.common.secure_aggregation.crypto import shamir, symmetric_encryption
        from flwr.supercore.primitives import asymmetric
    except ImportError:
        raise MissingPackageError(
            "flwr is not installed", hint="pip install 'ondevice-train[fleet]'"
        ) from None
    return shamir, symmetric_encryption, asymmetric


def mask(key: bytes, size: int) -> np.ndarray:
    """Return a mask, uint64 [size], of a key of 32 bytes that is used once: ChaCha20's key
    stream."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), dtype="<u8").astype(np.uint64)


def ring(devices: list[int]) -> dict[int, set[int]]:
    """Return each device's neighbours, itself among them: all devices of a small fleet."""
    count = len(devices)
    reach = range(-HALF_RING, HALF_RING + 1)
    return {
        device: {devices[(place + step) % count] for step in reach}
        for place, device in enumerate(devices)
    }


def threshold(neighbours: int) -> int:
    """Return how many of a device's neighbours rebuild its secrets: more than half."""
    return neighbours // 2 + 1


def statement(task: bytes, device: int, keys: Keys) -> bytes:
    """Return what a device signs: its number, its keys, and the task, which names fleet, round and
    state."""
    parts = (task, device.to_bytes(8, "little"), keys.mask_key, keys.share_key, keys.promise)
    return DOMAIN + b"".join(hashlib.sha256(part).digest() for part in parts)


def check_keys(task: bytes, device: int, keys: Keys, allowed: Collection[str]) -> None:
    """Check that a device of the charter made these keys for this task.

    Raises:
        Refusal: it did not, or a key is not one.
    """
    *_, asymmetric = primitives()
    try:
        if fingerprint(keys.signer) not in allowed:
            raise Refusal(Code.KEYS, f"the charter does not name the key of device {device}")
        verify(Signed(keys.signer, keys.signature), statement(task, device, keys))
        for key in (keys.mask_key, keys.share_key):
            if asymmetric.bytes_to_public_key(key).curve.name != "secp384r1":
                raise ValueError
    except Exception as error:
        if isinstance(error, Refusal):
            message = error.message
        else:
            message = f"a key of device {device} is not valid"
        raise Refusal(Code.KEYS, message, about=device) from None


def mask_of_pair(private: Any, public: bytes, size: int) -> np.ndarray:
    """Return the mask that two neighbours have in common, uint64 [size]."""
    _, symmetric, asymmetric = primitives()
    shared = symmetric.generate_shared_key(private, asymmetric.bytes_to_public_key(public))
    return mask(base64.urlsafe_b64decode(shared), size)


class Secrets:
    """A device's secrets in one round; they stay in memory and are used once.

    Args:
        device: the device's number, as its neighbours see it.
        key: the device's own.
        task: of the round, as bytes.
        allowed: fingerprints of the charter's devices.

    Raises:
        Refusal: the charter names no devices, or not this one.
    """

    def __init__(self, device: int, key: DeviceKey, task: bytes, allowed: Collection[str]) -> None:
        if fingerprint(key.public) not in allowed:
            raise Refusal(
                Code.KEYS,
                "the charter does not name this device's key, so its neighbours would not trust it",
                expected=f"one of {len(allowed)} keys",
                received=fingerprint(key.public),
                hint="begin the fleet with --device-keys DIR, the folder of all devices' public keys",
            )
        *_, asymmetric = primitives()
        self.device = device
        self.task = task
        self.allowed = allowed
        self._mask_pair, self._share_pair = (asymmetric.generate_key_pairs() for _ in range(2))
        self._seed = os.urandom(32)
        keys = Keys(
            mask_key=asymmetric.public_key_to_bytes(self._mask_pair[1]),
            share_key=asymmetric.public_key_to_bytes(self._share_pair[1]),
            promise=hashlib.sha256(self._seed).digest(),
            signer=key.public,
            signature=b"-",
        )
        signature = key.sign(statement(task, device, keys)).signature
        self.public = keys.model_copy(update={"signature": signature})
        self._peers: dict[int, Keys] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._summed: frozenset[int] | None = None
        self._revealed = False

    def _sealing_key(self, peer: int) -> bytes:
        """The key that encrypts shares between this device and a neighbour."""
        _, symmetric, asymmetric = primitives()
        public = asymmetric.bytes_to_public_key(self._peers[peer].share_key)
        return symmetric.generate_shared_key(self._share_pair[0], public)

    def share(self, peers: dict[int, Keys]) -> Shares:
        """Return a share of this device's secrets for each neighbour, encrypted for it.

        Raises:
            Refusal: too few neighbours, keys that are not unique or not signed by devices of the
                charter, or other keys than this device's in its place.
        """
        shamir, symmetric, asymmetric = primitives()
        if len(peers) < LEAST or self._peers:
            raise Refusal(
                Code.UNSAFE, "too few devices for a secure sum", expected=LEAST, received=len(peers)
            )
        secrets = [secret for keys in peers.values() for secret in keys.secrets()]
        if peers.get(self.device) != self.public or len(set(secrets)) != len(secrets):
            raise Refusal(
                Code.KEYS, "the keys that the server shows are not those of different devices"
            )
        for peer, keys in peers.items():
            check_keys(self.task, peer, keys, self.allowed)
        self._peers = peers
        needed = threshold(len(peers))
        count = len(peers)
        private = asymmetric.private_key_to_bytes(self._mask_pair[0])
        shares = zip(
            *(shamir.create_shares(each, needed, count) for each in (self._seed, private)),
            strict=True,
        )
        sealed = {}
        for peer, (seed, key) in zip(sorted(peers), shares, strict=True):
            if peer == self.device:
                self._held[peer] = (seed, key)
            else:
                plain = json.dumps([self.device, peer, _text(seed), _text(key)]).encode()
                sealed[peer] = symmetric.encrypt(self._sealing_key(peer), plain)
        return Shares(shares=sealed)

    def masked(self, vector: np.ndarray, sealed: Mapping[int, bytes]) -> Masked:
        """Return the vector, uint64 [size], under this device's mask and those with the neighbours
        that sent shares.

        A neighbour whose shares cannot be read is left out, and named: it could stop every sum
        otherwise.

        Raises:
            Refusal: too few are left, or a vector was masked before.
        """
        if self._summed is not None or not sealed.keys() <= self._peers.keys() - {self.device}:
            raise Refusal(
                Code.UNSAFE, "this device has masked its vector already, or lacks these neighbours"
            )
        for peer, data in sealed.items():
            opened = self._opened(peer, data)
            if opened is not None:
                self._held[peer] = opened
        if len(self._held) < max(LEAST, threshold(len(self._peers))):
            raise Refusal(
                Code.UNSAFE,
                "too few devices for a secure sum",
                expected=LEAST,
                received=len(self._held),
            )
        total = vector + mask(self._seed, len(vector))
        for peer in self._held.keys() - {self.device}:
            pair = mask_of_pair(self._mask_pair[0], self._peers[peer].mask_key, len(vector))
            total = total + pair if self.device > peer else total - pair
        self._summed = frozenset(self._held)
        return Masked(
            masked=total.astype("<u8").tobytes(), without=frozenset(sealed) - self._summed
        )

    def _opened(self, peer: int, data: bytes) -> tuple[bytes, bytes] | None:
        """Return the shares that a neighbour sent; None if they cannot be read."""
        _, symmetric, _ = primitives()
        try:
            source, target, seed, key = parse_json(symmetric.decrypt(self._sealing_key(peer), data))
            shares = (base64.b64decode(seed, validate=True), base64.b64decode(key, validate=True))
        except Exception:
            return None
        if (source, target) == (peer, self.device) and all(shares):
            return shares
        return None

    def reveal(self, alive: Collection[int], gone: Collection[int]) -> Revealed:
        """Return the shares of the masks of neighbours whose vectors came, and of the keys of those
        that went away.

        Raises:
            Refusal: both would be revealed of one device, which would show its vector, or too few
                are there.
        """
        living = frozenset(alive)
        lost = frozenset(gone)
        if (
            self._summed is None
            or self._revealed
            or living & lost
            or (living | lost) != self._summed
        ):
            raise Refusal(
                Code.UNSAFE, "the server asks for shares that would reveal a device's own numbers"
            )
        if len(living) < max(LEAST, threshold(len(self._peers))):
            raise Refusal(
                Code.UNSAFE,
                "too few devices for a secure sum",
                expected=LEAST,
                received=len(living),
            )
        self._revealed = True
        return Revealed(
            seeds={peer: self._held[peer][0] for peer in living},
            keys={peer: self._held[peer][1] for peer in lost},
        )

    def reply(self, request: bytes, vector: Callable[[], np.ndarray]) -> bytes:
        """Reply to a server's message of a round; `vector` is called when it is to be masked.

        Raises:
            Refusal: the message is not of a stage, or would reveal this device's own numbers.
        """
        asked = read_request(request)
        done: Stage
        if isinstance(asked, AskKeys):
            done = self.public
        elif isinstance(asked, AskShares):
            done = self.share(asked.peers)
        elif isinstance(asked, AskMasked):
            done = self.masked(vector(), asked.shares)
        else:
            done = self.reveal(asked.alive, asked.gone)
        return done.to_bytes()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
