"""An artifact's functions held against Python's own stages, step by step; and files of another version refused."""

from __future__ import annotations

from typing import Any

import numpy as np

LOSS_LIMIT, ADAPTER_LIMIT = 1e-5, 1e-4
"""Relative error of a loss, and largest error of a trained number in units of the learning rate's steps."""


def random_batch(session: Any, vocab: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of the program's shape, buckets in turn; prompts are not trained on, rows end early."""
    random = np.random.default_rng([session.seed, step])
    length = session.lengths_tokens[step % len(session.lengths_tokens)]
    ids = random.integers(0, vocab, (session.batch_size, length))
    labels = ids.copy()
    labels[:, : length // 4] = -100
    for row in range(1, session.batch_size):
        labels[row, length - row % (length // 2) :] = -100
    return ids, labels


def compare(session: Any, reference: Any, vocab: int, steps: int, rate: float, batches: Any = None) -> dict[str, Any]:
    """Run the same steps on both sides.

    Returns:
        `steps`, `max_rel_loss_error`, `max_rel_loss_error_replayed` (the same: nothing is replayed),
        `max_abs_adapter_error`, `evaluation_error`, and `ok`.
    """
    errors, given = [], batches or (random_batch(session, vocab, step) for step in range(steps))
    batch = None
    for step, batch in enumerate(given):
        ours, theirs = session.step(*batch, step, rate).loss, reference.step(*batch, step, rate).loss
        errors.append(abs(ours - theirs) / abs(theirs))
    assert batch is not None  # noqa: S101 - at least one step
    (ours, count), (theirs, same) = session.evaluate(*batch), reference.evaluate(*batch)
    evaluation = float(np.abs(ours - theirs).max() / np.abs(theirs).max()) if np.array_equal(count, same) else np.inf
    pairs = session.adapter().tensors, reference.adapter().tensors
    adapter = max(float(np.abs(value - pairs[1][name]).max()) for name, value in pairs[0].items())
    loss = max(errors)
    return {
        "steps": len(errors),
        "max_rel_loss_error": loss,
        "max_rel_loss_error_replayed": loss,
        "max_abs_adapter_error": adapter,
        "evaluation_error": evaluation,
        "ok": bool(max(loss, evaluation) <= LOSS_LIMIT and adapter <= ADAPTER_LIMIT),
    }
