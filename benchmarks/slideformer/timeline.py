"""One step of the offload engine as a picture: what computation, copies and updates did, and when.

    python -m benchmarks.slideformer.timeline SPANS.json OUT.png

SPANS.json is `--trace`'s of `benchmarks.slideformer.step`. Spans of the step before that reach into
this one are lighter.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LANES = ("forward", "backward", "h2d", "d2h", "comm", "update", "disk")
TITLES = {
    "forward": "forward", "backward": "backward", "h2d": "to the GPU", "d2h": "to the host", "update": "update (CPU)",
    "comm": "ranks", "disk": "disk",
}  # fmt: skip
COLORS = {
    "forward": "#4477aa", "backward": "#225588", "h2d": "#66aa55", "d2h": "#ccaa33", "update": "#cc6677",
    "comm": "#aa3377", "disk": "#999999",
}  # fmt: skip


def draw(document: dict[str, Any], path: Path) -> None:
    """Write the picture of `document`: title, wall_s, spans (lane, name, start and end in seconds,
    bytes)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    spans = [(lane, name, start, end) for lane, name, start, end, _ in document["spans"]]
    lanes = [lane for lane in LANES if any(span[0] == lane for span in spans)]
    zero = min(start for lane, _, start, _ in spans if lane == "forward")
    wall = document["wall_s"]
    scale, unit = (1.0, "s") if wall >= 0.5 else (1e3, "ms")
    figure, axes = pyplot.subplots(figsize=(12, 0.6 * len(lanes) + 1.4), dpi=130)
    for row, lane in enumerate(lanes):
        for actual, name, start, end in spans:
            if actual != lane:
                continue
            left, width = (start - zero) * scale, (end - start) * scale
            before = lane in ("update", "d2h", "disk") and start < zero
            axes.barh(
                row, width, left=left, height=0.72, color=COLORS[lane], alpha=0.45 if before else 1.0,
                edgecolor="white" if width > 0.006 * wall * scale else COLORS[lane], linewidth=0.4,
            )  # fmt: skip
            number = name.removeprefix("layer ")
            if width > 0.012 * wall * scale and len(number) <= max(
                2, int(90 * width / (wall * scale))
            ):
                axes.text(
                    left + width / 2,
                    row,
                    number,
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white",
                    clip_on=True,
                )
    ends = [(end - zero) * scale for _, _, _, end in spans]
    begins = [(start - zero) * scale for _, _, start, _ in spans]
    left, right = -0.15 * wall * scale, 1.15 * wall * scale
    axes.set_xlim(min(0.0, max(min(begins), left)), max(wall * scale, min(max(ends), right)))
    axes.set_yticks(range(len(lanes)), [TITLES[lane] for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} since the forward pass began; numbers are layers")
    axes.set_title(document["title"], fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spans", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.spans.read_text()), args.picture)


if __name__ == "__main__":
    main()
