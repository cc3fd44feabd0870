"""The result of a run: its figures, its history and its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.process import path_of
from ondevice.training.metrics import RunHistory, RunResult
from ondevice.training.ordinary import Ordinary
from ondevice.training.picture import draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = (
    "steps", "first_loss", "final_loss", "step_time_s", "tokens_per_s", "peak_memory_bytes", "peak_device_bytes",
    "overlap", "experts", "interrupted", "stopped_early",
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Trained:
    """A finished or interrupted run and its files.

    It stands for its folder: `ondevice.predict(run, rows)`.

    Attributes:
        result: losses, times, memory, evaluation.
        adapter: folder of the adapter after the last step, None for a full-parameter method.
        best_adapter: folder of the adapter with the best evaluation, if there was more than one.
        model: folder of the trained model, for a full-parameter method.
        problems: rows that were not used.
        data: what was read, `train` and maybe `evaluation`: sequences, rows left out by reason, rows and tokens cut.
        ordinary: what came of the conversion back to the ordinary architecture, for a method that trains another.
        out: the run's folder.
        method: name of the method; empty for an exported program.
        history: losses and learning rates by step, and evaluations.
    """

    result: RunResult
    adapter: Path | None
    best_adapter: Path | None
    model: Path | None
    problems: tuple[Any, ...]
    ordinary: Ordinary | None = None
    data: dict[str, Any] = field(default_factory=dict)
    out: Path = Path()
    method: str = ""
    history: RunHistory = field(default_factory=RunHistory)

    def plot(self, out: str | Path | None = None) -> Figure:
        """Draw losses and evaluations; a notebook shows the figure that this returns.

        Args:
            out: a file to write as well; its suffix says the format (.png, .svg, .pdf).

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        figure = draw({self.out.name or self.method: self.history})
        if out is not None:
            figure.savefig(path_of(out, "the picture"))
        return figure

    def __fspath__(self) -> str:
        return str(self.out)

    def __repr__(self) -> str:
        result = self.result
        parts = [f"{result.steps} steps" + f" of {self.method}" * bool(self.method)]
        if result.interrupted:
            parts.append(f"stopped by {result.signal}")
        parts.append(f"loss {result.first_loss:.4f} -> {result.final_loss:.4f}")
        if result.evaluation is not None:
            parts.append(f"evaluation: {result.evaluation.summary()}")
        return f"Trained({', '.join(parts)}; {str(self.adapter or self.model or self.out)!r})"

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        values = {name: getattr(self.result, name) for name in FIGURES}
        evaluation = self.result.evaluation
        values["evaluation"] = evaluation and evaluation.figures()
        for name in ("adapter", "best_adapter", "model"):
            path = getattr(self, name)
            values[name] = path and str(path)
        if self.ordinary is not None:
            values |= self.ordinary.to_dict()
        left_out = self.data.get("train", {}).get("left_out", {})
        return {**values, "unused_rows": sum(left_out.values()), "data": self.data}
