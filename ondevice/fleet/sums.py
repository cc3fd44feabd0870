"""A secure sum's server: the four stages, and the sum of the vectors that came.

A device may go away or lie at any stage. A liar is left out: the sum goes on without it if the
others' shares suffice, and the server learns whom not to ask again."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import combinations
from typing import Any

import numpy as np

from ondevice.core.errors import FleetError
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.replies import Reply, Shape, Staged
from ondevice.fleet.secure import LEAST, check_keys, mask, mask_of_pair, primitives, ring, threshold
from ondevice.fleet.stages import (
    AskKeys,
    AskMasked,
    AskRevealed,
    AskShares,
    Keys,
    Masked,
    Revealed,
    Shares,
    read,
)

Send = Callable[[dict[int, dict[str, Any]]], dict[int, Reply]]
MOST_TRIES = 256
"""Sets of shares that are tried for one secret."""


class SecureSum:
    """One round's sum.

    Args:
        send: sends `{"secure": bytes, ...}` to each device and returns the replies of those that
            replied.
        task: of the round, as bytes.
        allowed: fingerprints of the charter's devices.
        blame: called with each device that lied, and the code.
    """

    def __init__(
        self, send: Send, task: bytes, allowed: Collection[str], blame: Callable[[int, Code], None]
    ) -> None:
        self.send = send
        self.task = task
        self.allowed = allowed
        self.blame = blame
        self.keys: dict[int, Keys] = {}
        self.near: dict[int, set[int]] = {}

    def collect(self, first: dict[int, dict[str, Any]], size: int) -> tuple[np.ndarray, list[int]]:
        """Take the sum.

        Args:
            first: what else goes to each device with the first stage.
            size: of the vectors.

        Returns:
            the sum, uint64 [size], and the devices that are in it.

        Raises:
            FleetError: too few devices are left.
        """
        self.keys = self._honest(self._ask(Keys, {node: AskKeys() for node in first}, first))
        self.near = ring(sorted(_enough(self.keys)))
        near = self.near
        requests = {
            node: AskShares(peers={peer: self.keys[peer] for peer in near[node]})
            for node in self.keys
        }
        shares = {
            node: reply.shares
            for node, reply in self._ask(Shares, requests).items()
            if self._fits(node, reply.shares.keys() == near[node] - {node})
        }
        requests = {
            node: AskMasked(
                shares={peer: shares[peer][node] for peer in near[node] - {node} if peer in shares}
            )
            for node in _enough(shares)
        }
        masked = {
            node: reply
            for node, reply in self._ask(Masked, requests).items()
            if self._fits(
                node, len(reply.masked) == 8 * size and reply.without <= near[node] - {node}
            )
        }
        alive = set(masked) - self._liars(masked)
        gone = set(shares) - alive
        readable = {node: (near[node] & set(shares)) - masked[node].without for node in alive}
        shown = {node: (readable[node] & alive, readable[node] & gone) for node in _enough(alive)}
        requests = {
            node: AskRevealed(alive=frozenset(seeds), gone=frozenset(keys))
            for node, (seeds, keys) in shown.items()
        }
        revealed = {
            node: reply
            for node, reply in self._ask(Revealed, requests).items()
            if self._fits(node, (reply.seeds.keys(), reply.keys.keys()) == shown[node])
        }

        total = np.zeros(size, np.uint64)
        for node in alive:
            seeds = {
                peer: reply.seeds[node] for peer, reply in revealed.items() if node in reply.seeds
            }
            seed = self._rebuilt(node, seeds, lambda found, node=node: self._is_seed(node, found))
            total += np.frombuffer(masked[node].masked, "<u8") - mask(seed, size)
        for node in gone:
            partners = [peer for peer in near[node] & alive if node in readable[peer]]
            if not partners:
                continue
            parts = {
                peer: reply.keys[node] for peer, reply in revealed.items() if node in reply.keys
            }
            pem = self._rebuilt(node, parts, lambda found, node=node: self._is_key(node, found))
            private = primitives()[2].bytes_to_private_key(pem)
            for peer in partners:
                pair = mask_of_pair(private, self.keys[peer].mask_key, size)
                total = total - pair if peer > node else total + pair
        return total, sorted(alive)

    def _ask(
        self,
        kind: type[Shape],
        requests: dict[int, Any],
        more: dict[int, dict[str, Any]] | None = None,
    ) -> dict[int, Shape]:
        """Ask for a stage, and return the replies that have its form."""
        contents = {node: {**(more or {}).get(node, {}), "secure": request.to_bytes()}
                    for node, request in requests.items()}  # fmt: skip
        replies: dict[int, Shape] = {}
        for node, reply in self.send(contents).items():
            if isinstance(reply, Staged):
                try:
                    replies[node] = read(kind, reply.secure)
                except Refusal as error:
                    self.blame(node, error.code)
        return replies

    def _fits(self, node: int, fits: bool) -> bool:
        if not fits:
            self.blame(node, Code.NUMBERS)
        return fits

    def _honest(self, given: dict[int, Keys]) -> dict[int, Keys]:
        """Leave out keys that neighbours would refuse: unsigned ones, and such as two devices
        have."""
        times = Counter(secret for keys in given.values() for secret in set(keys.secrets()))
        kept = {}
        for node, keys in given.items():
            try:
                if len(set(keys.secrets())) < 4 or any(
                    times[secret] > 1 for secret in keys.secrets()
                ):
                    raise Refusal(Code.KEYS, "two devices have one key")
                check_keys(self.task, node, keys, self.allowed)
                kept[node] = keys
            except Refusal as error:
                self.blame(node, error.code)
        return kept

    def _liars(self, masked: dict[int, Masked]) -> set[int]:
        """Return devices to leave out, so that no two that are left disagree about their shares.

        A device that cannot read a neighbour's shares names it; either of the two may lie. Whoever
        is in most of such pairs goes first. Of a single pair one goes, and neither is asked again.
        """
        pairs = {
            (node, peer) for node, reply in masked.items() for peer in reply.without & masked.keys()
        }
        out: set[int] = set()
        while pairs:
            times = Counter(node for pair in pairs for node in pair)
            node, count = max(times.items(), key=lambda item: (item[1], item[0]))
            accusers = {one for one, other in pairs if other == node}
            for each in {node} if count > 1 else next(iter(pairs)):
                self.blame(each, Code.SHARES)
            holders = self.near[node] & masked.keys() - accusers - out - {node}
            # Without its key its masks would stay in the sum: it is summed this once, and those
            # that name it are not.
            stays = accusers and 0 < len(holders) < threshold(len(self.near[node]))
            out |= accusers if stays else {node}
            pairs = {pair for pair in pairs if not out & set(pair)}
        return out

    def _rebuilt(self, node: int, shares: dict[int, bytes], fits: Callable[[bytes], bool]) -> bytes:
        """Return a secret of a device, made of its neighbours' shares.

        Raises:
            FleetError: too few shares, or no set of them gives the promised secret.
        """
        needed = threshold(len(self.near[node]))
        if len(shares) < needed:
            raise FleetError(
                "too few devices are left for a secure sum", expected=needed, received=len(shares)
            )
        for peers in _subsets(sorted(shares), needed):
            secret = _combined([shares[peer] for peer in peers])
            if secret is None or not fits(secret):
                continue
            for peer in shares.keys() - set(peers):
                other = _combined([shares[each] for each in (*peers[1:], peer)])
                if other is None or not fits(other):
                    self.blame(peer, Code.SHARES)
            return secret
        self.blame(node, Code.SHARES)
        raise FleetError(f"device {node} sent shares of another secret than it promised")

    def _is_seed(self, node: int, seed: bytes) -> bool:
        return hashlib.sha256(seed).digest() == self.keys[node].promise

    def _is_key(self, node: int, pem: bytes) -> bool:
        asymmetric = primitives()[2]
        try:
            public = asymmetric.bytes_to_private_key(pem).public_key()
        except Exception:
            return False
        return asymmetric.public_key_to_bytes(public) == self.keys[node].mask_key


def _subsets(peers: list[int], count: int) -> Iterator[tuple[int, ...]]:
    """Give subsets of `count` peers: all of them, or else `MOST_TRIES` that are drawn, so that few
    liars are in few."""
    if math.comb(len(peers), count) <= MOST_TRIES:
        yield from combinations(peers, count)
        return
    draw = np.random.default_rng(0)
    for _ in range(MOST_TRIES):
        yield tuple(peers[place] for place in sorted(draw.permutation(len(peers))[:count].tolist()))


def _combined(shares: list[bytes]) -> bytes | None:
    """Return the secret of shares; None if they do not fit each other."""
    if len({len(share) for share in shares}) > 1 or len(shares[0]) % 16 != 4:
        return None
    try:
        return primitives()[0].combine_shares(shares)
    except Exception:
        return None


def _enough(devices: Any) -> Any:
    """Return the devices of a stage.

    Raises:
        FleetError: they are too few.
    """
    if len(devices) < LEAST:
        raise FleetError(
            "too few devices are left for a secure sum", expected=LEAST, received=len(devices)
        )
    return devices
