"""`... -m tests.api.flipped METHOD ROWS OUT STEPS FLIP`: a start of a run whose machine measures another thing on every
rank and at every start. FLIP is 0 or 1; a start with 1 resumes."""

from __future__ import annotations

import os
import sys
from itertools import count

import ondevice
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.training import choices


def flip(first: int) -> None:
    """Let each measurement give another value at each call, beginning with that of `first`."""
    calls = count(first)
    choices.has_bfloat16_units = lambda: next(calls) % 2 == 0
    SlideformerConfig.fixed = lambda self: self.decided(
        window=2 + next(calls) % 2,
        resident_layers=0,
        resident_tables=False,
        gradient_buffers=2 + next(calls) % 3,
    )


def main(method: str, rows: str, out: str, steps: str, start: str) -> None:
    rank = int(os.environ.get("RANK", 0))
    flip(rank + int(start))
    settings = {
        "model.source": "tiny:llama",
        "model.device": "cpu",
        "data.path": rows,
        "train.out": out,
    }
    settings |= {"method.name": method, "train.steps": int(steps), "train.batch_size": 2}
    ondevice.train(settings, resume=start == "1")


if __name__ == "__main__":
    main(*sys.argv[1:])
