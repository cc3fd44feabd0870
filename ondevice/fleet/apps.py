"""Runs a fleet's rounds over Flower's grid. The device's end is `client`.

Flower carries, authenticates and encrypts; the content of messages is the fleet's own (`messages`).
From the server a device needs only the charter, which comes with the first message."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.apps import AdapterServer
from ondevice.fleet.averaging.store import FILE_NAME as ADAPTERS
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.client import RECORD
from ondevice.fleet.codes import Code, Refusal, refusing
from ondevice.fleet.failures import Failures, Patience, say, shown
from ondevice.fleet.frozen import Frozen
from ondevice.fleet.post import POLL_S, RETURN_S, Post
from ondevice.fleet.replies import Failed, Followed, Greeted, Replied, Reply, Subspace, reply_of
from ondevice.fleet.returns import Arrived, ReturningPost
from ondevice.fleet.rounds import OpenRound, Rounds
from ondevice.fleet.secure import means_of
from ondevice.fleet.store import Store
from ondevice.fleet.sums import SecureSum
from ondevice.fleet.suspects import Suspects

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("ondevice.fleet")
GREET_S = 10.0
"""A device that could not report its progress is asked again after so long."""
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
    server: AdapterServer | Server
    if (folder / ADAPTERS).is_file():
        with AdapterStore.open(folder) as adapters:
            server = AdapterServer(grid, adapters, settings, post)
            server.run()
    else:
        with Store.open(folder) as store:
            server = Server(grid, store, settings, post)
            server.run()
    return server.failures.own


@dataclass(frozen=True)
class Asked:
    """A task that a device has: its round, and the number of events that the device had with it."""

    round: int
    place: int


def record_of(message: Message) -> Any:
    """Return the content of a device's message.

    Raises:
        Refusal: it has no content of a fleet.
    """
    try:
        return dict(message.content[RECORD])  # type: ignore[arg-type]
    except Exception:
        raise Refusal(Code.MALFORMED, "the message has no record of a fleet") from None


def _messages(contents: dict[int, dict[str, Any]]) -> list[Message]:
    return [
        Message(
            content=RecordDict({RECORD: ConfigRecord(content)}),
            message_type="train",
            dst_node_id=node,
        )
        for node, content in contents.items()
    ]


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
        self.grid = grid
        self.store = store
        self.settings = settings
        self.post = post or Post(grid, settings["wait_s"])
        self.rounds = Rounds(store.charter, store.state())
        self.places: dict[int, int] = {}
        self.asked: dict[int, Asked] = {}
        self.began: dict[int, float] = {}
        self.sizes: dict[int, list[int]] = {}
        self.greeted: dict[int, float] = {}
        self.new: set[int] = set()
        self.givers: set[int] = set()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.failures = Failures(store)
        self.patience = Patience(settings["wait_s"], settings.get("least_devices", 1))
        self.expected: dict[int, set[int]] = {}
        """Devices with a task of a round that an earlier server opened; they are asked again."""
        self.barred: set[int] = set()
        """Devices whose lies spoiled a secure sum: they are not asked again while this server
        runs."""
        self.suspects = Suspects()
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
            free = nodes & set(self.grid.get_node_ids()) & set(self.places) - self.post.busy
            nodes -= free
            self._send_tasks(number, free)

    def _is_forsaken(self, number: int) -> bool:
        """Return True if a round has no reply, and no device is here: it stays open for a server
        that has devices."""
        return not self.rounds.open[number].answers and not list(self.grid.get_node_ids())

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
            self._greet()
            self._ask_again()
            if devices := self._ready():
                current = self.rounds.begin(devices)
                if self.store.charter.fleet.secure:
                    answers = self._secure_round(current, time.time())
                else:
                    self._ask(current)
                    continue
            else:
                self._take()
                number = min(self.rounds.open, default=-1)
                if number < 0 or self._is_forsaken(number):
                    self.patience.wait(self.grid.get_node_ids())
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
                    received=shown(self.failed) or None,
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
            here = set(self.grid.get_node_ids())
            missing = {n for n in (here | set(self.places)) - set(equal) if tries[n] < LAST_TRIES}
            tries.update(missing)
            new = missing - set(self.places) - self.post.busy
            greeting = {"charter": self.store.charter.to_bytes()}
            for node, reply in self._exchange(dict.fromkeys(new, greeting)).items():
                if isinstance(reply, Greeted):
                    self.places[node] = reply.place
            asked = (missing & set(self.places)) - self.post.busy
            replies = self._exchange({node: self._content(node, more) for node in asked})
            for node, reply in replies.items():
                if not isinstance(reply, Failed):
                    equal[node] = isinstance(reply, Followed) and reply.digest == digest
            self._take()  # late replies are refused, and counted
            here = set(self.grid.get_node_ids())
            left = {node for node in here - set(equal) if tries[node] < LAST_TRIES}
            if self.patience.is_over or (len(equal) >= self.patience.least and not left):
                break
            self.patience.wait(here)
            time.sleep(POLL_S)
        self.store.set_fact("refused", json.dumps(self.refused))
        self.store.set_fact(
            "devices", json.dumps({str(node): same for node, same in sorted(equal.items())})
        )
        say(f"{digest.hex()}, {sum(equal.values())} of {len(equal)} devices have it")
        if len(equal) < self.patience.least:
            raise self.patience.gave_up(len(here), len(equal))

    def _alone(self) -> FleetError:
        nodes = set(self.grid.get_node_ids())
        if self.store.charter.due(self.rounds.state) and not self.givers & nodes:
            return FleetError(
                "a new subspace is due, but no device computes one",
                expected="a device that computes gradients, of rows whose gradient all may know",
                hint="ondevice fleet device --gives-subspace",
            )
        return self.patience.gave_up(len(nodes), len(nodes & set(self.places)))

    def _greet(self) -> None:
        """Ask new devices for their progress and send the charter; before the first round it comes
        with their task. A device that fails is asked again later."""
        now = time.monotonic()
        busy = self.post.busy
        new = [
            node
            for node in self.grid.get_node_ids()
            if node not in self.places
            and node not in busy
            and now >= self.greeted.get(node, -math.inf) + GREET_S
        ]
        self.greeted.update(dict.fromkeys(new, now))
        if (
            not self.store.count() and self.store.charter.subspace == "seed"
        ):  # they cannot lack anything
            self.places.update(dict.fromkeys(new, 0))
            self.new.update(new)
            return
        self._send({node: {"charter": self.store.charter.to_bytes()} for node in new})

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
        known = sorted((set(self.grid.get_node_ids()) & set(self.places)) - self.barred)
        free = set(known) - self.post.busy
        if len(free) < self.settings["least_devices"]:
            return []
        if self.store.charter.due(self.rounds.state) and not self._refresh(free):
            return []
        draw = np.random.default_rng([self.store.charter.seed, 5, number])
        count = max(1, round(self.settings["sample"] * len(known)))
        drawn = [known[place] for place in draw.permutation(len(known))]
        chosen = [node for node in drawn if node in free][:count]
        if self.suspects.devices:
            return self.suspects.asked(chosen, draw)
        return sorted(chosen)

    def _refresh(self, free: set[int]) -> bool:
        """Take a new subspace from a device that gives one, if there is one and no round is
        open."""
        givers = sorted(self.givers & free)
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
        reply = self._exchange({node: self._content(node, {"subspace": True})}).get(node)
        try:
            with refusing(Code.MALFORMED):
                file = Frozen.from_bytes(reply.frozen if isinstance(reply, Subspace) else b"")
                file.check()
        except Refusal as error:
            self._refuse(node, error.code)
            self.places.pop(node, None)
            self.givers.discard(node)
            return False
        self.places[node] = self.store.count()
        sent = len(file.data) * (1 + len(self.places))
        event = self.rounds.refresh(file.digest)
        self.store.add(
            event, self.rounds.state, frozen=file, sent_bytes=sent, time_s=time.time() - began
        )
        say(f"a new subspace of {len(file.data)} bytes before round {event.round + 1}")
        return True

    def _content(self, node: int, more: dict[str, Any]) -> dict[str, Any]:
        """Return a device's message: the events that it lacks, and a task."""
        place = self.places[node]
        files = [file.to_bytes() for file in self.store.files(place)]
        first = {}
        if node in self.new:
            first = {"charter": self.store.charter.to_bytes()}
        return {
            **first,
            "events": self.store.events(place),
            **({"frozen": files} if files else {}),
            **more,
        }

    def _send(self, contents: dict[int, dict[str, Any]]) -> None:
        self.post.send(_messages(contents))

    def _exchange(self, contents: dict[int, dict[str, Any]]) -> dict[int, Reply]:
        """Send to devices, wait, and return what they reply; those that do not are left out."""
        found = {}
        for node, reply in self.post.exchange(_messages(contents)):
            taken = self._reply(node, reply)
            if taken is not None:
                found[node] = taken
        return found

    def _reply(self, node: int, message: Message | None) -> Reply | None:
        """Return a device's reply; None without a usable one."""
        if message is None:
            return None
        if message.has_error():
            log.warning("device %s: Flower could not ask it", node)
            self.failures.note("no_connection")
            return None
        try:
            reply = reply_of(record_of(message))
            if isinstance(reply, Greeted | Followed) and reply.place > self.store.count():
                raise Refusal(Code.MALFORMED, "a device has more events than there are")
        except Refusal as error:
            self._refuse(node, error.code)
            self.places.pop(node, None)
            return None
        if isinstance(reply, Failed):
            self.failed[reply.error] += 1
            self.failures.note(reply.error)
            log.warning("device %s: %s", node, reply.error)
            self.places.pop(node, None)  # it says again how far it is
        else:
            self.new.discard(node)
        return reply

    def _refuse(self, node: int, code: Code) -> None:
        """Count a reply that is not taken."""
        self.refused[code] += 1
        self.failures.note(code)
        log.warning("device %s: its reply is refused: %s", node, code)

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
        self._send({node: self._content(node, {"task": task}) for node, task in tasks.items()})
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
            taken = self._reply(node, reply)
            if isinstance(taken, Greeted) and asked is None:
                self.places[node] = taken.place
                if taken.gives_subspace:
                    self.givers.add(node)
            elif asked is not None and not isinstance(taken, Replied | Failed | None):
                self._refuse(node, Code.MALFORMED)
            if not isinstance(taken, Replied):
                continue
            if asked is not None:
                self.places[node] = asked.place
            try:
                answer = self.rounds.receive(taken.answer, node)
                task = self.rounds.open[answer.round].tasks[node]
                self.sizes[answer.round].append(len(taken.answer) + len(task.to_bytes()))
            except Refusal as error:
                self._refuse(node, error.code)

    def _close(self, number: int) -> int:
        """End a round; return the number of its replies."""
        current = self.rounds.open[number]
        loss = current.loss
        answers = list(current.answers.values())
        outcome = self.rounds.close(number)
        sent = sum(size + len(outcome.to_bytes()) for size in self.sizes.pop(number))
        self.store.add(
            outcome, self.rounds.state, answers=answers, refused=self.refused.total(), loss=loss, sent_bytes=sent,
            time_s=time.time() - self.began.pop(number),
        )  # fmt: skip
        self.expected.pop(number, None)
        self._say_round(outcome.round, loss, len(answers), len(current.tasks))
        return len(answers)

    def _say_round(self, number: int, loss: float | None, replies: int, asked: int) -> None:
        line = self.failures.close(number, replies, asked)
        if loss is not None:
            line = f"loss {loss:.4f}  {line}"
        say(f"round {number + 1}/{self.settings['rounds']}  {line}")

    def _saw(self, devices: list[int], plausible: bool) -> None:
        """Learn from a secure sum which device spoils them."""
        liar = self.suspects.saw(devices, plausible)
        if liar is not None:
            self.barred.add(liar)
            self._refuse(liar, Code.NUMBERS)

    def _secure_round(self, current: OpenRound, began: float) -> int:
        """Run a round of which only the sum of the replies is known; return 0 if it failed."""
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
            replies = self._exchange(requests)
            for record in (*contents.values(), *(reply.model_dump() for reply in replies.values())):
                sent += sum(len(value) for value in record.values() if isinstance(value, bytes))
            self.places.update(
                {node: place for node, reply in replies.items() if not isinstance(reply, Failed)}
            )
            return replies

        def blame(node: int, code: Code) -> None:
            self.barred.add(node)
            self._refuse(node, code)

        means = None
        loss = None
        devices = []
        narrowed = False
        try:
            first = {node: self._content(node, {}) for node in current.tasks}
            sums = SecureSum(send, task, self.store.charter.device_keys, blame)
            total, devices = sums.collect(first, self.store.charter.numbers + 2)
            means, loss = means_of(total, fleet, len(devices))
            self._saw(devices, plausible=True)
        except FleetError as error:
            if devices:  # there was a sum, but not one of honest devices
                before = len(self.suspects.devices) or len(devices) + 1
                self._saw(devices, plausible=False)
                narrowed = len(self.suspects.devices) < before
            devices = []
            code = error.code if isinstance(error, Refusal) else Code.UNSAFE
            self.refused[code] += 1
            self.failures.note(code)
            log.warning("round %s: %s", current.number, error)
        outcome = self.rounds.close(current.number, means)
        sent += len(devices) * len(outcome.to_bytes())
        self.store.add(
            outcome, self.rounds.state, summed=len(devices), refused=self.refused.total(), loss=loss, sent_bytes=sent,
            time_s=time.time() - began,
        )  # fmt: skip
        self._say_round(outcome.round, loss, len(devices), len(current.tasks))
        return len(devices) + narrowed
