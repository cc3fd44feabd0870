"""The predictions of rows, and their counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(frozen=True, repr=False)
class PredictedRow:
    """The prediction for one row.

    Attributes:
        line: number of the row, from 1.
        prediction: the label's text, the number of a regression, or the generated text; None if the
            row could not be predicted.
        probability: of the label; None for generated text.
        probabilities: of every label, in the order of the training; empty for generated text.
        reason: why the row could not be predicted.
        is_cut: the generated text reached its most tokens and did not end by itself.
        left_out_tokens: of a row that is longer than the model, the training or the program takes.
    """

    line: int
    prediction: str | float | None
    probability: float | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None
    is_cut: bool = False
    left_out_tokens: int = 0

    def __repr__(self) -> str:
        if self.prediction is None:
            return f"<row {self.line}: not predicted, {self.reason}>"
        shares = ", ".join(f"{name} {share:.2f}" for name, share in self.probabilities.items())
        return f"<row {self.line}: {self.prediction!r}{shares and f' of {shares}'}>"


@dataclass(frozen=True)
class Predictions(Sequence[PredictedRow]):
    """Predictions of rows, in their order.

    Attributes:
        rows: one for each row.
        labels: every label's text, in the order of the training; empty if rows have their own, or
            for generated text.
        compared: rows that have a label, too; `correct` of them were predicted.
        unseen_labels: how many rows have each label that was not trained; they are not compared.
        seconds_s: wall time.
    """

    rows: tuple[PredictedRow, ...]
    labels: tuple[str, ...] = ()
    compared: int = 0
    correct: int = 0
    seconds_s: float = 0.0
    unseen_labels: Mapping[str, int] = field(default_factory=dict)

    @overload
    def __getitem__(self, index: int) -> PredictedRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PredictedRow]: ...
    def __getitem__(self, index: int | slice) -> PredictedRow | Sequence[PredictedRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        accuracy = "" if self.accuracy is None else f", accuracy {self.accuracy:.4f}"
        unseen = sum(self.unseen_labels.values())
        more = f"; {unseen} rows have labels that were not trained" if unseen else ""
        return f"<Predictions: {len(self)} rows{accuracy}{more}>"

    @property
    def texts(self) -> list[str | float | None]:
        """The predictions only."""
        return [row.prediction for row in self.rows]

    @property
    def accuracy(self) -> float | None:
        """Share of the rows with labels that were predicted right; None without labels."""
        return self.correct / self.compared if self.compared else None

    def summary(self) -> dict[str, Any]:
        """Return the counts that `--json` prints."""
        failed = [row for row in self.rows if row.prediction is None]
        return {
            "rows": len(self),
            "predicted": len(self) - len(failed),
            "not_predicted": [{"row": row.line, "reason": row.reason} for row in failed],
            "cut": sum(row.is_cut for row in self.rows),
            "shortened": sum(row.left_out_tokens > 0 for row in self.rows),
            "labels": list(self.labels),
            "accuracy": self.accuracy,
            "correct": self.correct if self.compared else None,
            "compared": self.compared,
            "unseen_labels": dict(self.unseen_labels),
            "seconds_s": self.seconds_s,
        }
