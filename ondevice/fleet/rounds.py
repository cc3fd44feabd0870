"""A server's decisions as plain objects: the tasks of a round, the replies it takes, and the
outcome.

Nothing here waits, sends or writes; `store.Store` saves a round, and `apps` or `simulate` carry it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from ondevice.core.errors import FleetError
from ondevice.fleet.charter import Charter
from ondevice.fleet.codes import Code, Refusal, refusing
from ondevice.fleet.combine import coefficients_of, shared_group, weights_of
from ondevice.fleet.messages import Outcome, Refresh, Task, TaskReply
from ondevice.fleet.secure import check_exponent
from ondevice.fleet.state import State


@dataclass
class OpenRound:
    """A round under way: the tasks by device, and the replies so far."""

    number: int
    begin: bytes
    tasks: dict[int, Task]
    answers: dict[int, TaskReply] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """Mean of the replies' losses, weighted as their numbers are; None without replies."""
        answers = list(self.answers.values())
        if not answers:
            return None
        weights = weights_of([answer.rows for answer in answers])
        return sum(
            answer.loss * weight for answer, weight in zip(answers, weights, strict=True)
        ) / sum(weights)


class Rounds:
    """The rounds of a fleet.

    Args:
        charter: what the fleet agreed on.
        state: of the fleet so far; `charter.state()` before the first round.
    """

    def __init__(self, charter: Charter, state: State | None = None) -> None:
        self.charter = charter
        self.state = charter.state() if state is None else state
        self.next = self.state.round
        self.open: dict[int, OpenRound] = {}

    def begin(self, devices: Iterable[int]) -> OpenRound:
        """Open the next round for `devices`, each of which gets a task.

        Raises:
            FleetError: as many rounds as the charter allows are open, its learning rate is zero by
                now, or new frozen tensors are due.
        """
        if not self.charter.rate(self.next) > 0:
            raise FleetError(
                f"the learning rate has fallen to zero in round {self.next}",
                hint=f"a fleet of {self.charter.fleet.decay_rounds} rounds has ended; begin another from its adapter",
            )
        if self.charter.due(self.state):
            raise FleetError(f"round {self.next} needs new frozen tensors first")
        if len(self.open) >= self.charter.fleet.open_rounds:
            raise FleetError(
                "too many rounds are open", expected=f"{self.charter.fleet.open_rounds} at most"
            )
        number = self.next
        self.next += 1
        self.open[number] = OpenRound(number, self.state.hash, {})
        for device in sorted(set(devices)):
            self.invite(number, device)
        return self.open[number]

    def invite(self, number: int, device: int) -> Task:
        """Ask one more device in an open round; its lane is the next one."""
        current = self.open[number]
        charter = self.charter
        first_step = charter.first_step(number, len(current.tasks))
        rate = charter.rate(number)
        task = Task(charter.id, number, current.begin, first_step, charter.fleet.local_steps, rate)
        current.tasks[device] = task
        return task

    def receive(self, data: bytes | TaskReply, sender: int | None = None) -> TaskReply:
        """Take a device's reply into its round.

        Args:
            sender: the device that the transport names; a reply in another's name is refused.

        Raises:
            Refusal: malformed, of another fleet, late, twice, of a stranger, or of another state.
        """
        with refusing(Code.MALFORMED):
            answer = data if isinstance(data, TaskReply) else TaskReply.from_bytes(data)
        if answer.fleet != self.charter.id:
            raise Refusal(
                Code.OTHER_FLEET,
                "the reply is of another fleet",
                expected=f"{self.charter.id:08x}",
                received=f"{answer.fleet:08x}",
            )
        if sender is not None and answer.device != sender:
            raise Refusal(
                Code.OTHER_DEVICE,
                "the reply is in another device's name",
                expected=sender,
                received=answer.device,
            )
        current = self.open.get(answer.round)
        if current is None:
            where = f"open rounds: {', '.join(map(str, self.open)) or 'none'}"
            raise Refusal(
                Code.LATE,
                "the reply is late: its round is not open",
                expected=where,
                received=answer.round,
            )
        if answer.begin != current.begin:
            raise Refusal(
                Code.OTHER_STATE,
                "the reply began from another state",
                expected=current.begin.hex(),
                received=answer.begin.hex(),
                hint="apply the fleet's log first",
            )
        if answer.device not in current.tasks:
            raise Refusal(
                Code.NOT_ASKED, f"device {answer.device} was not asked in round {answer.round}"
            )
        if answer.device in current.answers:
            raise Refusal(Code.TWICE, f"device {answer.device} has replied in round {answer.round}")
        if len(answer.numbers.mantissas) != self.charter.numbers:
            raise Refusal(
                Code.NUMBERS,
                "the reply does not have one number per query and step",
                expected=self.charter.numbers,
                received=len(answer.numbers.mantissas),
            )
        if self.charter.fleet.secure:
            check_exponent(answer.numbers, self.charter.fleet)
        current.answers[answer.device] = answer
        return answer

    def close(self, number: int, means: Sequence[float] | None = None) -> Outcome:
        """End a round: its replies become its outcome, which is applied; without replies nothing
        changes.

        Args:
            means: of the devices' numbers, if a secure sum gave them instead of replies.

        Raises:
            FleetError: the round is not open.
        """
        if number not in self.open:
            raise FleetError(f"round {number} is not open")
        current = self.open.pop(number)
        answers = [
            (current.tasks[device].first_step, answer) for device, answer in current.answers.items()
        ]
        charter = self.charter
        groups = coefficients_of(answers, charter.fleet, charter.factor(number))
        if means is not None:
            groups = (shared_group(charter.first_step(number, 0), means, charter.factor(number)),)
        before = self.state.hash
        outcome = Outcome(self.charter.id, number, before, bytes(8), groups)
        self.state.apply(outcome, check=False)
        return replace(outcome, after=self.state.hash)

    def refresh(self, digest: bytes) -> Refresh:
        """Change the frozen tensors between two rounds; the trained vector begins again at zero.

        Raises:
            FleetError: a round is open.
        """
        if self.open:
            raise FleetError(
                "frozen tensors change between rounds", received=f"open rounds {list(self.open)}"
            )
        event = Refresh(self.charter.id, self.next, self.state.hash, bytes(8), digest)
        self.state.apply(event, check=False)
        return replace(event, after=self.state.hash)
