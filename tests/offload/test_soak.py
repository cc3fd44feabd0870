"""A slice of the soak, and what longer ones have found."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.methods.slideformer.reference import batches  # noqa: E402
from tests.offload import soak  # noqa: E402
from tests.offload.soak import Episode  # noqa: E402
from tests.sampling import ALL  # noqa: E402


def test_engines_whose_lanes_are_late_neither_hang_nor_race_nor_compute_something_else() -> None:
    """Two episodes with a disk, checkpoints and steps of 16 rows, and one with projected gradients,
    in micro-batches in the nightly job."""
    numbers = (120, 781, 7000008 if ALL else 1129)
    result = soak.soak(numbers, time.monotonic() + 600, print)
    assert result["failures"] == {} and result["episodes"] == 3
    assert (result["slideformer"], result["lsp"]) == (2, 1)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_norm_lives_until_it_has_left(tied: bool) -> None:
    """Tables that stay on the accelerator are updated there; their norm goes to the host after that, for clipping."""
    episode = slow(
        "d2h", 0.05, {"resident_tables": True, "max_grad_norm": 0.1, "clip": "layer"}, tied
    )
    assert soak.run(episode) is None


def slow(lane: str, mean_s: float, settings: dict[str, Any], tied: bool) -> Episode:
    """Three steps in which one lane is late."""
    episode = Episode(0)
    episode.method, episode.layers, episode.tied, episode.ranked = "slideformer", 2, tied, False
    episode.settings = {"timeout_s": soak.TIMEOUT_S, "threads": 1, **settings}
    episode.delays.mean_s = {**dict.fromkeys(soak.LANES, 0.0), lane: mean_s}
    episode.actions = [("step", batch) for batch in batches(3, 2, 6)]
    return episode
