"""Steps of one shape on the ranks that `torchrun` started.

torchrun --nproc-per-node 2 -m benchmarks.slideformer.ranks cuda SHAPE ROWS [LENGTH]
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from benchmarks.offload import model as om
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.engine import SlideformerEngine
from ondevice.offload.ranks import join

WARMUP, STEPS = 3, 8


def main(kind: str, shape: str, rows: int, length: int = 1024) -> None:
    """Print tokens a second of all ranks, the loss, memory, and rank 0's overlap, as one JSON object."""
    ranks, device = join(kind, 120.0)
    family = om.make_family(shape, om.random_block(shape, device))
    engine = SlideformerEngine(family, SlideformerConfig(timeout_s=120.0), device, ranks)
    batches = om.Batches(om.shape_dims(shape)[0].vocab, length)
    seconds, loss = [], 0.0
    for step in range(WARMUP + STEPS):
        ids, began = batches.get(rows, step), time.perf_counter()
        loss = engine.step(ids, ids, step, 1e-5)
        seconds.append(time.perf_counter() - began)
    engine.flush()
    if ranks.rank == 0:
        figures = {
            "ranks": ranks.world,
            "shape": shape,
            "rows": rows,
            "tokens_per_s": rows * length / float(np.median(seconds[WARMUP:])),
            "loss": loss,
            "host_bytes_rank": engine.host_bytes,
            "device_bytes": engine.device.peak_bytes(),
            "overlap": engine.overlap.to_dict() if engine.overlap else None,
        }
        print(json.dumps(figures), flush=True)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]))
