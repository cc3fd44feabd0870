"""A whole fleet in one process: every device has its own rows and its own state, and one session computes for all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import FleetError
from ondevice.fleet.log import SUFFIX, write_log
from ondevice.fleet.member import Member, load_vector
from ondevice.fleet.messages import Answer, Outcome
from ondevice.fleet.numbers import LIMIT, Numbers, pack
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.split import split
from ondevice.fleet.store import FILE_NAME, Store

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.core.session import Session
    from ondevice.fleet.config import Attack, FleetRun
    from ondevice.training.fit import RunRows


@dataclass(frozen=True)
class Round:
    """What a round came to, for progress."""

    number: int
    rounds: int
    loss: float | None
    answers: int
    refused: int


@dataclass(frozen=True)
class Simulated:
    """A simulated fleet's result.

    Attributes:
        hashes_equal: every device that followed the log has the server's hash.
        final_hash: SHA-256 of the state, 64 hexadecimal digits.
        bytes_per_device_round: mean bytes of a task, an answer and an outcome, for a device that answered.
        rounds: that were done.
        loss_first, loss_last: of the adapter before the first and after the last round, on the rows to evaluate,
            nats a token.
        accuracy_first, accuracy_last: the same; None where the rows have no candidates.
        refused: answers by the reason of their refusal.
        log: the file that the folder keeps of all rounds.
        interrupted: stopped by a signal; the folder goes on.
        curve: `round`, `loss`, `accuracy`, and `bytes` to and from a device until then, at each evaluation.
    """

    hashes_equal: bool
    final_hash: str
    bytes_per_device_round: float
    rounds: int
    loss_first: float
    loss_last: float
    accuracy_first: float | None
    accuracy_last: float | None
    devices: int
    rows_by_device: tuple[int, int]
    refused: dict[str, int]
    log: str
    adapter: str | None
    interrupted: bool = False
    curve: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def simulate(
    config: FleetRun,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_round: Callable[[Round], None] = lambda done: None,
) -> Simulated:
    """Run a fleet of simulated devices; its folder is `config.train.out`.

    Args:
        resume: go on from the last whole round in the folder.
        overwrite: replace the fleet that is there.
        on_round: called after every round.

    Raises:
        FleetError: the folder holds a fleet and neither flag is set, or another fleet.
    """
    from ondevice.fleet.averaging.simulate import AveragingSimulation
    from ondevice.fleet.open import open_run

    config, session, rows, loaded = open_run(config)
    kind = AveragingSimulation if config.averages else Simulation
    try:
        return kind(config, session, rows, loaded).run(resume, overwrite, on_round)
    finally:
        session.close()


class Simulation:
    """The devices, the server and what goes wrong between them, all drawn from the run's seed.

    Args:
        config: the run file, with a maximum length.
        session: computes for every device in turn.
        rows: those of all devices, and those to evaluate on.
        model: names the base model, by `source` and `sha256`.
    """

    def __init__(self, config: FleetRun, session: Session, rows: RunRows, model: Any) -> None:
        from ondevice.data import Batches

        self.config, self.session, self.rows = config, session, rows
        self.charter = config.charter(session, model)
        simulated, seed = config.simulation, config.train.seed
        parts = split(rows.train, simulated.devices, simulated.dirichlet, seed)
        self.row_counts = [len(part) for part in parts]
        sizes = [
            session.batch_size or self.charter.fleet.batch_rows(len(part), config.train.batch_size) for part in parts
        ]
        self.members = [
            Member(
                self.charter,
                session,
                Batches(part, sizes[device], session.lengths_tokens, seed, rows.pad),
                device,
                noise=np.random.default_rng([seed, 4, device]),
            )
            for device, part in enumerate(parts)
        ]
        hostile = round(simulated.hostile * simulated.devices)
        order = np.random.default_rng([seed, 3]).permutation(simulated.devices)
        self.hostile = {int(device) for device in order[:hostile]}
        self.refused: dict[str, int] = {}
        self._late: list[Answer] = []

    def run(self, resume: bool, overwrite: bool, on_round: Callable[[Round], None]) -> Simulated:
        """Run every round that is missing, and compare all devices."""
        from ondevice.artifact.adapter import save_adapter
        from ondevice.training.checkpoint import RunLock
        from ondevice.training.loop import StopRequest

        out, rounds = self.config.train.out, self.config.fleet.rounds
        with RunLock(out), StopRequest() as stop:
            make_room(out, FILE_NAME, resume, overwrite)
            with Store.create(out, self.charter) as store:
                state = store.state()
                curve = Curve(store, self.config.simulation.eval_every)
                first = curve.add(0, self._evaluate(None))
                server = Rounds(self.charter, state)
                for member in self.members:  # what a device that was away does: it takes the log
                    member.follow(store.log().events)
                while server.next < rounds and not stop:
                    self._round(server, store, on_round)
                    if curve.due(store.count(), rounds):
                        curve.add(store.count(), self._evaluate(server.state.flat()))
                equal = all(member.state.digest() == server.state.digest() for member in self.members)
                last = curve.add(store.count(), self._evaluate(server.state.flat()))
                log = out / f"fleet{SUFFIX}"
                write_log(log, self.charter, store.events())
                table = store.table()
            adapter = self.session.adapter()
            if adapter is not None:
                save_adapter(adapter, out / "adapter")
        answered = sum(row["answers"] for row in table)
        return Simulated(
            equal,
            server.state.digest().hex(),
            sum(row["bytes"] for row in table) / answered if answered else 0.0,
            len(table),
            first.loss,
            last.loss,
            first.accuracy,
            last.accuracy,
            len(self.members),
            (min(self.row_counts), max(self.row_counts)),
            self.refused,
            str(log),
            None if adapter is None else str(out / "adapter"),
            interrupted=server.next < rounds,
            curve=curve.points,
        )

    def _round(self, server: Rounds, store: Store, on_round: Callable[[Round], None]) -> None:
        """Open rounds as the charter allows, answer and close the oldest; every device follows."""
        began = time.time()
        config = self.config.fleet
        while len(server.open) < config.open_rounds and server.next < config.rounds:
            number = server.next
            draw = np.random.default_rng([self.config.train.seed, 5, number])
            count = max(1, round(config.sample * len(self.members)))
            asked = sorted(int(device) for device in draw.permutation(len(self.members))[:count])
            current = server.begin(asked)
            for device in asked:
                if draw.random() < self.config.simulation.dropout:
                    continue
                late = draw.random() < self.config.simulation.late
                answer = self.members[device].answer(current.tasks[device])
                if device in self.hostile:
                    answer = lie(answer, self.config.simulation.attack, draw)
                if late:
                    self._late.append(answer)
                else:
                    self._give(server, answer)
        number = min(server.open)
        current = server.open[number]
        loss, answers = current.loss, list(current.answers.values())
        task = next(iter(current.tasks.values()))
        outcome = server.close(number)
        sent = sum(len(task.to_bytes()) + len(answer.to_bytes()) + len(outcome.to_bytes()) for answer in answers)
        self._give_late(server)
        store.add(outcome, server.state, answers=answers, refused=sum(self.refused.values()), loss=loss,
                  sent_bytes=sent, time_s=time.time() - began)  # fmt: skip
        for member in self.members:
            member.follow([Outcome.from_bytes(outcome.to_bytes())])
        on_round(Round(number, config.rounds, loss, len(answers), sum(self.refused.values())))

    def _give(self, server: Rounds, answer: Answer) -> None:
        try:
            server.receive(answer.to_bytes(), answer.device)
        except FleetError as error:
            self.refused[error.message] = self.refused.get(error.message, 0) + 1

    def _give_late(self, server: Rounds) -> None:
        late, self._late = self._late, []
        for answer in late:
            self._give(server, answer)

    def _evaluate(self, flat: np.ndarray | None) -> Any:
        """Evaluate an adapter; None is the one that all begin from."""
        from ondevice.training.evaluate import evaluate_dataset

        first = self.charter.state().flat() if flat is None else flat
        load_vector(self.session, first, self.members[0].name)
        dataset = self.rows.evaluation or self.rows.train
        return evaluate_dataset(self.session, dataset, self.rows.pad, rows=self.config.train.eval_rows)


def make_room(out: Path, name: str, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that holds a fleet in file `name`, unless it is gone on with or replaced.

    Raises:
        FleetError: it holds one, and neither flag is set.
    """
    if not (out / name).exists() or resume:
        return
    if not overwrite:
        raise FleetError(
            f"{out} holds a fleet", hint="--resume goes on with it, --overwrite replaces it; or choose another --out"
        )
    for file in (name, f"{name}-wal", f"{name}-shm"):
        (out / file).unlink(missing_ok=True)


class Curve:
    """Evaluations by round and by bytes, kept in a fleet's folder.

    Args:
        store: with `fact`, `set_fact` and `table`.
        every: rounds between two evaluations; None for the first and the last alone.
    """

    def __init__(self, store: Any, every: int | None) -> None:
        self.store, self.every = store, every
        self.points: list[dict[str, Any]] = json.loads(store.fact("curve") or "[]")

    def due(self, done: int, rounds: int) -> bool:
        """Whether a round is evaluated, beside the first and the last."""
        return bool(self.every) and done % (self.every or 1) == 0 and done < rounds

    def add(self, done: int, found: Any) -> Any:
        """Add the evaluation after `done` rounds, and return it."""
        table = self.store.table()[:done]
        spent = sum(row["bytes"] / row["answers"] for row in table if row["answers"])
        point = {"round": done, "bytes": round(spent), "loss": found.loss, "accuracy": found.accuracy}
        self.points = [*(known for known in self.points if known["round"] < done), point]
        self.store.set_fact("curve", json.dumps(self.points))
        return found


def lie(answer: Answer, attack: Attack, draw: np.random.Generator) -> Answer:
    """Return what a hostile device sends instead of its answer."""
    values = answer.numbers.values()
    if attack == "flip":
        return replace(answer, numbers=pack([-10 * value for value in values]))
    if attack == "random":
        largest = max(abs(value) for value in values) or 1.0
        return replace(answer, numbers=pack(draw.normal(0.0, 10 * largest, len(values)).tolist()))
    return replace(answer, rows=(1 << 32) - 1, numbers=Numbers((LIMIT,) * len(values), 100))
