"""A fleet's adapter: a vector of whole numbers that outcomes change, and its hash.

All arithmetic is in integers, so a state is a pure function of the charter and the outcomes, on
every machine, and without momentum in any order of the outcomes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ondevice.core.errors import FleetError
from ondevice.fleet.adam import Moments
from ondevice.fleet.messages import HASH_BYTES, UNIT, Event, Outcome, Refresh
from ondevice.fleet.noise import weighted_sum

DOMAIN = b"ondevice-fleet-state-1\0"
MOMENTUM_BITS = 8
"""Momentum is a whole number of 1/256."""
KEPT = ("vector", "velocity", "moments", "frozen", "round", "refreshed", "_digest")
"""Attributes that an event changes."""
ADAM = 1 << MOMENTUM_BITS
"""Stands in the hash instead of a momentum."""


@dataclass(frozen=True)
class Steps:
    """How Adam's steps are numbered and how far they go, from the charter.

    Attributes:
        local: steps of a round.
        unit: of an estimate: coefficients are numbers times it.
        rate: (round) -> learning rate.
    """

    local: int
    unit: float
    rate: Callable[[int], float]


class State:
    """The adapter after some rounds.

    Args:
        size: elements of the flat vector.
        seed: of the noise.
        noise: `rademacher` or `gaussian`.
        queries: directions a step.
        momentum: in 1/256; 0 keeps no velocity.
        steps: if the optimizer is Adam; None for plain steps.

    Attributes:
        vector: int64 [size], units of 2^-32.
        velocity: the same; none without momentum.
        moments: Adam's; None without it.
        frozen: 32 bytes that name the frozen tensors since the last refresh; zeros before the
            first.
        round: the next one, if rounds are applied in their order.
        refreshed: the round before which the frozen tensors were given; -1 before that.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        noise: str,
        queries: int,
        momentum: int = 0,
        steps: Steps | None = None,
    ) -> None:
        self.size = size
        self.seed = seed
        self.noise = noise
        self.queries = queries
        self.momentum = momentum
        self.vector = np.zeros(size, dtype=np.int64)
        self.velocity = np.zeros(size if momentum else 0, dtype=np.int64)
        self.steps = steps
        self.moments = None
        if steps is not None:
            self.moments = Moments.zeros(size)
        self.frozen = bytes(32)
        self.round = 0
        self.refreshed = -1
        self._digest: bytes | None = None

    def digest(self) -> bytes:
        """Return the SHA-256 of the state, 32 bytes."""
        if self._digest is None:
            kind = ADAM
            if self.moments is None:
                kind = self.momentum
            digest = hashlib.sha256(DOMAIN + struct.pack("<QH", self.size, kind) + self.frozen)
            digest.update(self.vector.astype("<i8", copy=False).data)
            digest.update(self.slots())
            self._digest = digest.digest()
        return self._digest

    @property
    def hash(self) -> bytes:
        """The hash as messages have it: the digest's first 8 bytes."""
        return self.digest()[:HASH_BYTES]

    def slots(self) -> bytes:
        """Return what the optimizer keeps: the velocity, or Adam's moments."""
        if self.moments is None:
            return self.velocity.astype("<i8", copy=False).tobytes()
        return self.moments.to_bytes()

    def restore(self, vector: bytes, slots: bytes) -> None:
        """Restore the vector's int64 and the result of `slots`."""
        self.vector = np.frombuffer(vector, "<i8").astype(np.int64)
        if self.moments is None:
            self.velocity = np.frombuffer(slots, "<i8").astype(np.int64)
        else:
            self.moments = Moments.from_bytes(slots, self.size)
        self._digest = None

    def flat(self) -> np.ndarray:
        """Return the adapter as sessions take it: float32 [size], each element rounded to the
        nearest; with Adam [3 size], the moments behind it."""
        flat = self.vector.astype(np.float32) * np.float32(2.0**UNIT)
        if self.moments is None:
            return flat
        return np.concatenate(
            [flat, self.moments.mean.astype(np.float32), self.moments.square.astype(np.float32)]
        )

    def change(self, outcome: Outcome) -> np.ndarray:
        """Return the sum of an outcome's directions, int64 [size], in units of 2^-32."""
        return weighted_sum(self.noise, self.seed, self._directions(outcome), self.size)

    def _directions(self, outcome: Outcome) -> list[tuple[int, int, int]]:
        directions = []
        for group in outcome.groups:
            numbers = group.coefficients
            if len(numbers.mantissas) % self.queries:
                raise FleetError(
                    f"round {outcome.round}: a group has incomplete steps",
                    expected=f"a multiple of {self.queries} coefficients",
                    received=len(numbers.mantissas),
                )
            for place, mantissa in enumerate(numbers.mantissas):
                step, query = divmod(place, self.queries)
                directions.append(
                    (group.first_step + step, query, mantissa << (numbers.exponent - UNIT))
                )
        return directions

    def _adam(self, outcome: Outcome, steps: Steps, moments: Moments) -> tuple[np.ndarray, Moments]:
        """The vector and the moments after an outcome's local steps, one after the other."""
        directions = self._directions(outcome)
        vector = self.vector
        scale = steps.rate(outcome.round) * 2.0**-UNIT
        for step in sorted({step for step, _, _ in directions}):
            own = [direction for direction in directions if direction[0] == step]
            total = weighted_sum(self.noise, self.seed, own, self.size)
            update, moments = moments.stepped(
                total.astype(np.float64) * 2.0**UNIT / steps.unit, step
            )
            vector = vector - np.rint(update * scale).astype(np.int64)
        return vector, moments

    def apply(self, event: Event, check: bool = True) -> None:
        """Take an outcome or a refresh into the state.

        Args:
            check: compare the hashes with the event's; the state does not change if they differ.

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
        kept = {name: getattr(self, name) for name in KEPT}
        if isinstance(event, Refresh):
            self.frozen = hashlib.sha256(self.digest() + event.digest).digest()
            self.vector = np.zeros_like(self.vector)
            self.velocity = np.zeros_like(self.velocity)
            if self.steps is not None:
                self.moments = Moments.zeros(self.size, event.round * self.steps.local)
            self.round = self.refreshed = event.round
        else:
            if self.steps is not None and self.moments is not None:
                self.vector, self.moments = self._adam(event, self.steps, self.moments)
            else:
                change = self.change(event)
                if self.momentum:
                    self.velocity = change = (
                        (self.velocity * self.momentum) >> MOMENTUM_BITS
                    ) + change
                self.vector = self.vector - change
            self.round = event.round + 1
        self._digest = None
        if check and event.after != self.hash:
            received = self.hash.hex()
            for name, value in kept.items():
                setattr(self, name, value)
            raise FleetError(
                f"round {event.round} leads to another state here than on the server",
                expected=f"state {event.after.hex()}",
                received=f"state {received}",
                hint="the log is damaged, or another charter's; take the whole log again",
            )
