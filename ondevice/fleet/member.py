"""A device of a fleet, over any session: it follows the log, and replies to a task with numbers."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ArtifactError, FleetError, TrainingError
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.combine import clip
from ondevice.fleet.local import local_step
from ondevice.fleet.log import checked
from ondevice.fleet.messages import Event, Task, TaskReply
from ondevice.fleet.numbers import Numbers, pack
from ondevice.fleet.secure import exponent_of

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.data import Batches
    from ondevice.fleet.agreement import Agreement
    from ondevice.fleet.charter import Charter
    from ondevice.fleet.frozen import Frozen, Space
    from ondevice.training.preferences import PreferenceBatches


def vector_name(session: Session, size: int) -> str:
    """Return the name of the trained vector in a session's state: its one float32 array of `size`
    elements.

    Raises:
        ArtifactError: the state has none, or several.
    """
    names = [
        name
        for name, value in session.state().items()
        if value.dtype == np.float32 and value.shape == (size,)
    ]
    if len(names) != 1:
        raise ArtifactError(
            "the session does not train what this fleet trains",
            expected=f"one float32 vector of {size} elements",
            received=", ".join(
                f"{name} {list(value.shape)}" for name, value in session.state().items()
            ),
            hint="the rank, the target modules and the model must be the fleet's",
        )
    return names[0]


def load_vector(session: Session, flat: np.ndarray, name: str) -> None:
    """Put the adapter into a session; everything else of its state stays."""
    session.load_state({**session.state(), name: np.ascontiguousarray(flat, dtype=np.float32)})


def private(
    numbers: Sequence[float], agreement: Agreement, draw: np.random.Generator
) -> list[float]:
    """Clip a device's numbers, and add noise if the charter says so, before anything leaves the
    device."""
    clipped = clip(numbers, agreement.clip_norm)
    if not agreement.noise_multiplier or agreement.clip_norm is None:
        return clipped
    noise = draw.normal(0.0, agreement.noise_multiplier * agreement.clip_norm, len(clipped))
    return [value + float(extra) for value, extra in zip(clipped, noise)]


class Member:
    """One device: its state, and how it replies. Several members may share a session, one after the
    other.

    Args:
        charter: the fleet's.
        session: opened with the fleet's model, method and seed; any runtime.
        batches: the device's own rows.
        device: the device's number.
        noise: draws the privacy noise; the operating system's entropy by default.
        space: of the session, if the fleet's subspaces are given; members of one session share it.

    Raises:
        ArtifactError: the session trains another vector, or was made with another seed.
    """

    def __init__(
        self,
        charter: Charter,
        session: Session,
        batches: Batches | PreferenceBatches,
        device: int,
        noise: np.random.Generator | None = None,
        space: Space | None = None,
    ) -> None:
        self.charter = charter
        self.session = session
        self.batches = batches
        self.device = device
        self.state = charter.state()
        self.noise = noise or np.random.default_rng(int.from_bytes(os.urandom(16), "little"))
        self.name = vector_name(session, charter.session_size)
        self.space = space
        seed = session.state().get("seed")
        if seed is None or int(np.asarray(seed).reshape(-1)[0]) != charter.seed:
            raise ArtifactError(
                "the session draws other noise than the fleet",
                expected=f"seed {charter.seed}",
                received=seed,
            )

    def follow(self, events: Iterable[Event]) -> list[Event]:
        """Apply the events that this device has not seen, and return them; no forward pass.

        Raises:
            FleetError: one is of another fleet, or does not follow.
        """
        applied = []
        for event in events:
            if checked(event, self.charter).before == self.state.hash:
                self.state.apply(event)
                applied.append(event)
            elif event.round >= self.state.round and event.after != self.state.hash:
                self.state.apply(event)  # reports the missing rounds
        return applied

    def answer(self, task: Task) -> TaskReply:
        """Do a task's local steps, and reply; the state does not change.

        Raises:
            Refusal: the task is of another fleet, not the charter's, or of a state that this device
                does not have.
            TrainingError: a loss or a number is not finite.
        """
        self.charter.check_task(task)
        if task.begin != self.state.hash or task.round < self.state.round:
            raise Refusal(
                Code.OTHER_STATE,
                f"the task of round {task.round} begins from another state",
                expected=f"round {task.round}, {task.begin.hex()}",
                received=f"round {self.state.round}, {self.state.hash.hex()}",
                hint="apply the rounds before it first",
            )
        if self.space is not None and self.space.state.frozen != self.state.frozen:
            raise FleetError("the session is in another subspace than the task")
        load_vector(self.session, self.state.flat(), self.name)
        numbers: list[float] = []
        losses = []
        for step in range(task.local_steps):
            number = task.round * task.local_steps + step
            result, _ = local_step(
                self.session, self.batches, number, task.first_step + step, task.learning_rate
            )
            numbers += result.projected_gradients
            losses.append(result.loss)
        loss = math.fsum(losses) / len(losses)
        if not math.isfinite(loss) or not all(map(math.isfinite, numbers)):
            raise TrainingError(
                f"the loss of round {task.round} is not finite",
                received=loss,
                hint="use a smaller learning rate or perturbation scale",
            )
        if len(numbers) != self.charter.numbers:
            raise FleetError(
                "the session computes other numbers than the fleet's",
                expected=f"{self.charter.numbers}: one a query and step",
                received=len(numbers),
            )
        sent = private(numbers, self.charter.fleet, self.noise)
        rows = min(
            self.batches.rows, self.charter.fleet.most_rows
        )  # only as many as count are reported
        return TaskReply(
            task.fleet,
            task.round,
            task.begin,
            self.device,
            rows,
            float(np.float32(loss)),
            self._packed(sent),
        )

    def _packed(self, sent: list[float]) -> Numbers:
        """Numbers as they travel: a secure fleet's all have one exponent."""
        fleet = self.charter.fleet
        if not fleet.secure:
            return pack(sent)
        exponent = exponent_of(fleet, len(sent))
        return pack(sent, exponent, exponent)

    def subspace(self) -> Frozen:
        """Return a subspace of an exact gradient of this device's rows.

        Raises:
            FleetError: the fleet has none, or the session is in another than the state.
        """
        if self.space is None or self.space.state.frozen != self.state.frozen:
            raise FleetError(
                "this fleet's directions come from its seed",
                expected="a charter with subspace: given",
            )
        return self.space.measure(self.batches.at)

    def adapter(self) -> Any:
        """Return the adapter of the state, as the session writes it."""
        load_vector(self.session, self.state.flat(), self.name)
        return self.session.adapter()
