"""A first-order fleet in one process; some of its devices may be too weak for a backward pass and
send numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import ConfigError
from ondevice.core.registry import method_config
from ondevice.fleet.averaging.arrays import arrays_of, digest, put, to_bytes
from ondevice.fleet.averaging.member import AdapterMember, AdapterReply, NumberMember
from ondevice.fleet.averaging.rules import Arrays, Combiner, bounded, check_alike
from ondevice.fleet.averaging.store import FILE_NAME, AdapterStore
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.config import Attack, FleetRun, default_method
from ondevice.fleet.local import evaluated_preferences, own_batches
from ondevice.fleet.open import open_task
from ondevice.fleet.simulated import Curve, Round, Simulated, make_room
from ondevice.fleet.split import split
from ondevice.training.checkpoint import RunLock
from ondevice.training.evaluate import evaluate_dataset
from ondevice.training.loop import StopRequest

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.training.rows import RunRows


class AveragingSimulation:
    """Devices, server and what goes wrong, drawn from the run's seed as `simulate.Simulation` draws
    it.

    Args:
        config: the run file, with a maximum length.
        session: computes for every first-order device in turn.
        rows: those of all devices, and those to evaluate on.
        model: names the base model, by `source` and `sha256`.
    """

    def __init__(self, config: FleetRun, session: Session, rows: RunRows, model: Any) -> None:
        self.config = config
        self.session = session
        self.rows = rows
        self.charter = config.adapter_charter(model)
        simulated = config.simulation
        seed = config.train.seed
        parts = split(rows.train, simulated.devices, simulated.dirichlet, seed)
        self.row_counts = [len(part) for part in parts]
        order = np.random.default_rng([seed, 3]).permutation(simulated.devices)
        self.hostile = set(order[: round(simulated.hostile * simulated.devices)].tolist())
        weak = np.random.default_rng([seed, 6]).permutation(simulated.devices)
        self.weak = set(weak[: round(simulated.weak * simulated.devices)].tolist())
        self.first = arrays_of(session)
        self.weak_session = None
        if self.weak:
            self.weak_session = weak_session(config)
            self.first = _common(self.weak_session, session)
        self.members: list[AdapterMember | NumberMember] = []
        made = self.charter.learns()
        self.evaluated = evaluated_preferences(made, session, rows)
        for device, part in enumerate(parts):
            own = session
            if self.weak_session is not None and device in self.weak:
                own = self.weak_session
            batches = own_batches(made, own, part, config.train.batch_size, seed, rows.pad)
            if self.weak_session is not None and device in self.weak:
                steps = config.fleet.local_steps
                rate = simulated.weak_rate
                self.members.append(NumberMember(self.weak_session, batches, steps, rate))
            else:
                self.members.append(AdapterMember(self.charter, session, batches))
        self.refused: dict[str, int] = {}

    def run(self, resume: bool, overwrite: bool, on_round: Callable[[Round], None]) -> Simulated:
        """Run every round that is missing."""
        out = self.config.train.out
        rounds = self.config.fleet.rounds
        with RunLock(out), StopRequest() as stop:
            make_room(out, FILE_NAME, resume, overwrite)
            with AdapterStore.create(out, self.charter, self.first) as store:
                combiner = Combiner(self.charter.averaging, store.moments())
                curve = Curve(store, self.config.simulation.eval_every)
                first = curve.add(0, self._evaluate(self.first))
                arrays = store.tensors()
                while store.count() < rounds and not stop:
                    arrays = self._round(store.count(), arrays, combiner, store, on_round)
                    if curve.due(store.count(), rounds):
                        curve.add(store.count(), self._evaluate(arrays))
                last = curve.add(store.count(), self._evaluate(arrays))
                table = store.table()
            adapter = self.session.adapter()
            if adapter is not None:
                save_adapter(adapter, out / "adapter")
        answered = sum(row["answers"] for row in table)
        return Simulated(
            hashes_equal=digest(arrays_of(self.session)) == digest(arrays),
            final_hash=digest(arrays),
            bytes_per_device_round=sum(row["bytes"] for row in table) / answered
            if answered
            else 0.0,
            rounds=len(table),
            loss_first=first.loss,
            loss_last=last.loss,
            accuracy_first=first.accuracy,
            accuracy_last=last.accuracy,
            devices=len(self.members),
            rows_by_device=(min(self.row_counts), max(self.row_counts)),
            refused=self.refused,
            log=str(out / FILE_NAME),
            adapter=None if adapter is None else str(out / "adapter"),
            interrupted=len(table) < rounds,
            curve=curve.points,
        )

    def _round(
        self,
        number: int,
        arrays: Arrays,
        combiner: Combiner,
        store: AdapterStore,
        on_round: Callable[[Round], None],
    ) -> Arrays:
        """Ask the drawn devices, and combine their replies; without replies nothing changes."""
        began = time.time()
        config = self.config
        draw = np.random.default_rng([config.train.seed, 5, number])
        count = max(1, round(config.fleet.sample * len(self.members)))
        answers: list[AdapterReply] = []
        for device in sorted(draw.permutation(len(self.members))[:count].tolist()):
            if draw.random() < config.simulation.dropout:
                continue
            late = draw.random() < config.simulation.late
            answer = self.members[device].answer(number, arrays)
            if device in self.hostile:
                answer = lie(answer, arrays, config.simulation.attack, draw)
            if late:
                self._refuse(Code.LATE)
                continue
            try:
                check_alike(
                    answer.arrays, {name: arrays[name] for name in answer.arrays if name in arrays}
                )
            except Refusal as error:
                self._refuse(error.code)
                continue
            answers.append(answer)
        after = arrays
        sent = 0
        loss = None
        if answers:
            # A weak device's method names the frozen A too, which is every device's.
            names = sorted(set.intersection(*(set(answer.arrays) for answer in answers)))
            trained = {name: arrays[name] for name in names}
            given = [
                ({name: answer.arrays[name] for name in names}, answer.rows) for answer in answers
            ]
            given = bounded(trained, given, combiner.config.strategy)
            after = arrays | combiner.combine(number + 1, trained, given)
            down = len(to_bytes(trained))
            sent = sum(down + answer.sent_bytes for answer in answers)
            weights = [rows for _, rows in given]
            loss = sum(a.loss * rows for a, rows in zip(answers, weights, strict=True)) / sum(
                weights
            )
        refused = sum(self.refused.values())
        store.add(number, after, combiner.moments, loss=loss, answers=len(answers), refused=refused,
                  sent_bytes=sent, time_s=time.time() - began)  # fmt: skip
        on_round(Round(number, config.fleet.rounds, loss, len(answers), refused))
        return after

    def _refuse(self, code: Code) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1

    def _evaluate(self, arrays: Arrays) -> Any:
        put(self.session, arrays)
        if self.evaluated is not None:
            return self.evaluated.evaluate(self.session, self.config.train.eval_rows, lambda: False)
        dataset = self.rows.evaluation or self.rows.train
        return evaluate_dataset(
            self.session, dataset, self.rows.pad, rows=self.config.train.eval_rows
        )


def weak_session(config: FleetRun) -> Session:
    """Open the zeroth-order method for the adapter of a first-order run, over a model of its own.

    Raises:
        ConfigError: the method trains A, which the zeroth-order one freezes.
    """
    name = default_method()
    method = config.method
    if getattr(method, "trains_a", True):
        raise ConfigError(
            f"weak devices train only B, and {method.name} trains A too",
            expected="a first-order method that freezes A, such as lora-fa",
            received=method.name,
        )
    shared = {key: getattr(method, key) for key in ("rank", "alpha", "target_modules")}
    other = method_config(name, {**shared, "subspace": "random", "noise": "rademacher"})
    _, session, _ = open_task(config.model_copy(update={"method": other}))
    return session


def _common(weak: Session, strong: Session) -> Arrays:
    """Return the weak devices' first adapter, which the strong ones can begin from: A of the
    generator's."""
    arrays = arrays_of(weak)
    put(strong, arrays)
    return arrays_of(strong)


def lie(
    answer: AdapterReply, before: Arrays, attack: Attack, draw: np.random.Generator
) -> AdapterReply:
    """Return what a hostile device sends: its change turned around and ten times as large, noise,
    or huge numbers."""
    found = {}
    rows = answer.rows
    for name, value in answer.arrays.items():
        change = value - before[name]
        if attack == "flip":
            found[name] = before[name] - np.float32(10) * change
        elif attack == "random":
            size = 10 * float(np.abs(change).max())
            found[name] = before[name] + draw.normal(0, size, change.shape).astype(np.float32)
        else:
            found[name], rows = np.full_like(value, 1e30), (1 << 32) - 1
    return AdapterReply(found, rows, answer.loss, answer.sent_bytes)
