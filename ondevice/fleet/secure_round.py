"""A round of which a server learns the sum of the replies only, and who spoils such sums."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from ondevice.core.errors import FleetError
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.devices import Devices
from ondevice.fleet.replies import Failed, Reply
from ondevice.fleet.rounds import OpenRound, Rounds
from ondevice.fleet.secure import LEAST, means_of
from ondevice.fleet.store import Store
from ondevice.fleet.sums import SecureSum

log = logging.getLogger("ondevice.fleet")


@dataclass(frozen=True)
class Summed:
    """How a secure round ended. `worth` is 0 if it has neither a sum nor news of who spoils sums."""

    loss: float | None
    replies: int
    worth: int


class SecureRounds:
    """Runs secure rounds, and narrows down who spoils them."""

    def __init__(self, devices: Devices, store: Store, rounds: Rounds) -> None:
        self.devices = devices
        self.store = store
        self.rounds = rounds
        self.suspects = Suspects()

    def _saw(self, summed: list[int], plausible: bool) -> None:
        """Learn from a secure sum which device spoils them."""
        liar = self.suspects.saw(summed, plausible)
        if liar is not None:
            self.devices.bar(liar, Code.NUMBERS)

    def run(self, current: OpenRound) -> Summed:
        """Run a round of which only the sum of the replies is known."""
        began = time.time()
        place = self.store.count()
        fleet = self.store.charter.fleet
        sent = 0

        task = next(
            iter(current.tasks.values())
        ).to_bytes()  # one for all, because they share their seeds

        def send(contents: dict[int, dict[str, Any]]) -> dict[int, Reply]:
            nonlocal sent
            requests = {
                node: {"events": [], "task": task, **content} for node, content in contents.items()
            }
            replies = self.devices.exchange(requests)
            for record in (*contents.values(), *(reply.model_dump() for reply in replies.values())):
                sent += sum(len(value) for value in record.values() if isinstance(value, bytes))
            self.devices.places.update(
                {node: place for node, reply in replies.items() if not isinstance(reply, Failed)}
            )
            return replies

        means = None
        loss = None
        summed = []
        narrowed = False
        try:
            first = {node: self.devices.content(node, {}) for node in current.tasks}
            sums = SecureSum(send, task, self.store.charter.device_keys, self.devices.bar)
            total, summed = sums.collect(first, self.store.charter.numbers + 2)
            means, loss = means_of(total, fleet, len(summed))
            self._saw(summed, plausible=True)
        except FleetError as error:
            if summed:  # there was a sum, but not one of honest devices
                before = len(self.suspects.devices) or len(summed) + 1
                self._saw(summed, plausible=False)
                narrowed = len(self.suspects.devices) < before
            summed = []
            code = error.code if isinstance(error, Refusal) else Code.UNSAFE
            self.devices.refused[code] += 1
            self.devices.failures.note(code)
            log.warning("round %s: %s", current.number, error)
        outcome = self.rounds.close(current.number, means)
        sent += len(summed) * len(outcome.to_bytes())
        self.store.add(
            outcome, self.rounds.state, summed=len(summed), refused=self.devices.refused.total(),
            loss=loss, sent_bytes=sent, time_s=time.time() - began,
        )  # fmt: skip
        return Summed(loss, len(summed), len(summed) + narrowed)


class Suspects:
    """The devices among which a liar is; none while all sums are plausible.

    A liar among n devices costs some log2(n) rounds. Two devices have no sum, so a fleet of three
    finds nobody."""

    def __init__(self) -> None:
        self.devices: frozenset[int] = frozenset()

    def asked(self, devices: Collection[int], draw: np.random.Generator) -> list[int]:
        """Return which of the devices a round should ask: while there are suspects, without half of
        them."""
        suspects = sorted(self.devices & set(devices))
        half = [
            suspects[place] for place in draw.permutation(len(suspects))[: -(-len(suspects) // 2)]
        ]
        most = max(0, len(devices) - LEAST)
        return sorted(set(devices) - set(half[:most]))

    def saw(self, devices: Collection[int], plausible: bool) -> int | None:
        """Learn from a sum; returns the liar, once it is known."""
        inside = set(devices)
        if plausible:
            self.devices -= inside
        else:
            self.devices = self.devices & inside or frozenset(inside)
        if len(self.devices) != 1:
            return None
        (liar,) = self.devices
        self.devices = frozenset()
        return liar
