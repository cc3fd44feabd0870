"""Steps on preference pairs, as one process or several take them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.core.session import Following, Leading
from ondevice.objectives import Scores, objective

Batch = tuple[np.ndarray, np.ndarray]
BETA = 0.1


def prefer(nll: np.ndarray) -> tuple[float, np.ndarray]:
    """Weigh the rows for DPO; every even row is chosen over the one after it."""
    likelihoods = -nll.astype(np.float64).reshape(-1, 2)
    tokens = np.ones(likelihoods.shape, np.int64)
    graded = objective("dpo", beta=BETA).grade(
        Scores(likelihoods, np.zeros(likelihoods.shape), tokens)
    )
    return graded.loss, -graded.coefficients.reshape(-1)


def learned(one: Any, data: list[Batch]) -> dict[str, Any]:
    """Return what the process that leads found: each step's loss, and the rows' losses after them.

    Any other process returns what that one sends it.
    """
    if isinstance(one, Following):
        return one.follow()
    losses = [one.weighted_step(*batch, prefer, step, 1e-3).loss for step, batch in enumerate(data)]
    found = {"losses": losses, "nll": one.evaluate(*data[0])[0]}
    if isinstance(one, Leading):
        one.finish(found)
    else:
        one.close()
    return found


def compare(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    """Hold several processes against one: only the order of additions differs.

    A pair's loss is off by at most beta times the errors of its two rows.
    """
    np.testing.assert_allclose(ours["nll"], alone["nll"], rtol=1e-5)
    off = BETA * 2 * 1e-5 * alone["nll"].max()
    np.testing.assert_allclose(ours["losses"], alone["losses"], rtol=0, atol=off)
    assert abs(alone["losses"][-1] - alone["losses"][0]) > 10 * off
