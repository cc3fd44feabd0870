"""Devices of a first-order fleet, over any session: one that sends its adapter, one that sends
numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ondevice.core.errors import TrainingError
from ondevice.core.session import Replaying, require
from ondevice.fleet.averaging.arrays import arrays_of, put, to_bytes, trained_names
from ondevice.fleet.averaging.rules import Arrays
from ondevice.fleet.local import local_step
from ondevice.fleet.numbers import pack

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.training.loop import BatchSource


@dataclass(frozen=True)
class AdapterReply:
    """A device's reply after its local steps.

    Attributes:
        arrays: the tensors that it trained, float32 by PEFT's names.
        rows: of data that its steps read.
        loss: mean of its steps' losses, nats a labelled token.
        sent_bytes: of the reply.
    """

    arrays: Arrays
    rows: int
    loss: float
    sent_bytes: int


class AdapterMember:
    """A first-order device. Several may share a session, one after the other.

    Args:
        charter: the fleet's.
        session: opened with the fleet's model and method; any runtime.
        batches: the device's own rows.
    """

    def __init__(self, charter: AdapterCharter, session: Session, batches: BatchSource) -> None:
        self.charter = charter
        self.session = session
        self.batches = batches

    def answer(self, number: int, arrays: Arrays) -> AdapterReply:
        """Do the local steps of round `number` from an adapter.

        Raises:
            TrainingError: a loss is not finite.
        """
        put(self.session, arrays)
        loss, rows, _ = _steps(
            self.session, self.batches, number, self.charter.local_steps, self.charter.learning_rate
        )
        names = trained_names(self.session)
        trained = {name: value for name, value in arrays_of(self.session).items() if name in names}
        return AdapterReply(trained, rows, loss, len(to_bytes(trained)))


class NumberMember:
    """A zeroth-order device among first-order ones: it sends numbers, and the server makes an
    adapter of them.

    Args:
        local_steps, learning_rate: of its own steps.
        session: of the zeroth-order method, for the same tensors.
    """

    def __init__(
        self, session: Session, batches: BatchSource, local_steps: int, learning_rate: float
    ) -> None:
        self.session = session
        self.batches = batches
        self.local_steps = local_steps
        self.learning_rate = learning_rate

    def answer(self, number: int, arrays: Arrays) -> AdapterReply:
        """Do the local steps; the adapter is made only of the numbers, as 16 bits hold them.

        Raises:
            TrainingError: a loss is not finite.
        """
        put(self.session, arrays)
        numbers: list[float] = []
        loss, rows, steps = _steps(
            self.session, self.batches, number, self.local_steps, self.learning_rate, numbers.extend
        )
        packed = pack(numbers)
        trained = self.rebuilt(arrays, packed.values(), steps)
        return AdapterReply(trained, rows, loss, 38 + 2 * len(packed.mantissas))

    def rebuilt(self, arrays: Arrays, numbers: list[float], steps: range) -> Arrays:
        """Return what the server makes of the numbers: the update of each step, without forward
        passes."""
        put(self.session, arrays)
        queries = len(numbers) // len(steps)
        for place, step in enumerate(steps):
            require(self.session, Replaying).apply_update(
                tuple(numbers[place * queries : (place + 1) * queries]), step, self.learning_rate
            )
        return {name: value for name, value in arrays_of(self.session).items() if name in arrays}


def _steps(
    session: Session,
    batches: BatchSource,
    number: int,
    local_steps: int,
    learning_rate: float,
    take: Callable[[tuple[float, ...]], None] = lambda numbers: None,
) -> tuple[float, int, range]:
    """Run the local steps of a round; returns mean loss, rows and the steps' numbers."""
    losses = []
    rows = 0
    steps = range(number * local_steps, (number + 1) * local_steps)
    for step in steps:
        result, count = local_step(session, batches, step, step, learning_rate)
        losses.append(result.loss)
        rows += count
        take(result.projected_gradients)
    loss = math.fsum(losses) / len(losses)
    if not math.isfinite(loss):
        raise TrainingError(
            f"the loss of round {number} is not finite",
            received=loss,
            hint="use a smaller learning rate",
        )
    return loss, rows, steps
