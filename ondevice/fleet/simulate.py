"""A whole fleet in one process: every device has its own rows and its own state, and one session
computes for all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter import save_adapter
from ondevice.fleet.averaging.simulate import AveragingSimulation
from ondevice.fleet.codes import Refusal
from ondevice.fleet.dates import with_date
from ondevice.fleet.frozen import Space
from ondevice.fleet.local import evaluated_preferences, own_batches
from ondevice.fleet.log import SUFFIX, write_log
from ondevice.fleet.member import Member, load_vector, vector_name
from ondevice.fleet.messages import Event, Outcome, TaskReply
from ondevice.fleet.numbers import LIMIT, Numbers, pack
from ondevice.fleet.open import open_run
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.simulated import Curve, Round, Simulated, make_room
from ondevice.fleet.split import split
from ondevice.fleet.store import FILE_NAME, Store
from ondevice.training.checkpoint import RunLock
from ondevice.training.evaluate import evaluate_dataset
from ondevice.training.loop import StopRequest

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.fleet.config import Attack, FleetRun
    from ondevice.fleet.state import State
    from ondevice.training.rows import RunRows


@dataclass(frozen=True)
class Fate:
    """The faults of a device in a round: it is away, or late; `draw` is for a hostile one's
    reply."""

    away: bool
    late: bool
    draw: np.random.Generator


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
    config, session, rows, loaded = open_run(with_date(config, resume))
    kind = Simulation
    if config.averages:
        kind = AveragingSimulation
    try:
        return kind(config, session, rows, loaded).run(resume, overwrite, on_round)
    finally:
        session.close()


class Simulation:
    """The devices, the server and what goes wrong between them, all drawn from the run's seed.

    Args:
        config: the run file, with a maximum length.
        session: computes for every device in turn.
        rows: those of all devices, and held-out ones.
        model: names the base model, by `source` and `sha256`.
    """

    def __init__(self, config: FleetRun, session: Session, rows: RunRows, model: Any) -> None:
        self.config = config
        self.session = session
        self.rows = rows
        self.charter = config.charter(session, model)
        simulated = config.simulation
        seed = config.train.seed
        parts = split(rows.train, simulated.devices, simulated.dirichlet, seed)
        self.row_counts = [len(part) for part in parts]
        made = self.charter.learns()
        sizes = [
            self.charter.fleet.batch_rows(len(part), config.train.batch_size) for part in parts
        ]
        self.name = vector_name(session, self.charter.session_size)
        given = self.charter.subspace == "given"
        if given:
            self.space = Space(self.charter, session, self.name, config.train.out / "subspaces")
        else:
            self.space = None
        self.members = [
            Member(
                self.charter,
                session,
                own_batches(made, session, part, sizes[device], seed, rows.pad),
                device,
                noise=np.random.default_rng([seed, 4, device]),
                space=self.space,
            )
            for device, part in enumerate(parts)
        ]
        self.evaluated = evaluated_preferences(made, session, rows)
        self.giver = int(np.argmax(self.row_counts))
        hostile = round(simulated.hostile * simulated.devices)
        order = np.random.default_rng([seed, 3]).permutation(simulated.devices)
        self.hostile = {int(device) for device in order[:hostile]}
        self.refused: dict[str, int] = {}
        self._late: list[TaskReply] = []

    def run(self, resume: bool, overwrite: bool, on_round: Callable[[Round], None]) -> Simulated:
        """Run every round that is missing, and compare all devices."""
        out = self.config.train.out
        rounds = self.config.fleet.rounds
        with RunLock(out), StopRequest() as stop:
            make_room(out, FILE_NAME, resume, overwrite)
            with Store.create(out, self.charter) as store:
                server = Rounds(self.charter, store.state())
                curve = Curve(store, self.config.simulation.eval_every)
                events = store.log().events
                for member in self.members:  # as a device that was away, it takes the log
                    member.follow(events)
                first = self._catch_up(store, events, curve)
                while server.next < rounds and not stop:
                    self._round(server, store, on_round)
                    if curve.due(server.state.round, rounds):
                        curve.add(server.state.round, self._evaluate(server.state))
                equal = all(
                    member.state.digest() == server.state.digest() for member in self.members
                )
                last = curve.add(server.state.round, self._evaluate(server.state))
                log = out / f"fleet{SUFFIX}"
                content = store.log()
                write_log(log, self.charter, store.events(), content.frozen)
                table = store.table()
            adapter = self.session.adapter()
            if adapter is not None:
                save_adapter(adapter, out / "adapter")
        answered = sum(row["answers"] for row in table)
        return Simulated(
            equal,
            server.state.digest().hex(),
            sum(row["bytes"] for row in table) / answered if answered else 0.0,
            server.state.round,
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

    def _catch_up(self, store: Store, events: Sequence[Event], curve: Curve) -> Any:
        """Evaluate the beginning, and rounds that another engine or `eval_every` left out."""
        state = self.charter.state()
        first = curve.add(0, self._evaluate(state))
        for event in events:
            if self.space is not None:
                self.space.enter([event], store.file_of)
            state.apply(event, check=False)
            if isinstance(event, Outcome) and curve.due(state.round, events[-1].round + 1):
                curve.add(state.round, self._evaluate(state))
        return first

    def fate(self, number: int, device: int) -> Fate:
        """Draw what goes wrong with a device in a round."""
        draw = np.random.default_rng([self.config.train.seed, 7, number, device])
        away, late = (float(value) for value in draw.random(2))
        return Fate(away < self.config.simulation.dropout, late < self.config.simulation.late, draw)

    def _round(self, server: Rounds, store: Store, on_round: Callable[[Round], None]) -> None:
        """Open rounds as the charter allows, reply and close the oldest; every device follows."""
        began = time.time()
        config = self.config.fleet
        if self.charter.due(server.state):
            self._refresh(server, store)
        while len(server.open) < config.open_rounds and server.next < config.rounds:
            number = server.next
            draw = np.random.default_rng([self.config.train.seed, 5, number])
            count = max(1, round(config.sample * len(self.members)))
            asked = sorted(int(device) for device in draw.permutation(len(self.members))[:count])
            current = server.begin(asked)
            for device in asked:
                fate = self.fate(number, device)
                if fate.away:
                    continue
                answer = self.members[device].answer(current.tasks[device])
                if device in self.hostile:
                    answer = lie(answer, self.config.simulation.attack, fate.draw)
                if fate.late:
                    self._late.append(answer)
                else:
                    self._give(server, answer)
        number = min(server.open)
        current = server.open[number]
        loss = current.loss
        answers = list(current.answers.values())
        task = next(iter(current.tasks.values()))
        outcome = server.close(number)
        sent = sum(
            len(task.to_bytes()) + len(answer.to_bytes()) + len(outcome.to_bytes())
            for answer in answers
        )
        self._give_late(server)
        store.add(outcome, server.state, answers=answers, refused=sum(self.refused.values()), loss=loss,
                  sent_bytes=sent, time_s=time.time() - began)  # fmt: skip
        event = Outcome.from_bytes(outcome.to_bytes())
        if self.space is not None:
            self.space.enter([event], store.file_of)
        for member in self.members:
            member.follow([event])
        on_round(Round(number, config.rounds, loss, len(answers), sum(self.refused.values())))

    def _refresh(self, server: Rounds, store: Store) -> None:
        """Take a new subspace from the device with the most rows; every device follows."""
        assert self.space is not None  # noqa: S101  of every charter that has refreshes
        began = time.time()
        file = self.members[self.giver].subspace()
        event = server.refresh(file.digest)
        sent = len(file.data) * (1 + len(self.members))
        store.add(event, server.state, frozen=file, sent_bytes=sent, time_s=time.time() - began)
        self.space.enter([event], store.file_of)
        for member in self.members:
            member.follow([event])

    def _give(self, server: Rounds, answer: TaskReply) -> None:
        try:
            server.receive(answer.to_bytes(), answer.device)
        except Refusal as error:
            self.refused[error.code] = self.refused.get(error.code, 0) + 1

    def _give_late(self, server: Rounds) -> None:
        late = self._late
        self._late = []
        for answer in late:
            self._give(server, answer)

    def _evaluate(self, state: State) -> Any:
        """Evaluate an adapter, whose subspace the session is in."""
        load_vector(self.session, state.flat(), self.name)
        if self.evaluated is not None:
            return self.evaluated.evaluate(self.session, self.config.train.eval_rows, lambda: False)
        dataset = self.rows.evaluation or self.rows.train
        return evaluate_dataset(
            self.session, dataset, self.rows.pad, rows=self.config.train.eval_rows
        )


def lie(answer: TaskReply, attack: Attack, draw: np.random.Generator) -> TaskReply:
    """Return a hostile device's reply instead of its own."""
    values = answer.numbers.values()
    if attack == "flip":
        return replace(answer, numbers=pack([-10 * value for value in values]))
    if attack == "random":
        largest = max(abs(value) for value in values) or 1.0
        return replace(answer, numbers=pack(draw.normal(0.0, 10 * largest, len(values)).tolist()))
    return replace(answer, rows=(1 << 32) - 1, numbers=Numbers((LIMIT,) * len(values), 100))
