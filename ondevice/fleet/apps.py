"""Runs a fleet's rounds over Flower's grid. The device's end is `client`.

Flower carries, authenticates and encrypts; the content of messages is the fleet's own (`messages`).
From the server a device needs only the charter, which comes with the first message."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
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
from ondevice.fleet.frozen import Frozen
from ondevice.fleet.post import POLL_S, Post
from ondevice.fleet.replies import Failed, Followed, Greeted, Replied, Reply, Subspace, reply_of
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


def run_rounds(grid: Grid, folder: Path, settings: dict[str, Any]) -> None:
    """Run the rounds of the fleet in `folder`."""
    if (folder / ADAPTERS).is_file():
        with AdapterStore.open(folder) as adapters:
            AdapterServer(grid, adapters, settings).run()
        return
    with Store.open(folder) as store:
        Server(grid, store, settings).run()


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
        settings: `rounds`, `least_devices`, `sample`, `wait_s`.
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
        self.barred: set[int] = set()
        """Devices whose lies spoiled a secure sum: they are not asked again while this server
        runs."""
        self.suspects = Suspects()
        if self.rounds.state.round and store.charter.fleet.open_rounds > 1:
            # Devices may have replied to rounds that were open when the last server ended. Each
            # replies to a round once, and these would begin from another state now.
            self.rounds.next += store.charter.fleet.open_rounds - 1

    def run(self) -> None:
        """Run every round that is missing, then ask each device for its hash."""
        empty = 0
        until = time.monotonic() + self.settings["wait_s"]
        while self.rounds.open or self.rounds.next < self.settings["rounds"]:
            self._greet()
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
                if number < 0 or any(asked.round == number for asked in self.asked.values()):
                    if number < 0 and time.monotonic() > until:
                        raise self._alone()
                    time.sleep(POLL_S)
                    continue
                answers = self._close(number)
            until = time.monotonic() + self.settings["wait_s"]
            empty = 0 if answers else empty + 1
            if empty == EMPTY_ROUNDS:
                raise FleetError(
                    f"no device has replied in {empty} rounds",
                    received=", ".join(
                        f"{code} {count} times" for code, count in self.failed.items()
                    )
                    or None,
                    hint="a device's own log says why",
                )
        self._last()

    def _last(self) -> None:
        """Send each device the events that it lacks, and ask for its hash."""
        digest = self.rounds.state.digest()
        charter = self.store.charter.to_bytes()
        new = [node for node in self.grid.get_node_ids() if node not in self.places]
        for node, reply in self._exchange({node: {"charter": charter} for node in new}).items():
            if isinstance(reply, Greeted):
                self.places[node] = reply.place
        replies = self._exchange({node: self._content(node, {}) for node in self.places})
        self._take()  # late replies are refused, and counted
        equal = {
            node: isinstance(reply, Followed) and reply.digest == digest
            for node, reply in replies.items()
        }
        self.store.set_fact("refused", json.dumps(self.refused))
        self.store.set_fact(
            "devices", json.dumps({str(node): same for node, same in sorted(equal.items())})
        )
        print(
            f"fleet: {digest.hex()}, {sum(equal.values())} of {len(equal)} devices have it",
            flush=True,
        )

    def _alone(self) -> FleetError:
        nodes = set(self.grid.get_node_ids())
        if self.store.charter.due(self.rounds.state) and not self.givers & nodes:
            return FleetError(
                "a new subspace is due, but no device computes one",
                expected="a device that computes gradients, of rows whose gradient all may know",
                hint="ondevice fleet device --gives-subspace",
            )
        return FleetError(
            "too few devices take part",
            expected=self.settings["least_devices"],
            received=f"{len(nodes & set(self.places))} of {len(nodes)} that are connected",
            hint="a device's own log says why it does not",
        )

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
        print(
            f"fleet: a new subspace of {len(file.data)} bytes before round {event.round + 1}",
            flush=True,
        )
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
            log.warning("device %s: %s", node, reply.error)
            self.places.pop(node, None)  # it says again how far it is
        else:
            self.new.discard(node)
        return reply

    def _refuse(self, node: int, code: Code) -> None:
        """Count a reply that is not taken."""
        self.refused[code] += 1
        log.warning("device %s: its reply is refused: %s", node, code)

    def _ask(self, current: OpenRound) -> None:
        """Send a round's tasks."""
        self.began[current.number], self.sizes[current.number] = time.time(), []
        place = self.store.count()
        tasks = {node: task.to_bytes() for node, task in current.tasks.items()}
        self._send({node: self._content(node, {"task": task}) for node, task in tasks.items()})
        self.asked.update({node: Asked(current.number, place) for node, task in tasks.items()})

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
        shown = "no replies"
        if loss is not None:
            shown = f"loss {loss:.4f}"
        print(
            f"fleet: round {outcome.round + 1}/{self.settings['rounds']}  {shown}  {len(answers)} replies",
            flush=True,
        )
        return len(answers)

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
            self.refused[error.code if isinstance(error, Refusal) else Code.UNSAFE] += 1
            log.warning("round %s: %s", current.number, error)
        outcome = self.rounds.close(current.number, means)
        sent += len(devices) * len(outcome.to_bytes())
        self.store.add(
            outcome, self.rounds.state, summed=len(devices), refused=self.refused.total(), loss=loss, sent_bytes=sent,
            time_s=time.time() - began,
        )  # fmt: skip
        shown = "no sum"
        if loss is not None:
            shown = f"loss {loss:.4f}"
        print(
            f"fleet: round {outcome.round + 1}/{self.settings['rounds']}  {shown}  sum of {len(devices)}",
            flush=True,
        )
        return len(devices) + narrowed
