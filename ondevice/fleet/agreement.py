"""How a fleet's server combines replies: the part of the charter that never changes."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ondevice.core.config import StrictConfig
from ondevice.core.flags import Flag

Rule = Literal["mean", "trimmed_mean", "median"]
MOST_ROWS = 1 << 24
"""The most rows that a device of a secure fleet counts for: the sums of 65,535 devices stay below
2^63."""


class Agreement(StrictConfig):
    """The settings by which a server combines replies: part of the charter, so they never
    change."""

    local_steps: Annotated[int, Flag("--local-steps")] = Field(default=1, ge=1, le=65535)
    """Steps of a device before it replies."""

    seeds: Literal["shared", "own"] = "shared"
    """`shared`: all devices try the same directions, and an outcome is as large as one reply.
    `own`: each device has its own, so that a round has more directions and an outcome grows with
    the devices."""

    combine: Rule = "mean"
    """How replies are combined, for each number: a mean weighted by rows, a trimmed mean, or a
    median."""

    trim: float = Field(default=0.2, ge=0, lt=0.5)
    """Fraction of the replies that `trimmed_mean` drops at each end."""

    clip_norm: float | None = Field(default=None, gt=0)
    """Longest vector of numbers that a device may send; the device, and again the server, shorten
    longer ones."""

    noise_multiplier: float = Field(default=0.0, ge=0)
    """Gaussian noise that a device adds to each of its clipped numbers, in multiples of
    `clip_norm`."""

    most_rows: int = Field(default=10_000, ge=1, lt=1 << 32)
    """A device counts for at most so many rows in a mean, whatever it claims."""

    batch_share: float | None = Field(default=None, gt=0, le=1)
    """Fraction of its own rows that a device's step reads, one row at least, so that devices with
    many rows measure more exactly. None: every device reads as many as its owner says. A program
    reads the number that it was exported for."""

    server_rate: float = Field(default=1.0, gt=0)
    """Factor of the learning rate that the server applies to the combined numbers."""

    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Momentum of the outcomes, rounded to a multiple of 1/256."""

    decay_rounds: int | None = Field(default=None, ge=1)
    """Rounds over which the learning rate falls to zero, on a line; the fleet ends there. None: it
    stays."""

    open_rounds: int = Field(default=1, ge=1, le=64)
    """Rounds under way at once: a slow device may reply to an older one while it is open."""

    def batch_rows(self, held: int, otherwise: int) -> int:
        """Return the rows of a step of a device that holds `held`; `otherwise` without
        `batch_share`."""
        if self.batch_share is None:
            return otherwise
        return max(1, round(self.batch_share * held))

    secure: bool = False
    """Secure aggregation (SecAgg+): the server learns the sum of the devices' numbers, losses and
    rows, and no device's own. For `combine: mean` of `seeds: shared` with a `clip_norm`; a server
    over Flower, and three devices at least."""

    def longest(self, count: int) -> float:
        """Return the longest vector of `count` numbers that a device may send: noise makes a
        clipped one longer.

        Noise of a standard deviation s is longer than s (sqrt(count) + 4) once in more than a
        thousand vectors."""
        if self.clip_norm is None:
            return math.inf
        return self.clip_norm * (
            1 + self.noise_multiplier * (math.sqrt(count) + 4 if self.noise_multiplier else 0)
        )

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.seeds == "own" and self.combine != "mean":
            raise ValueError(
                f"combine {self.combine} compares the devices' numbers, so it needs seeds: shared"
            )
        if self.noise_multiplier and self.clip_norm is None:
            raise ValueError("noise_multiplier is in multiples of clip_norm: set clip_norm too")
        if self.open_rounds > 1 and self.momentum:
            raise ValueError("momentum needs rounds in order: open_rounds must be 1")
        if self.secure and (
            self.seeds != "shared" or self.combine != "mean" or self.clip_norm is None
        ):
            raise ValueError(
                "secure: sums need seeds: shared, combine: mean, and a clip_norm to fix their units"
            )
        if self.secure and (self.most_rows > MOST_ROWS or self.open_rounds > 1):
            raise ValueError(f"secure: most_rows is {MOST_ROWS} at most, and open_rounds 1")
        return self
