"""The server of a first-order fleet over Flower: Flower's strategies sample and average, the store keeps rounds."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import strategy as flower

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.arrays import digest, to_bytes
from ondevice.fleet.averaging.charter import Averaging
from ondevice.fleet.averaging.records import ARRAYS, CONFIG, arrays_of, record_of
from ondevice.fleet.averaging.rules import ADAPTIVE, Arrays, check_alike
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.post import POLL_S, Post

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("ondevice.fleet")
EMPTY_ROUNDS = 3
"""A server ends after so many rounds without an answer."""


def strategy_of(config: Averaging, sample: float, least_devices: int) -> Any:
    """Return Flower's strategy for a charter; devices evaluate nothing."""
    shared = {
        "fraction_train": sample, "fraction_evaluate": 0.0, "min_train_nodes": 1, "min_evaluate_nodes": 0,
        "min_available_nodes": least_devices,
    }  # fmt: skip
    rate = {"eta": config.server_rate, "tau": config.tau}
    betas = {"beta_1": config.beta_1, "beta_2": config.beta_2}
    kinds: dict[str, tuple[Any, dict[str, float]]] = {
        "fedavg": (flower.FedAvg, {}),
        "fedadam": (flower.FedAdam, rate | betas),
        "fedyogi": (flower.FedYogi, rate | betas),
        "fedadagrad": (flower.FedAdagrad, rate),
        "fedmedian": (flower.FedMedian, {}),
        "fedtrimmedavg": (flower.FedTrimmedAvg, {"beta": config.trim}),
    }
    kind, more = kinds[config.strategy]
    return kind(**shared, **more)


class AdapterServer:
    """A first-order fleet's server over Flower's grid.

    Args:
        grid: reaches the devices.
        store: the fleet; every round is written before the next begins.
        settings: `rounds`, `least_devices`, `sample`, `wait_s`.
    """

    def __init__(self, grid: Grid, store: AdapterStore, settings: dict[str, Any]) -> None:
        self.grid, self.store, self.settings = grid, store, settings
        self.post = Post(grid, settings["wait_s"])
        averaging = store.charter.averaging
        self.strategy = strategy_of(averaging, settings["sample"], settings["least_devices"])
        if averaging.strategy in ADAPTIVE:
            first, second = store.moments()
            self.strategy.m_t, self.strategy.v_t = first or None, second or None
        self.refused = 0

    def run(self) -> None:
        """Run every round that is missing, then give each device the adapter and ask for its hash."""
        arrays, empty = self.store.tensors(), 0
        while self.store.count() < self.settings["rounds"]:
            self._wait()
            arrays, answers = self._round(self.store.count(), arrays)
            empty = 0 if answers else empty + 1
            if empty == EMPTY_ROUNDS:
                raise FleetError(f"no device has answered in {empty} rounds", hint="a device's own log says why")
        expected, equal = digest(arrays), {}
        content = RecordDict({ARRAYS: record_of(arrays), CONFIG: self._config(last=True)})
        messages = [Message(content=content, message_type="train", dst_node_id=node) for node in self._nodes()]
        for node, reply in self.post.exchange(messages):
            said = {} if reply.has_error() else dict(reply.content.get(CONFIG, {}))
            equal[str(node)] = said.get("digest") == expected
        self.store.set_fact("devices", json.dumps(dict(sorted(equal.items()))))
        print(f"fleet: {expected}, {sum(equal.values())} of {len(equal)} devices have it", flush=True)

    def _nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def _wait(self) -> None:
        until = time.monotonic() + self.settings["wait_s"]
        while len(self._nodes()) < self.settings["least_devices"]:
            if time.monotonic() > until:
                raise FleetError(
                    "too few devices take part", expected=self.settings["least_devices"], received=len(self._nodes())
                )
            time.sleep(POLL_S)

    def _config(self, last: bool = False) -> ConfigRecord:
        return ConfigRecord({"charter": self.store.charter.to_bytes(), "last": last})

    def _round(self, number: int, arrays: Arrays) -> tuple[Arrays, int]:
        """Run one round; returns the adapter after it and how many answers it had."""
        began = time.time()
        messages = list(self.strategy.configure_train(number + 1, record_of(arrays), self._config(), self.grid))
        down = len(to_bytes(arrays))
        replies, sent = [], 0
        for node, reply in self.post.exchange(messages):
            if reply.has_error() or ARRAYS not in reply.content:
                why = reply.error.reason if reply.has_error() else dict(reply.content.get(CONFIG, {})).get("error")
                log.warning("device %s: %s", node, why)
                continue
            try:
                given = arrays_of(reply.content[ARRAYS])
                check_alike(given, {name: arrays[name] for name in given if name in arrays})
            except FleetError as error:
                self.refused += 1
                log.warning("device %s: answer refused: %s", node, error)
                continue
            replies.append(reply)
            sent += down + len(to_bytes(given))
        replies.sort(key=lambda reply: reply.metadata.src_node_id)  # sums of floats depend on their order
        loss = None
        if replies:
            names = set.intersection(*(set(reply.content[ARRAYS]) for reply in replies))
            if self.store.charter.averaging.strategy in ADAPTIVE:
                self.strategy.current_arrays = {name: arrays[name] for name in sorted(names)}
            found, metrics = self.strategy.aggregate_train(number + 1, replies)
            arrays = arrays | {name: value.astype(np.float32) for name, value in arrays_of(found).items()}
            loss = float(metrics["loss"])
        moments = (getattr(self.strategy, "m_t", None) or {}, getattr(self.strategy, "v_t", None) or {})
        self.store.add(number, arrays, moments, loss=loss, answers=len(replies), refused=self.refused,
                       sent_bytes=sent, time_s=time.time() - began)  # fmt: skip
        shown = "no answers" if loss is None else f"loss {loss:.4f}"
        print(f"fleet: round {number + 1}/{self.settings['rounds']}  {shown}  {len(replies)} answers", flush=True)
        return arrays, len(replies)
