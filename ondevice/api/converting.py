"""From a network that a method trains back to the ordinary architecture, with what the difference costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import atomic_directory
from ondevice.errors import TrainingError
from ondevice.train.evaluate import evaluate_dataset

if TYPE_CHECKING:
    from ondevice.data import Dataset

ORDINARY = "model-ordinary"
ROWS = 64
"""Rows on which both are evaluated."""


@dataclass(frozen=True)
class Ordinary:
    """The trained weights in the ordinary architecture.

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
        """As `--json` prints it, in `Trained.to_dict`."""
        return {
            "ordinary_model": str(self.path),
            "reversible_loss": self.trained_loss,
            "ordinary_loss": self.loss,
            "ordinary_loss_difference": self.loss - self.trained_loss,
            "ordinary_rows": self.rows,
        }


def convert_back(session: Any, loaded: Any, dataset: Dataset, pad: int, out: Path) -> Ordinary:
    """Write the weights as the ordinary model they came from, and evaluate both networks on the same rows.

    Raises:
        TrainingError: the rows give no loss.
    """
    from ondevice.models import save_tokenizer
    from ondevice.models.load import quiet_transformers

    losses = []
    for one in (session, session.ordinary_session):
        result = evaluate_dataset(one, dataset, pad, rows=ROWS)
        if result is None:
            raise TrainingError("the evaluation was given up")
        losses.append(result)
    with atomic_directory(out, marker="config.json") as folder, quiet_transformers():
        loaded.model.save_pretrained(folder)
        save_tokenizer(loaded, folder)
    return Ordinary(out, losses[0].loss, losses[1].loss, losses[0].rows)
