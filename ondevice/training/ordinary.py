"""Trained weights in the ordinary architecture, for a method that trains another one and can go back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import atomic_directory
from ondevice.core.errors import TrainingError
from ondevice.training.evaluate import evaluate_dataset

if TYPE_CHECKING:
    from ondevice.core.session import OrdinaryModel, Session
    from ondevice.data import Dataset

ORDINARY_ROWS = 64
"""Rows on which a network and its conversion to the ordinary architecture are compared."""


@dataclass(frozen=True)
class Ordinary:
    """Trained weights in the ordinary architecture, for a method that trains another one.

    Attributes:
        path: a folder that transformers loads without a modelling file.
        trained_loss: of the network that was trained, nats a token; `loss` of the ordinary one on the same rows.
        rows: how many.
    """

    path: Path
    trained_loss: float
    loss: float
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints, in `Trained.to_dict`."""
        return {
            "ordinary_model": str(self.path),
            "reversible_loss": self.trained_loss,
            "ordinary_loss": self.loss,
            "ordinary_loss_difference": self.loss - self.trained_loss,
            "ordinary_rows": self.rows,
        }


def compare(
    session: Session, ordinary: OrdinaryModel | None, dataset: Dataset, pad: int, out: Path
) -> Ordinary | None:
    """Evaluate the trained network and the ordinary model of its weights on the same rows, before
    either is written.

    Args:
        ordinary: None if the network has no ordinary form; then only its loss is looked at.
        out: the folder that the ordinary model will be written to.

    Raises:
        TrainingError: a loss is not a finite number, or the evaluation was abandoned.
    """
    figures = []
    for network in (session,) if ordinary is None else (session, ordinary):
        result = evaluate_dataset(network, dataset, pad, rows=ORDINARY_ROWS)
        if result is None:
            raise TrainingError("the evaluation was abandoned")
        if not math.isfinite(result.loss):
            raise TrainingError(
                "the trained model has no finite loss, so it is not saved",
                expected="a finite number",
                received=result.loss,
                hint="a smaller learning rate",
            )
        figures.append(result)
    if ordinary is None:
        return None
    return Ordinary(out, figures[0].loss, figures[1].loss, figures[0].rows)


def save_ordinary(ordinary: OrdinaryModel, out: Path) -> None:
    """Write the weights as the ordinary model that they came from."""
    with atomic_directory(out, marker="config.json") as folder:
        ordinary.save_model(folder)
