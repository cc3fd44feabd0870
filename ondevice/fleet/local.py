"""A device's own rows in steps: on their loss, or on an objective over preferences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.data import Batches
from ondevice.training.preferences import PreferenceBatches, Preferences

if TYPE_CHECKING:
    from ondevice.core.session import Session, StepResult
    from ondevice.data import Dataset
    from ondevice.objectives import Objective
    from ondevice.training.loop import BatchSource
    from ondevice.training.rows import RunRows


def own_batches(
    made: Objective | None,
    session: Session,
    dataset: Dataset,
    batch_size: int,
    seed: int,
    pad: int,
    *,
    folder: Path | None = None,
    identity: dict[str, str] | None = None,
) -> Batches | PreferenceBatches:
    """Return the batches of a device's rows.

    Over preferences, the likelihoods before training are computed here: the session must be as it
    was opened.

    Args:
        made: the fleet's objective over preferences; None for the loss.
        batch_size: rows of a step, unless the session's program decides it.
        folder: stores the likelihoods before training; None: nothing does.
        identity: of the model that they are of.
    """
    if session.batch_size is not None:
        texts = 1 if made is None else made.texts
        batch_size = session.batch_size // texts
    order = Batches(dataset, batch_size, session.lengths_tokens, seed, pad)
    if made is None:
        return order
    preferences = Preferences(made, dataset, None, pad, identity or {})
    preferences.begin(session, folder)
    return PreferenceBatches(preferences, order)


def evaluated_preferences(
    made: Objective | None, session: Session, rows: RunRows
) -> Preferences | None:
    """Return what evaluates a fleet's adapter on preferences; None for the loss.

    Args:
        session: as it was opened.
        rows: those of all devices, and those to evaluate on.
    """
    if made is None:
        return None
    preferences = Preferences(made, rows.evaluation or rows.train, None, rows.pad, {})
    preferences.begin(session, None)
    return preferences


def local_step(
    session: Session, batches: BatchSource, number: int, step: int, learning_rate: float
) -> tuple[StepResult, int]:
    """Run one step of a device; return its result, and the rows that it read.

    Args:
        number: of the batch.
        step: of the generator.
    """
    batch = batches.at(number)
    if isinstance(batches, PreferenceBatches):
        result, _ = batches.preferences.step(session, batch, step, learning_rate)
        return result, len(batch.rows_of_data or ())
    return session.step(batch.ids, batch.labels, step, learning_rate), len(batch.ids)
