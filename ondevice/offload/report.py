"""What overlapped in a step of the offload engine: seconds and bytes by lane, and a trace."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ondevice.offload.device import Spans

LANES = ("forward", "backward", "h2d", "d2h", "comm", "update", "disk")


@dataclass(frozen=True)
class Overlap:
    """One step, seconds and bytes. Sums are over what a lane was busy, not over wall time.

    Attributes:
        forward_s, backward_s: of the accelerator's computation; recomputation counts as backward.
        h2d_s, d2h_s: of copies; update_s: of AdamW on the host; disk_s: wall time with
            transfers to or from the disk under way.
        wall_s: from the step's begin to the next one's.
        idle_s: wall time in which the accelerator computed nothing.
        hiding_factor: backward_s / (d2h_s + max(update_s, disk_s)) (SlideFormer section 3.1); from
            1 on the update is hidden.
        bound: the lane that was busy longest.
        comm_s: of gathers and sums over ranks, including waits for other ranks; 0 in one process.
        simulated_gb_per_s: GB/s of a simulated bus (`bus_limit_gb_per_s`); None is the real one.
    """

    forward_s: float
    backward_s: float
    h2d_s: float
    d2h_s: float
    update_s: float
    disk_s: float
    wall_s: float
    idle_s: float
    hiding_factor: float
    h2d_bytes: int
    d2h_bytes: int
    bound: str
    comm_s: float = 0.0
    simulated_gb_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def overlap(spans: Spans, wall_s: float, simulated_gb_per_s: float | None = None) -> Overlap:
    """Sum up the spans of one step."""
    busy: dict[str, float] = dict.fromkeys(LANES, 0.0)
    sizes = {"h2d": 0, "d2h": 0}
    for lane, _, start, end, size in spans:
        busy[lane] += (end - start) * (lane != "disk")
        if lane in sizes:
            sizes[lane] += size
    busy["disk"] = _covered([(start, end) for lane, _, start, end, _ in spans if lane == "disk"])
    computed = busy["forward"] + busy["backward"]
    groups = {
        "compute": computed,
        **{lane: busy[lane] for lane in ("h2d", "d2h", "comm", "update", "disk")},
    }
    leaving = busy["d2h"] + max(busy["update"], busy["disk"])
    return Overlap(
        forward_s=busy["forward"],
        backward_s=busy["backward"],
        h2d_s=busy["h2d"],
        d2h_s=busy["d2h"],
        update_s=busy["update"],
        disk_s=busy["disk"],
        wall_s=wall_s,
        idle_s=max(0.0, wall_s - computed),
        hiding_factor=busy["backward"] / leaving if leaving else float("inf"),
        h2d_bytes=sizes["h2d"],
        d2h_bytes=sizes["d2h"],
        bound=max(groups, key=lambda lane: groups[lane]),
        comm_s=busy["comm"],
        simulated_gb_per_s=simulated_gb_per_s,
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one span runs: the disk works at several transfers at once."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def chrome_trace(spans: Spans, path: Path) -> None:
    """Write spans for chrome://tracing or Perfetto, microseconds from the first."""
    first = min((span[2] for span in spans), default=0.0)
    events = [
        {
            "name": name, "cat": lane, "ph": "X", "pid": 0, "tid": LANES.index(lane),
            "ts": round((start - first) * 1e6, 1), "dur": round((end - start) * 1e6, 1), "args": {"bytes": size},
        }
        for lane, name, start, end, size in spans
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(LANES)
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}) + "\n", encoding="utf-8")
