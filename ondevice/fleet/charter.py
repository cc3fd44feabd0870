"""The settings of a fleet, and the charter that heads its log and that every device checks."""

from __future__ import annotations

import hashlib
import json
import struct
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NaiveDatetime, model_validator

from ondevice.core.config import StrictConfig
from ondevice.core.errors import ConfigError, FleetError
from ondevice.core.flags import Flag
from ondevice.core.untrusted import parse_json
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.messages import MOST_NUMBERS, VERSION, Task
from ondevice.fleet.state import MOMENTUM_BITS, State, Steps
from ondevice.objectives import Objective, objective

MOST_CHARTER_BYTES = 1 << 20


LANE = 1 << 40
"""Distance between the steps of devices that have their own seeds."""
ADDED = ("batch_share", "secure", "decay_rounds")
"""Settings newer than the first charters; left out if they are the default, so a fleet keeps its
number."""
ADDED_HERE = ("optimizer", "subspace", "refresh_steps", "device_keys")
"""The same of the charter itself."""


class FleetConfig(Agreement):
    """A fleet's rounds, and how its server combines replies."""

    rounds: Annotated[int, Flag("--rounds")] = Field(default=100, ge=1)
    """Rounds of the fleet. A fleet that has ended can get more."""

    sample: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the devices that are asked in a round, drawn for each round."""

    least_devices: int = Field(default=1, ge=1)
    """A server waits for so many devices before a round."""

    wait_s: float = Field(default=600.0, gt=0)
    """Longest wait for the replies of a round, seconds."""

    date: NaiveDatetime | None = None
    """The date and time that the chat template sees on every device, if it writes them, as Llama
    3.2's does; by default those at which the fleet began."""

    def agreement(self) -> Agreement:
        """Return the part that the charter has."""
        return Agreement(**self.model_dump(include=set(Agreement.model_fields)))


class CommonCharter(StrictConfig):
    """The fields of every fleet's charter. Two fleets with one charter are one fleet."""

    kind_of_fleet: ClassVar[str]
    """For errors."""

    version: int = VERSION
    """Of the protocol."""

    model_source: str
    """The base model, as the server named it; a device may have it under another name."""

    model_sha256: str
    """Of the base model's weights."""

    method: dict[str, Any]
    """Settings of the training method."""

    data: dict[str, Any]
    """How rows become tokens: task, longest row, and the date if the chat template writes it. The
    rows themselves stay where they are."""

    seed: int = Field(ge=0, lt=2**63)
    """Of what the adapter begins with, and of the noise (zeroth order) or the order of rows (first
    order)."""

    learning_rate: float = Field(gt=0)
    """Of the local steps; messages of a zeroth-order fleet round it to float32."""

    objective: dict[str, Any] | None = None
    """The objective over preferences, by `name` and settings; None: the loss."""

    @model_validator(mode="after")
    def _version(self) -> Self:
        if self.version != VERSION:
            raise ValueError(f"version {self.version}: this is version {VERSION} of the protocol")
        return self

    @model_validator(mode="after")
    def _date(self) -> Self:
        if self.data.get("date") is not None:
            value = str(self.data["date"])
            if datetime.fromisoformat(value).isoformat() != value or len(value) > 19:
                raise ValueError("data.date: not a date and time such as 2026-03-01T09:30:00")
        return self

    @model_validator(mode="after")
    def _known_objective(self) -> Self:
        self.learns()
        return self

    def learns(self) -> Objective | None:
        """Return the objective over preferences; None if devices train on the loss.

        Raises:
            ConfigError: it is none that is known here, or has other settings.
        """
        if self.objective is None:
            return None
        settings = dict(self.objective)
        made = objective(str(settings.pop("name", "")), **settings)
        if any(not isinstance(value, int | float) for value in settings.values()):
            raise ConfigError("settings of an objective are numbers", received=str(settings)[:200])
        return made

    @property
    def date(self) -> datetime | None:
        """The present that the chat template sees on every device, if it writes the date."""
        value = self.data.get("date")
        if value is None:
            return None
        return datetime.fromisoformat(value)

    def values(self) -> dict[str, Any]:
        """Return what `to_bytes` writes; no objective if it is None, so that a fleet on the loss
        keeps its number."""
        values = self.model_dump(mode="json")
        if values["objective"] is None:
            del values["objective"]
        return values

    def to_bytes(self) -> bytes:
        """Return the charter as JSON with sorted keys, UTF-8."""
        return json.dumps(self.values(), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` gave.

        Raises:
            FleetError: it is not a charter, or of another version.
        """
        try:
            return cls.parse(parse_json(data, most_bytes=MOST_CHARTER_BYTES), "charter")
        except (ValueError, ConfigError) as error:
            said = getattr(error, "message", str(error))
            raise FleetError(
                f"not a valid charter of a {cls.kind_of_fleet}", received=said[:500]
            ) from None

    @property
    def id(self) -> int:
        """Number of the fleet in messages: the first four bytes of the charter's SHA-256,
        little-endian."""
        return int.from_bytes(hashlib.sha256(self.to_bytes()).digest()[:4], "little")


class Charter(CommonCharter):
    """The head of a zeroth-order fleet's log; all devices try the same directions of the same
    size."""

    kind_of_fleet = "fleet"

    size: int = Field(ge=1, lt=2**40)
    """Elements of the flat adapter."""

    noise: Literal["gaussian", "rademacher"]
    """Distribution of the directions."""

    queries: int = Field(ge=1, le=256)
    """Directions a step."""

    optimizer: Literal["sgd", "adam"] = "sgd"
    """The optimizer that takes the combined numbers: plain steps, or Adam over each local step's
    sum."""

    subspace: Literal["seed", "given"] = "seed"
    """Source of the frozen tensors: the seed, or a device's gradient, which refreshes bring."""

    refresh_steps: int | None = Field(default=None, ge=1)
    """Local steps between two refreshes; None keeps the first one's tensors."""

    fleet: Agreement
    """The settings by which the server combines replies."""

    device_keys: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(
        default=(), max_length=10_000
    )
    """SHA-256 of the public key of each device that may take part. Devices of a secure sum trust no
    other key, and replies by file must be signed by one of them. Empty: replies by file are not
    signed."""

    @model_validator(mode="after")
    def _sizes(self) -> Charter:
        if self.fleet.local_steps * self.queries > MOST_NUMBERS:
            raise ValueError(
                f"{self.fleet.local_steps} steps of {self.queries} queries are more than {MOST_NUMBERS} numbers"
            )
        if self.refresh_steps and self.refresh_steps % self.fleet.local_steps:
            raise ValueError(
                f"a subspace is taken every {self.refresh_steps} steps, which is not a multiple of "
                f"{self.fleet.local_steps} local steps: set method.refresh_every to a multiple of them"
            )
        odd = [name for name, value in (("momentum", 0.0), ("open_rounds", 1), ("seeds", "shared"))
               if getattr(self.fleet, name) != value]  # fmt: skip
        if self.subspace == "given" and self.objective is not None:
            raise ValueError(
                "an objective over preferences goes with subspace seed: a gradient's is the loss's"
            )
        if self.optimizer == "adam" and odd:
            raise ValueError(
                f"{odd[0]} goes with optimizer sgd: Adam takes the local steps one by one, in their order"
            )
        return self

    def values(self) -> dict[str, Any]:
        """Return what `to_bytes` writes; see `ADDED`."""
        values = super().values()
        for name in ADDED:
            if values["fleet"][name] == Agreement.model_fields[name].default:
                del values["fleet"][name]
        for name in ADDED_HERE:
            if values[name] in (Charter.model_fields[name].default, []):
                del values[name]
        return values

    @property
    def numbers(self) -> int:
        """Numbers of a reply."""
        return self.fleet.local_steps * self.queries

    def check_task(self, task: Task) -> None:
        """Check that a task is the one that this charter has for its round, so that no round can be
        asked twice.

        Raises:
            Refusal: another fleet, other steps, or another rate.
        """
        if task.fleet != self.id:
            raise Refusal(
                Code.OTHER_FLEET,
                "the task is of another fleet",
                expected=f"{self.id:08x}",
                received=f"{task.fleet:08x}",
            )
        first = self.first_step(task.round, 0)
        lanes = 0
        if self.fleet.seeds == "own":
            lanes = LANE
        ahead = task.first_step - first
        if (
            task.local_steps != self.fleet.local_steps
            or ahead < 0
            or (ahead % lanes if lanes else ahead)
        ):
            raise Refusal(
                Code.OTHER_TASK,
                "the task has other local steps than the charter",
                expected=f"{self.fleet.local_steps} steps from {first}",
                received=f"{task.local_steps} steps from {task.first_step}",
            )
        expected = struct.unpack("<f", struct.pack("<f", self.rate(task.round)))[0]
        if struct.unpack("<f", struct.pack("<f", task.learning_rate))[0] != expected:
            raise Refusal(
                Code.OTHER_TASK,
                "the task has another learning rate than the charter",
                expected=expected,
                received=task.learning_rate,
            )

    def state(self) -> State:
        """Return the state before the first round."""
        momentum = min(round(self.fleet.momentum * (1 << MOMENTUM_BITS)), (1 << MOMENTUM_BITS) - 1)
        steps = None
        if self.optimizer == "adam":
            rate = self.fleet.server_rate
            steps = Steps(
                self.fleet.local_steps, self.learning_rate, lambda number: rate * self.rate(number)
            )
        return State(self.size, self.seed, self.noise, self.queries, momentum, steps=steps)

    def rate(self, number: int) -> float:
        """Return the learning rate of a round's local steps."""
        decay = self.fleet.decay_rounds
        if decay is None:
            return self.learning_rate
        return self.learning_rate * max(0.0, 1.0 - number / decay)

    def factor(self, number: int) -> float:
        """Return what a round's combined numbers are multiplied by; Adam's rate is applied after
        its moments."""
        if self.optimizer == "adam":
            return self.learning_rate / self.queries
        return self.fleet.server_rate * self.rate(number) / self.queries

    def due(self, state: State) -> bool:
        """Return True if new frozen tensors come before the next round."""
        if self.subspace == "seed" or state.refreshed == state.round:
            return False
        every = self.refresh_steps
        return state.refreshed < 0 or (
            every is not None and state.round * self.fleet.local_steps % every == 0
        )

    @property
    def session_size(self) -> int:
        """Elements of the vector in a session's state: Adam's moments are behind it."""
        return self.size * (3 if self.optimizer == "adam" else 1)

    def first_step(self, number: int, lane: int) -> int:
        """Return the generator's step number of a round's first local step.

        Args:
            lane: the device's index in the round, from 0; used if devices have their own seeds.
        """
        step = number * self.fleet.local_steps
        if self.fleet.seeds == "own":
            return step + (lane + 1) * LANE
        return step
