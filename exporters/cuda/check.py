"""An artifact's session held against the same method over plain linear layers with the same rounded weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
LOSS_LIMIT = {"cpu": 1e-6, "float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3}
"""Largest relative error of a loss: on a CPU both sides compute the same, on a GPU in another order."""


def compare(session: Any, reference: Any, batches: Iterable[Batch], learning_rate: float, dtype: str) -> dict[str, Any]:
    """Run the same steps on both sides; before each step the reference takes the session's state.

    Returns:
        `steps`, `max_rel_loss_error`, `max_rel_loss_error_replayed` (the same: states are shared),
        `max_abs_adapter_error` after a step, `evaluation_error`, `backend`, `ok`.
    """
    errors, adapter_errors, batch = [], [], None
    for step, batch in enumerate(batches):
        reference.load_state(session.state())
        ours, theirs = (side.step(*batch, step, learning_rate) for side in (session, reference))
        errors.append(_relative(ours.losses, theirs.losses))
        pairs = session.adapter().tensors, reference.adapter().tensors
        adapter_errors.append(max(float(np.abs(value - pairs[1][name]).max()) for name, value in pairs[0].items()))
    assert batch is not None  # noqa: S101 - at least one step
    reference.load_state(session.state())
    (ours, count), (theirs, same) = session.evaluate(*batch), reference.evaluate(*batch)
    evaluation = _relative(ours, theirs) if np.array_equal(count, same) else float("inf")
    loss, adapter = max(errors), max(adapter_errors)
    limit = LOSS_LIMIT["cpu" if session.backend == "torch-cpu" else dtype]
    within = loss <= limit and evaluation <= limit
    if session.backend == "torch-cpu":
        within = within and adapter <= LOSS_LIMIT["cpu"]
    return {
        "steps": len(errors),
        "max_rel_loss_error": loss,
        "max_rel_loss_error_replayed": loss,
        "max_abs_adapter_error": adapter,
        "evaluation_error": evaluation,
        "backend": session.backend,
        "ok": bool(within and np.isfinite(adapter)),
    }


def _relative(received: Any, expected: Any) -> float:
    """Largest relative error; NaN where either side is no number, which is below no limit."""
    ours, theirs = np.asarray(received, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    return float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-12)))
