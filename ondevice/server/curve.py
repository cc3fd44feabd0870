"""A job's curve for drawing, from its events: each step as it counts now, thinned out."""

from __future__ import annotations

import json
from typing import Any

from ondevice.server.store import Store

_STEP = ("step", "time_s", "loss", "learning_rate", "tokens_per_s", "peak_memory_bytes", "peak_device_bytes")
_EVALUATE = ("step", "time_s", "loss", "accuracy", "f1", "exact_match", "best")


def curve(store: Store, job: str, points: int) -> list[dict[str, Any]]:
    """Steps (at most `points`, the first and the last among them) and every evaluation, in order of the steps.

    A resumed run does steps again; the ones that count are the later ones.
    """
    steps: dict[int, dict[str, Any]] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    query = "SELECT data FROM events WHERE job = ? AND kind IN ('start', 'resume', 'step', 'evaluate') ORDER BY id"
    for row in store.rows(query, job):
        event = json.loads(row["data"])
        number = int(event.get("step", 0))
        if event["event"] == "step":
            steps[number] = {"event": "step", **{key: event.get(key) for key in _STEP}}
        elif event["event"] == "evaluate":
            evaluations[number] = {"event": "evaluate", **{key: event.get(key) for key in _EVALUATE}}
        else:
            steps = {key: value for key, value in steps.items() if key < number}
            evaluations = {key: value for key, value in evaluations.items() if key <= number}
    kept = [steps[number] for number in sorted(steps)]
    if len(kept) > points:
        kept = [kept[round(index * (len(kept) - 1) / (points - 1))] for index in range(points)]
    return sorted([*kept, *evaluations.values()], key=lambda event: (event["step"], event["event"] == "step"))
