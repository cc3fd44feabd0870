"""What a run of `benchmarks.prge.race` is: read from words such as 'diag q4 r64 adam refresh100'."""

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
    first_order: bool = False

    @classmethod
    def parse(cls, text: str, steps: int, first_order_steps: int) -> Variant:
        """Read the words of a variant; a batch that is not named makes q times batch 16 (first order: 8 rows)."""
        fields: dict[str, Any] = {}
        numbers = {"q": "queries", "r": "rank", "b": "batch", "t": "steps", "refresh": "refresh", "power": "power",
                   "eps": "epsilon", "cal": "calibration", "exact": "exact"}  # fmt: skip
        for word in text.split():
            match = re.fullmatch(r"(q|r|b|t|refresh|power|eps|cal|exact)([0-9.e-]+)", word)
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
                fields[numbers[match[1]]] = value if match[1] in ("power", "eps", "exact") else int(value)
            else:
                raise ValueError(f"{text!r}: {word!r} is no word of a variant")
        first = fields.get("first_order", False)
        if fields.get("exact") and fields.get("space", "xs") not in ("xs", "diag"):
            raise ValueError(f"{text!r}: exact steps are of a small R of a gradient's subspace")
        fields.setdefault("steps", first_order_steps if first else steps)
        fields.setdefault("batch", 8 if first else max(1, 16 // fields.get("queries", 4)))
        return cls(text, **fields)

    @property
    def copies(self) -> int:
        """Forward passes of a row in one step."""
        if self.first_order:
            return 1
        return self.queries + 1 if self.one_sided else 2 * self.queries

    @property
    def row_forwards(self) -> float:
        """Rows that pass forward in a step; a backward pass counts as two, calibrations are spread over the steps."""
        calibrations = 0.0
        if self.space in ("grad-a", "xs", "diag", "act"):
            calibrations = 3 * self.calibration * (1 + (self.steps - 1) // self.refresh if self.refresh else 1)
        return self.batch * (3 if self.first_order else self.copies) + calibrations / self.steps

    @property
    def small(self) -> bool:
        """Whether R is what moves, rank by rank, rather than B."""
        return self.space in ("xs", "diag", "rand")

    def width(self, outputs: int) -> int:
        """Return the columns of what moves: R's, one where R is diagonal, or B's."""
        if self.space == "diag":
            return 1
        return self.rank if self.small else outputs

    def group(self) -> tuple[Any, ...]:
        """Variants of one value run in the same pass."""
        return (self.small, self.space == "diag", self.rank, self.queries, self.batch, self.one_sided, self.loss,
                self.steps, self.epsilon, self.first_order)  # fmt: skip
