"""Trained weights in the ordinary architecture, for a method that trains another one and can go back."""

from __future__ import annotations

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


def save_ordinary(
    session: Session, ordinary: OrdinaryModel, dataset: Dataset, pad: int, out: Path
) -> Ordinary:
    """Write the weights as the ordinary model they came from, and evaluate both networks on the same rows.

    Raises:
        TrainingError: the evaluation was abandoned.
    """
    figures = []
    for network in (session, ordinary):
        result = evaluate_dataset(network, dataset, pad, rows=ORDINARY_ROWS)
        if result is None:
            raise TrainingError("the evaluation was abandoned")
        figures.append(result)
    with atomic_directory(out, marker="config.json") as folder:
        ordinary.save_model(folder)
    return Ordinary(out, figures[0].loss, figures[1].loss, figures[0].rows)
