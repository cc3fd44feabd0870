"""Flower's two apps: a server that runs a fleet's rounds over a grid, and a device that answers from its own rows.

Flower carries, authenticates and encrypts; what is in a message is the fleet's own (`messages`). A device needs nothing
from the server but the charter, which comes with the first message.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.apps import AdapterServer, reply_of, request_of
from ondevice.fleet.averaging.store import FILE_NAME as ADAPTERS
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.device import ask
from ondevice.fleet.rounds import OpenRound, Rounds
from ondevice.fleet.secure import collect, means_of
from ondevice.fleet.store import Store

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

log = logging.getLogger("ondevice.fleet")
RECORD = "fleet"
POLL_S = 0.2
EMPTY_ROUNDS = 3
"""A server ends after so many rounds without an answer: more would only make the log longer."""
server_app, client_app = ServerApp(), ClientApp()


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds of the fleet in `run_config["folder"]`."""
    settings = json.loads(str(context.run_config["settings"]))
    if (Path(settings["folder"]) / ADAPTERS).is_file():
        with AdapterStore.open(Path(settings["folder"])) as adapters:
            AdapterServer(grid, adapters, settings).run()
        return
    with Store.open(Path(settings["folder"])) as store:
        Server(grid, store, settings).run()


class Server:
    """A fleet's server over Flower's grid.

    Args:
        grid: reaches the devices.
        store: the fleet; every round is written before the next begins.
        settings: `rounds`, `least_devices`, `sample`, `wait_s`.
    """

    def __init__(self, grid: Grid, store: Store, settings: dict[str, Any]) -> None:
        self.grid, self.store, self.settings = grid, store, settings
        self.rounds = Rounds(store.charter, store.state())
        self.places: dict[int, int] = {}
        self.refused = 0

    def run(self) -> None:
        """Run every round that is missing, then ask each device for its hash."""
        empty = 0
        while self.rounds.next < self.settings["rounds"]:
            empty = 0 if self._round(self._devices()) else empty + 1
            if empty == EMPTY_ROUNDS:
                raise FleetError(f"no device has answered in {empty} rounds", hint="a device's own log says why")
        digest = self.rounds.state.digest()
        self._greet([node for node in self.grid.get_node_ids() if node not in self.places])
        replies = self._send({node: self._content(node, {}) for node in self.places})
        equal = {node: reply.get("digest") == digest for node, reply in replies.items()}
        self.store.set_fact("devices", json.dumps({str(node): same for node, same in sorted(equal.items())}))
        print(f"fleet: {digest.hex()}, {sum(equal.values())} of {len(equal)} devices have it", flush=True)

    def _devices(self) -> list[int]:
        """Wait until enough devices are here and say how far they are, and draw those that are asked."""
        until = time.monotonic() + self.settings["wait_s"]
        while True:
            nodes = sorted(self.grid.get_node_ids())
            self._greet([node for node in nodes if node not in self.places])
            known = [node for node in nodes if node in self.places]
            if len(known) >= self.settings["least_devices"]:
                break
            if time.monotonic() > until:
                raise FleetError(
                    "too few devices take part",
                    expected=self.settings["least_devices"],
                    received=f"{len(known)} of {len(nodes)} that are connected",
                    hint="a device's own log says why it does not",
                )
            time.sleep(POLL_S)
        draw = np.random.default_rng([self.store.charter.seed, 5, self.rounds.next])
        count = max(1, round(self.settings["sample"] * len(known)))
        return sorted(known[place] for place in draw.permutation(len(known))[:count])

    def _greet(self, nodes: list[int]) -> None:
        """Ask new devices how far they are; they get the charter."""
        charter = self.store.charter.to_bytes()
        for node, reply in self._send({node: {"charter": charter} for node in nodes}).items():
            if "place" in reply:
                self.places[node] = int(reply["place"])

    def _content(self, node: int, more: dict[str, Any]) -> dict[str, Any]:
        """What a device gets: the events that it lacks, and a task."""
        return {"events": self.store.events(self.places[node]), **more}

    def _send(self, contents: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Send to devices and return what they reply; those that do not are left out."""
        messages = [
            Message(content=RecordDict({RECORD: ConfigRecord(content)}), message_type="train", dst_node_id=node)
            for node, content in contents.items()
        ]
        replies = {}
        for reply in self.grid.send_and_receive(messages, timeout=self.settings["wait_s"]) if messages else []:
            node = reply.metadata.src_node_id
            if reply.has_error():
                log.warning("device %s: %s", node, reply.error.reason)
                continue
            record = dict(reply.content[RECORD])
            if "error" in record:
                log.warning("device %s: %s", node, record["error"])
                self.places.pop(node, None)  # it says again how far it is
            replies[node] = record
        return replies

    def _round(self, devices: list[int]) -> int:
        """Run one round; returns how many answers it had."""
        began = time.time()
        current = self.rounds.begin(devices)
        if self.store.charter.fleet.secure:
            return self._secure_round(current, began)
        contents = {node: self._content(node, {"task": current.tasks[node].to_bytes()}) for node in devices}
        place, sizes = self.store.count(), {}
        for node, reply in self._send(contents).items():
            if "answer" not in reply:
                continue
            self.places[node] = place
            try:
                self.rounds.receive(reply["answer"], node)
                sizes[node] = len(reply["answer"]) + len(current.tasks[node].to_bytes())
            except FleetError as error:
                self.refused += 1
                log.warning("device %s: answer refused: %s", node, error)
        loss, answers = current.loss, list(current.answers.values())
        outcome = self.rounds.close(current.number)
        sent = sum(size + len(outcome.to_bytes()) for size in sizes.values())
        self.store.add(
            outcome, self.rounds.state, answers=answers, refused=self.refused, loss=loss, sent_bytes=sent,
            time_s=time.time() - began,
        )  # fmt: skip
        shown = "no answers" if loss is None else f"loss {loss:.4f}"
        print(
            f"fleet: round {outcome.round + 1}/{self.settings['rounds']}  {shown}  {len(answers)} answers", flush=True
        )
        return len(answers)

    def _secure_round(self, current: OpenRound, began: float) -> int:
        """Run a round whose answers only their sum is known of; returns how many there were."""
        place, fleet, sent = self.store.count(), self.store.charter.fleet, 0

        def send(contents: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
            nonlocal sent
            tasks = {node: {"events": [], "task": current.tasks[node].to_bytes(), **content}
                     for node, content in contents.items()}  # fmt: skip
            replies = self._send(tasks)
            for record in (*contents.values(), *replies.values()):
                sent += sum(len(value) for value in record.values() if isinstance(value, bytes))
            self.places.update({node: place for node, reply in replies.items() if "error" not in reply})
            return replies

        means, loss, devices = None, None, []
        try:
            first = {node: {"events": self.store.events(self.places[node])} for node in current.tasks}
            total, devices = collect(send, first, self.store.charter.numbers + 2)
            means, loss = means_of(total, fleet)
        except FleetError as error:
            self.refused, devices = self.refused + 1, []
            log.warning("round %s: %s", current.number, error)
        outcome = self.rounds.close(current.number, means)
        sent += len(devices) * len(outcome.to_bytes())
        self.store.add(
            outcome, self.rounds.state, summed=len(devices), refused=self.refused, loss=loss, sent_bytes=sent,
            time_s=time.time() - began,
        )  # fmt: skip
        shown = "no sum" if loss is None else f"loss {loss:.4f}"
        print(f"fleet: round {outcome.round + 1}/{self.settings['rounds']}  {shown}  sum of {len(devices)}", flush=True)
        return len(devices)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answer a message of the server, through the process that holds the model (`device.Desk`).

    Flower starts a process for each message; it would load the model each time.
    """
    device = Path(str(context.node_config["device"]))
    if RECORD not in message.content:
        reply = ask(device, request_of(message.content), context.node_id)
        return Message(content=reply_of(reply), reply_to=message)
    reply = ask(device, dict(message.content[RECORD]), context.node_id)
    return Message(content=RecordDict({RECORD: ConfigRecord(reply)}), reply_to=message)
