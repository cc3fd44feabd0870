"""What a run of `benchmarks.prge.race` is: read from words such as 'diag q4 r64 adam
refresh100'."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SPACES = ("full", "grad-a", "act", "xs", "diag", "rand")
RULES = ("sgd", "momentum", "adam", "sign", "muon", "norm", "norm-momentum")
CALIBRATION_ROWS = 64


@dataclass(frozen=True)
class Variant:
    """One way to train; `parse` reads it from words such as 'xs q4 r16 adam refresh500'."""

    text: str
    space: str = "xs"
    rank: int = 16
    queries: int = 4
    batch: int = 0
    one_sided: bool = False
    rule: str = "sgd"
    loss: str = "answers"
    refresh: int = 0
    power: float = 0.0
    epsilon: float = 1e-2
    steps: int = 0
    calibration: int = CALIBRATION_ROWS
    exact: float = 0.0
    cone: float = 0.0
    pool: int = 0
    grow: int = 0
    top: int = 0
    first_order: bool = False

    @classmethod
    def parse(cls, text: str, steps: int, first_order_steps: int) -> Variant:
        """Read the words of a variant; a batch that is not named makes q times batch 16 (first
        order: 8 rows)."""
        fields: dict[str, Any] = {}
        numbers = {"q": "queries", "r": "rank", "b": "batch", "t": "steps", "refresh": "refresh", "power": "power",
                   "eps": "epsilon", "cal": "calibration", "exact": "exact", "cone": "cone", "pool": "pool",
                   "grow": "grow", "top": "top"}  # fmt: skip
        for word in text.split():
            match = re.fullmatch(rf"({'|'.join(numbers)})([0-9.e-]+)", word)
            if word in SPACES:
                fields["space"] = word
            elif word in RULES:
                fields["rule"] = word
            elif word in ("vocab", "answers"):
                fields["loss"] = word
            elif word == "onesided":
                fields["one_sided"] = True
            elif word == "fo":
                fields["first_order"] = True
            elif match:
                value = float(match[2])
                fields[numbers[match[1]]] = (
                    value if match[1] in ("power", "eps", "exact", "cone") else int(value)
                )
            else:
                raise ValueError(f"{text!r}: {word!r} is no word of a variant")
        first = fields.get("first_order", False)
        if fields.get("exact") and fields.get("space", "xs") not in ("xs", "diag"):
            raise ValueError(f"{text!r}: exact steps are of a small R of a gradient's subspace")
        if fields.get("pool") and (
            fields["pool"] < 2 or fields.get("one_sided") or fields.get("grow")
        ):
            raise ValueError(f"{text!r}: a pool has two directions or more, and no other queries")
        if fields.get("cone", 0.0) >= 1.0:
            raise ValueError(f"{text!r}: a cone's share of the axis is below 1")
        fields.setdefault("steps", first_order_steps if first else steps)
        if fields.get("pool"):
            fields["queries"] = 1
        fields.setdefault(
            "batch",
            8 if first else 4 if fields.get("pool") else max(1, 16 // fields.get("queries", 4)),
        )
        return cls(text, **fields)

    def queries_at(self, step: int) -> int:
        """Directions of a step: one before step `grow`."""
        return 1 if step < self.grow else self.queries

    def row_forwards(self, layers: int) -> float:
        """Rows that pass forward in a step of a model with so many layers, in the mean over all
        steps. A backward pass counts as two, through the top layers as their share of two;
        calibrations are spread over the steps."""
        if self.first_order:
            copies = 3.0
        else:
            early = min(self.grow, self.steps) / self.steps
            queries = early + (1 - early) * self.queries
            copies = (queries + 1 if self.one_sided else 2 * queries) + self.pool
            copies += 1 + 2 * min(self.top, layers) / layers if self.top else 0
        calibrations = 0.0
        if self.space in ("grad-a", "xs", "diag", "act"):
            calibrations = (
                3 * self.calibration * (1 + (self.steps - 1) // self.refresh if self.refresh else 1)
            )
        return self.batch * copies + calibrations / self.steps

    @property
    def small(self) -> bool:
        """Whether R is what moves, rank by rank, rather than B."""
        return self.space in ("xs", "diag", "rand")

    def width(self, outputs: int) -> int:
        """Return the columns of what moves: R's, one if R is diagonal, or B's."""
        if self.space == "diag":
            return 1
        return self.rank if self.small else outputs

    def group(self) -> tuple[Any, ...]:
        """Variants of one value run in the same pass."""
        return (self.small, self.space == "diag", self.rank, self.queries, self.batch, self.one_sided, self.loss,
                self.steps, self.epsilon, self.cone, self.pool, self.grow, self.top, self.first_order)  # fmt: skip
