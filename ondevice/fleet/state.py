"""A fleet's adapter: a vector of whole numbers that outcomes change, and its hash.

All arithmetic is in integers, so a state is a pure function of the charter and the outcomes, on every machine, and
without momentum in any order of the outcomes.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

from ondevice.core.errors import FleetError
from ondevice.fleet.messages import HASH_BYTES, UNIT, Event, Outcome, Refresh
from ondevice.fleet.noise import weighted_sum

DOMAIN = b"ondevice-fleet-state-1\0"
MOMENTUM_BITS = 8
"""Momentum is a whole number of 1/256."""


class State:
    """The adapter after some rounds.

    Args:
        size: elements of the flat vector.
        seed: of the noise.
        noise: `rademacher` or `gaussian`.
        queries: directions a step.
        momentum: in 1/256; 0 keeps no velocity.
        start: float32 [size], the adapter that all begin from; None is zeros.

    Attributes:
        vector: int64 [size], units of 2^-32.
        velocity: the same; zeros without momentum.
        frozen: 32 bytes that name the frozen tensors since the last refresh; zeros before the first.
        round: how many outcomes and refreshes have been applied.
    """

    def __init__(
        self, size: int, seed: int, noise: str, queries: int, momentum: int = 0, start: np.ndarray | None = None
    ) -> None:
        self.size, self.seed, self.noise, self.queries, self.momentum = size, seed, noise, queries, momentum
        self.vector = np.zeros(size, dtype=np.int64) if start is None else to_units(start)
        self.velocity = np.zeros(size if momentum else 0, dtype=np.int64)
        self.frozen = bytes(32)
        self.round = 0
        self._digest: bytes | None = None

    def digest(self) -> bytes:
        """Return the SHA-256 of the state, 32 bytes."""
        if self._digest is None:
            digest = hashlib.sha256(DOMAIN + struct.pack("<QH", self.size, self.momentum) + self.frozen)
            digest.update(self.vector.astype("<i8", copy=False).data)
            digest.update(self.velocity.astype("<i8", copy=False).data)
            self._digest = digest.digest()
        return self._digest

    @property
    def hash(self) -> bytes:
        """The hash as messages have it: the digest's first 8 bytes."""
        return self.digest()[:HASH_BYTES]

    def flat(self) -> np.ndarray:
        """Return the adapter as sessions take it: float32 [size], each element rounded to the nearest."""
        return self.vector.astype(np.float32) * np.float32(2.0**UNIT)

    def change(self, outcome: Outcome) -> np.ndarray:
        """Return the sum of an outcome's directions, int64 [size], in units of 2^-32."""
        directions = []
        for group in outcome.groups:
            numbers = group.coefficients
            if len(numbers.mantissas) % self.queries:
                raise FleetError(
                    f"round {outcome.round}: a group has no whole steps",
                    expected=f"a multiple of {self.queries} coefficients",
                    received=len(numbers.mantissas),
                )
            for place, mantissa in enumerate(numbers.mantissas):
                step, query = divmod(place, self.queries)
                directions.append((group.first_step + step, query, mantissa << (numbers.exponent - UNIT)))
        return weighted_sum(self.noise, self.seed, directions, self.size)

    def apply(self, event: Event, check: bool = True) -> None:
        """Take an outcome or a refresh into the state.

        Args:
            check: hold the hashes against the event's; the state is as it was where they differ.

        Raises:
            FleetError: the event is not of this state.
        """
        if check and event.before != self.hash:
            raise FleetError(
                f"round {event.round} does not follow on this state",
                expected=f"state {event.before.hex()}",
                received=f"state {self.hash.hex()}",
                hint="apply the rounds before it first, or take the whole log again",
            )
        kept = (self.vector, self.velocity, self.frozen, self.round, self._digest)
        if isinstance(event, Refresh):
            self.frozen = hashlib.sha256(self.frozen + event.digest).digest()
            self.vector, self.velocity = np.zeros_like(self.vector), np.zeros_like(self.velocity)
        else:
            change = self.change(event)
            if self.momentum:
                self.velocity = ((self.velocity * self.momentum) >> MOMENTUM_BITS) + change
                change = self.velocity
            self.vector = self.vector - change
        self.round, self._digest = event.round + 1, None
        if check and event.after != self.hash:
            received = self.hash.hex()
            self.vector, self.velocity, self.frozen, self.round, self._digest = kept
            raise FleetError(
                f"round {event.round} gives another state here than on the server",
                expected=f"state {event.after.hex()}",
                received=f"state {received}",
                hint="the log is damaged, or another charter's; take the whole log again",
            )


def to_units(flat: np.ndarray) -> np.ndarray:
    """Return float32 [size] as whole numbers of 2^-32, int64, halves to even.

    Raises:
        FleetError: a value is not finite, or 2^30 or more.
    """
    wide = np.asarray(flat, dtype=np.float64)
    if not np.isfinite(wide).all() or (np.abs(wide) >= 2.0**30).any():
        raise FleetError("the adapter has values that a fleet cannot hold", expected="finite numbers below 2^30")
    return np.rint(wide * 2.0**-UNIT).astype(np.int64)
