"""Runs a fleet's rounds over Flower's grid. The device's end is `client`.

Flower carries, authenticates and encrypts; the content of messages is the fleet's own (`messages`).
From the server a device needs only the charter, which comes with the first message."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.apps import AdapterServer
from ondevice.fleet.averaging.store import FILE_NAME as ADAPTERS
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.codes import Code, Refusal, refusing
from ondevice.fleet.devices import Devices
from ondevice.fleet.failures import Patience, say, shown
from ondevice.fleet.frozen import Frozen
from ondevice.fleet.post import POLL_S, RETURN_S, Post
from ondevice.fleet.replies import Failed, Followed, Greeted, Replied, Subspace
from ondevice.fleet.returns import Arrived, ReturningPost
from ondevice.fleet.rounds import OpenRound, Rounds
from ondevice.fleet.secure_round import SecureRounds
from ondevice.fleet.store import Store

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("ondevice.fleet")
EMPTY_ROUNDS = 3
"""A server ends after so many rounds without a reply: more would only make the log longer."""
LAST_TRIES = 3
"""Times that a device is asked for its hash after the last round."""


def run_rounds(
    grid: Grid, folder: Path, settings: dict[str, Any], arrived: Arrived
) -> dict[int, dict[str, int]]:
    """Run the rounds of the fleet in `folder`; return those that failed, with the reasons.

    Args:
        arrived: see `ReturningPost`.
    """
    post = ReturningPost(grid, settings["wait_s"], arrived)
    if (folder / ADAPTERS).is_file():
        with AdapterStore.open(folder) as adapters:
            averaging = AdapterServer(grid, adapters, settings, post)
            averaging.run()
            return averaging.failures.own
    with Store.open(folder) as store:
        server = Server(grid, store, settings, post)
        server.run()
        return server.devices.failures.own


@dataclass(frozen=True)
class Asked:
    """A task that a device has: its round, and the number of events that the device had with it."""

    round: int
    place: int


class Server:
    """A fleet's server over Flower's grid.

    A round ends when each device that it asked has replied, or after `wait_s`. If the charter
    allows several at once, the next one begins as soon as most devices of the newest have replied,
    without the others. They end in the order in which they began.

    Args:
        grid: reaches the devices.
        store: the fleet; every round is written when it ends.
        settings: `rounds`, `least_devices`, `sample`, `wait_s`; `end`: tell the devices after the
            last round that the fleet is over.
        post: over `grid`; a simulation may have its own.
    """

    def __init__(
        self, grid: Grid, store: Store, settings: dict[str, Any], post: Post | None = None
    ) -> None:
        if store.charter.fleet.secure and not store.charter.device_keys:
            raise FleetError(
                "this secure fleet was begun without its devices' keys, so no device would trust another's",
                hint="begin a new one: ondevice fleet begin --device-keys DIR",
            )
        self.store = store
        self.settings = settings
        self.post = post or Post(grid, settings["wait_s"])
        self.devices = Devices(grid, store, self.post)
        self.rounds = Rounds(store.charter, store.state())
        self.secure = SecureRounds(self.devices, store, self.rounds)
        self.asked: dict[int, Asked] = {}
        self.began: dict[int, float] = {}
        self.sizes: dict[int, list[int]] = {}
        self.patience = Patience(settings["wait_s"], settings.get("least_devices", 1))
        self.expected: dict[int, set[int]] = {}
        """Devices with a task of a round that an earlier server opened; they are asked again."""
        if self.rounds.state.round and store.charter.fleet.open_rounds > 1:
            # Devices may have replied to rounds that were open when the last server ended. Each
            # replies to a round once, and these would begin from another state now.
            self.rounds.next += store.charter.fleet.open_rounds - 1
        self._reopen()

    @property
    def _restarts(self) -> bool:
        """Whether a restarted server goes on in an open round: only if it is the only one, and
        no secure sum, whose secrets are in the devices' memory."""
        fleet = self.store.charter.fleet
        return fleet.open_rounds == 1 and not fleet.secure

    def _reopen(self) -> None:
        """Open the round again in which an earlier server ended, with the same tasks: a device
        replies to one task of a round only, with the same bytes however often it is asked."""
        for number, begin, tasks in self.store.asked():
            if self._restarts and (number, begin) == (self.rounds.next, self.rounds.state.hash):
                answers = {answer.device: answer for answer in self.store.answers(number)}
                self.rounds.open[number] = OpenRound(number, begin, tasks, answers)
                self.rounds.next += 1
                self.expected[number] = set(tasks) - set(answers)
                self.began[number] = time.time()
                self.sizes[number] = []
                say(f"round {number + 1} goes on: {len(tasks)} devices had been asked")

    def _ask_again(self) -> None:
        """Send the tasks of a reopened round to devices that have come back."""
        for number, nodes in self.expected.items():
            free = nodes & self.devices.free
            nodes -= free
            self._send_tasks(number, free)

    def _is_forsaken(self, number: int) -> bool:
        """Return True if a round has no reply, and no device is here: it stays open for a server
        that has devices."""
        return not self.rounds.open[number].answers and not self.devices.here

    def _is_awaited(self, number: int) -> bool:
        """Return True if a device of this round may still reply."""
        if any(asked.round == number for asked in self.asked.values()):
            return True
        wait_s = self.settings["wait_s"]
        if self.rounds.open[number].answers:
            wait_s = min(wait_s, RETURN_S)
        return bool(self.expected.get(number)) and not time.time() > self.began[number] + wait_s

    def run(self) -> None:
        """Run every round that is missing, then ask each device for its hash."""
        empty = 0
        while self.rounds.open or self.rounds.next < self.settings["rounds"]:
            self.devices.greet()
            self._ask_again()
            if devices := self._ready():
                current = self.rounds.begin(devices)
                if self.store.charter.fleet.secure:
                    answers = self._sum(current)
                else:
                    self._ask(current)
                    continue
            else:
                self._take()
                number = min(self.rounds.open, default=-1)
                if number < 0 or self._is_forsaken(number):
                    self.patience.wait(self.devices.here)
                    if self.patience.is_over:
                        raise self._alone()
                    time.sleep(POLL_S)
                    continue
                if self._is_awaited(number):
                    time.sleep(POLL_S)
                    continue
                answers = self._close(number)
            self.patience.renew()
            empty = 0 if answers else empty + 1
            if empty == EMPTY_ROUNDS:
                raise FleetError(
                    f"no device has replied in {empty} rounds",
                    received=shown(self.devices.failed) or None,
                    hint="a device's own log says why",
                )
        self._last()

    def _last(self) -> None:
        """Send each device the events that it lacks, and ask for its hash.

        A device that is away for a moment is waited for, if too few have replied without it.

        Raises:
            FleetError: too few devices have replied.
        """
        digest = self.rounds.state.digest()
        more = {}
        if self.settings.get("end"):
            more = {"over": True}
        equal: dict[int, bool] = {}
        tries: Counter[int] = Counter()
        self.patience.renew()
        while True:
            here = self.devices.here
            missing = {
                n for n in (here | set(self.devices.places)) - set(equal) if tries[n] < LAST_TRIES
            }
            tries.update(missing)
            new = missing - set(self.devices.places) - self.post.busy
            greeting = {"charter": self.store.charter.to_bytes()}
            for node, reply in self.devices.exchange(dict.fromkeys(new, greeting)).items():
                if isinstance(reply, Greeted):
                    self.devices.places[node] = reply.place
            asked = (missing & set(self.devices.places)) - self.post.busy
            replies = self.devices.exchange(
                {node: self.devices.content(node, more) for node in asked}
            )
            for node, reply in replies.items():
                if not isinstance(reply, Failed):
                    equal[node] = isinstance(reply, Followed) and reply.digest == digest
            self._take()  # late replies are refused, and counted
            here = self.devices.here
            left = {node for node in here - set(equal) if tries[node] < LAST_TRIES}
            if self.patience.is_over or (len(equal) >= self.patience.least and not left):
                break
            self.patience.wait(here)
            time.sleep(POLL_S)
        self.store.set_fact("refused", json.dumps(self.devices.refused))
        self.store.set_fact(
            "devices", json.dumps({str(node): same for node, same in sorted(equal.items())})
        )
        say(f"{digest.hex()}, {sum(equal.values())} of {len(equal)} devices have it")
        if len(equal) < self.patience.least:
            raise self.patience.gave_up(len(here), len(equal))

    def _alone(self) -> FleetError:
        nodes = self.devices.here
        if self.store.charter.due(self.rounds.state) and not self.devices.givers & nodes:
            return FleetError(
                "a new subspace is due, but no device computes one",
                expected="a device that computes gradients, of rows whose gradient all may know",
                hint="ondevice fleet device --gives-subspace",
            )
        return self.patience.gave_up(len(nodes), len(nodes & set(self.devices.places)))

    def _ready(self) -> list[int]:
        """Draw the devices of the next round; empty if it is not yet time for one."""
        number = self.rounds.next
        open_rounds = self.rounds.open
        if (
            number >= self.settings["rounds"]
            or len(open_rounds) >= self.store.charter.fleet.open_rounds
        ):
            return []
        if open_rounds:
            newest = open_rounds[max(open_rounds)]
            if 2 * len(newest.answers) <= len(newest.tasks):
                return []
        known = sorted((self.devices.here & set(self.devices.places)) - self.devices.barred)
        free = set(known) - self.post.busy
        if len(free) < self.settings["least_devices"]:
            return []
        if self.store.charter.due(self.rounds.state) and not self._refresh(free):
            return []
        draw = np.random.default_rng([self.store.charter.seed, 5, number])
        count = max(1, round(self.settings["sample"] * len(known)))
        drawn = [known[place] for place in draw.permutation(len(known))]
        chosen = [node for node in drawn if node in free][:count]
        if self.secure.suspects.devices:
            return self.secure.suspects.asked(chosen, draw)
        return sorted(chosen)

    def _refresh(self, free: set[int]) -> bool:
        """Take a new subspace from a device that gives one, if there is one and no round is
        open."""
        givers = sorted(self.devices.givers & free)
        if not givers or self.rounds.open:
            return False
        began = time.time()
        node = givers[
            int(
                np.random.default_rng([self.store.charter.seed, 9, self.rounds.next]).integers(
                    len(givers)
                )
            )
        ]
        reply = self.devices.exchange({node: self.devices.content(node, {"subspace": True})}).get(
            node
        )
        try:
            with refusing(Code.MALFORMED):
                file = Frozen.from_bytes(reply.frozen if isinstance(reply, Subspace) else b"")
                file.check()
        except Refusal as error:
            self.devices.refuse(node, error.code)
            self.devices.places.pop(node, None)
            self.devices.givers.discard(node)
            return False
        self.devices.places[node] = self.store.count()
        sent = len(file.data) * (1 + len(self.devices.places))
        event = self.rounds.refresh(file.digest)
        self.store.add(
            event, self.rounds.state, frozen=file, sent_bytes=sent, time_s=time.time() - began
        )
        say(f"a new subspace of {len(file.data)} bytes before round {event.round + 1}")
        return True

    def _ask(self, current: OpenRound) -> None:
        """Send a round's tasks; they are on the disk before, for a server that goes on in it."""
        self.began[current.number] = time.time()
        self.sizes[current.number] = []
        if self._restarts:
            self.store.ask(current.begin, current.tasks, self.store.count())
        self._send_tasks(current.number, current.tasks)

    def _send_tasks(self, number: int, nodes: Iterable[int]) -> None:
        place = self.store.count()
        tasks = {node: self.rounds.open[number].tasks[node].to_bytes() for node in nodes}
        self.devices.send(
            {node: self.devices.content(node, {"task": task}) for node, task in tasks.items()}
        )
        self.asked.update(dict.fromkeys(tasks, Asked(number, place)))

    def _take(self) -> None:
        """Take what devices have replied."""
        for sent, reply in self.post.take():
            # of a late reply the wait was over before
            node = sent.node
            late = sent.overdue
            asked = None
            if not late:
                asked = self.asked.pop(node, None)
            taken = self.devices.reply(node, reply)
            if isinstance(taken, Greeted) and asked is None:
                self.devices.places[node] = taken.place
                if taken.gives_subspace:
                    self.devices.givers.add(node)
            elif asked is not None and not isinstance(taken, Replied | Failed | None):
                self.devices.refuse(node, Code.MALFORMED)
            if not isinstance(taken, Replied):
                continue
            if asked is not None:
                self.devices.places[node] = asked.place
            try:
                answer = self.rounds.receive(taken.answer, node)
                task = self.rounds.open[answer.round].tasks[node]
                self.sizes[answer.round].append(len(taken.answer) + len(task.to_bytes()))
            except Refusal as error:
                self.devices.refuse(node, error.code)

    def _close(self, number: int) -> int:
        """End a round; return the number of its replies."""
        current = self.rounds.open[number]
        loss = current.loss
        answers = list(current.answers.values())
        outcome = self.rounds.close(number)
        sent = sum(size + len(outcome.to_bytes()) for size in self.sizes.pop(number))
        self.store.add(
            outcome, self.rounds.state, answers=answers, refused=self.devices.refused.total(),
            loss=loss, sent_bytes=sent, time_s=time.time() - self.began.pop(number),
        )  # fmt: skip
        self.expected.pop(number, None)
        self._say_round(outcome.round, loss, len(answers), len(current.tasks))
        return len(answers)

    def _say_round(self, number: int, loss: float | None, replies: int, asked: int) -> None:
        line = self.devices.failures.close(number, replies, asked)
        if loss is not None:
            line = f"loss {loss:.4f}  {line}"
        say(f"round {number + 1}/{self.settings['rounds']}  {line}")

    def _sum(self, current: OpenRound) -> int:
        """Run a secure round; return 0 if it was good for nothing."""
        summed = self.secure.run(current)
        self._say_round(current.number, summed.loss, summed.replies, len(current.tasks))
        return summed.worth
