"""The server of a first-order fleet over Flower: Flower's strategies sample and average, the store
keeps rounds."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from ondevice.core.errors import FleetError
from ondevice.fleet.averaging.arrays import digest, to_bytes
from ondevice.fleet.averaging.records import ARRAYS, CONFIG, METRICS, arrays_of, record_of, reply_of
from ondevice.fleet.averaging.rules import ADAPTIVE, Arrays, Averaging, bounded
from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.failures import Failures, Patience, say
from ondevice.fleet.post import POLL_S, Post
from ondevice.fleet.replies import Failed, Held, Reply

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("ondevice.fleet")
EMPTY_ROUNDS = 3
"""A server ends after so many rounds without a reply."""
CheckedReply = tuple[Arrays, int, float]
"""A device's tensors, rows and loss."""


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


@dataclass(frozen=True)
class _Taken:
    """A reply as Flower's strategies read it."""

    content: RecordDict

    @classmethod
    def of(cls, arrays: Arrays, rows: int, loss: float) -> _Taken:
        return cls(
            RecordDict(
                {
                    ARRAYS: record_of(arrays),
                    METRICS: MetricRecord({"num-examples": rows, "loss": loss}),
                }
            )
        )

    def has_error(self) -> bool:
        return False


class AdapterServer:
    """A first-order fleet's server over Flower's grid.

    Args:
        grid: reaches the devices.
        store: the fleet; every round is written before the next begins.
        settings: `rounds`, `least_devices`, `sample`, `wait_s`; `end`: tell the devices after the
            last round that the fleet is over.
        post: over `grid`.
    """

    def __init__(
        self, grid: Grid, store: AdapterStore, settings: dict[str, Any], post: Post | None = None
    ) -> None:
        self.grid = grid
        self.store = store
        self.settings = settings
        self.post = post or Post(grid, settings["wait_s"])
        self.failures = Failures(store)
        self.patience = Patience(settings["wait_s"], settings["least_devices"])
        averaging = store.charter.averaging
        self.strategy = strategy_of(averaging, settings["sample"], settings["least_devices"])
        if averaging.strategy in ADAPTIVE:
            first, second = store.moments()
            self.strategy.m_t = first or None
            self.strategy.v_t = second or None
        self.refused = 0

    def run(self) -> None:
        """Run every round that is missing, then give each device the adapter and ask for its
        hash."""
        arrays = self.store.tensors()
        empty = 0
        while self.store.count() < self.settings["rounds"]:
            self._wait()
            arrays, answers = self._round(self.store.count(), arrays)
            empty = 0 if answers else empty + 1
            if empty == EMPTY_ROUNDS:
                raise FleetError(
                    f"no device has replied in {empty} rounds", hint="a device's own log says why"
                )
        self._last(arrays)

    def _last(self, arrays: Arrays) -> None:
        """Give each device the adapter, and ask for its hash; a device that is away for a moment is
        waited for, if too few have replied without it.

        Raises:
            FleetError: too few devices have replied.
        """
        expected = digest(arrays)
        equal: dict[str, bool] = {}
        content = RecordDict({ARRAYS: record_of(arrays), CONFIG: self._config(last=True)})
        self.patience.renew()
        while True:
            nodes = [node for node in self._nodes() if str(node) not in equal]
            messages = [
                Message(content=content, message_type="train", dst_node_id=node) for node in nodes
            ]
            for node, reply in self.post.exchange(messages):
                said = self._reply(node, reply, arrays)
                equal[str(node)] = isinstance(said, Held) and said.digest == expected
            if self.patience.is_over or len(equal) >= self.patience.least:
                break
            self.patience.wait(self._nodes())
            time.sleep(POLL_S)
        self.store.set_fact("devices", json.dumps(dict(sorted(equal.items()))))
        say(f"{expected}, {sum(equal.values())} of {len(equal)} devices have it")
        if len(equal) < self.patience.least:
            raise self.patience.gave_up(len(self._nodes()), len(equal))

    def _reply(self, node: int, message: Any, arrays: Arrays) -> Reply | CheckedReply | None:
        """Return a device's reply; None without a usable one."""
        if message.has_error():
            log.warning("device %s: Flower could not ask it", node)
            self.failures.note("no_connection")
            return None
        try:
            said = reply_of(message.content, arrays)
        except Refusal as error:
            self._refuse(node, error.code)
            return None
        if isinstance(said, Failed):
            log.warning("device %s: %s", node, said.error)
            self.failures.note(said.error)
        return said

    def _refuse(self, node: int, code: Code) -> None:
        self.refused += 1
        self.failures.note(code)
        log.warning("device %s: its reply is refused: %s", node, code)

    def _alike(self, answers: dict[int, CheckedReply], asked: int) -> dict[int, CheckedReply]:
        """Return the replies with the tensors that this fleet trains.

        They are the tensors that most devices sent, and stay the same once a majority of the asked
        devices has sent them."""
        times = Counter(frozenset(arrays) for arrays, _, _ in answers.values())
        if not times:
            return {}
        known = json.loads(self.store.fact("tensors") or "null") or list(
            getattr(self.strategy, "m_t", None) or ()
        )
        most = max(times, key=lambda names: (times[names], len(names), sorted(names)))
        trained = frozenset(known) or most
        if not known and 2 * times[most] > asked:
            self.store.set_fact("tensors", json.dumps(sorted(most)))
        for node, (arrays, _, _) in answers.items():
            if frozenset(arrays) != trained:
                self._refuse(node, Code.NUMBERS)
        return {node: answer for node, answer in answers.items() if frozenset(answer[0]) == trained}

    def _nodes(self) -> list[int]:
        return sorted(self.grid.get_node_ids())

    def _wait(self) -> None:
        self.patience.renew()
        while len(nodes := self._nodes()) < self.patience.least:
            if self.patience.is_over:
                raise self.patience.gave_up(len(nodes), len(nodes))
            self.patience.wait(nodes)
            time.sleep(POLL_S)

    def _config(self, last: bool = False) -> ConfigRecord:
        over = last and bool(self.settings.get("end"))
        more = {"over": True} if over else {}
        return ConfigRecord({"charter": self.store.charter.to_bytes(), "last": last, **more})

    def _round(self, number: int, arrays: Arrays) -> tuple[Arrays, int]:
        """Run one round; return the adapter after it and the number of replies."""
        began = time.time()
        messages = list(
            self.strategy.configure_train(number + 1, record_of(arrays), self._config(), self.grid)
        )
        down = len(to_bytes(arrays))
        answers: dict[int, CheckedReply] = {}
        for node, message in self.post.exchange(messages):
            said = self._reply(node, message, arrays)
            if isinstance(said, tuple):
                answers[node] = said
        answers = self._alike(answers, len(messages))
        sent = 0
        loss = None
        if answers:
            nodes = sorted(answers)  # sums of floats depend on their order
            sent = sum(down + len(to_bytes(answers[node][0])) for node in nodes)
            trained = {name: arrays[name] for name in sorted(answers[nodes[0]][0])}
            rule = self.store.charter.averaging.strategy
            given = bounded(trained, [answers[node][:2] for node in nodes], rule)
            if rule in ADAPTIVE:
                self.strategy.current_arrays = trained
            taken = [
                _Taken.of(values, rows, answers[node][2])
                for node, (values, rows) in zip(nodes, given)
            ]
            found, metrics = self.strategy.aggregate_train(number + 1, taken)
            arrays = arrays | {
                name: value.astype(np.float32) for name, value in arrays_of(found).items()
            }
            loss = float(metrics["loss"])
        moments = (
            getattr(self.strategy, "m_t", None) or {},
            getattr(self.strategy, "v_t", None) or {},
        )
        self.store.add(number, arrays, moments, loss=loss, answers=len(answers), refused=self.refused,
                       sent_bytes=sent, time_s=time.time() - began)  # fmt: skip
        line = self.failures.close(number, len(answers), len(messages))
        if loss is not None:
            line = f"loss {loss:.4f}  {line}"
        say(f"round {number + 1}/{self.settings['rounds']}  {line}")
        return arrays, len(answers)
