"""`ondevice.offload` in a loop of one's own, next to the engine's own step.

    python -m benchmarks.slideformer.loop --record       1.5B of Qwen2.5's shape, random, rows of 1,024 tokens

`own` is what `ondevice train` runs; `loop` is `engine(batch)`, `backward` and `step` over
transformers' own blocks, with the logits of the whole batch. Both have the same settings: nothing
on the GPU but a window of three layers. Seconds a step are of one run, after two steps that warm
up; `of_own` is the quotient of their medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish, parse_args
from ondevice.api.offload import offload
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.models.families.qwen2 import FAMILY
from ondevice.offload.engine import OffloadEngine

NEEDS = ("cuda",)
COLUMNS = [
    {"key": "variant", "title": "Variant"},
    {"key": "batch", "title": "Batch"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "tokens_per_s", "title": "Tokens/s", "digits": 0},
    {"key": "of_own", "title": "Speed, of the engine's own step", "digits": 3},
    {"key": "gpu_peak_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
]
SHAPE = {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
         "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip


def model_of(layers: int) -> Any:
    """Random weights on the CPU, bfloat16."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**SHAPE, num_hidden_layers=layers)
    model: Any = Qwen2ForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def seconds(run: Callable[[], None], repeats: int) -> list[float]:
    """Time steps after two that warm up."""
    found = []
    for at in range(repeats + 2):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if at > 1:
            found.append(time.perf_counter() - started)
    return found


def own(model: Any, ids: torch.Tensor, repeats: int) -> list[float]:
    """Time the engine's own step."""
    engine = OffloadEngine(FAMILY(model), SlideformerConfig().fixed(), "cuda")
    numbers = np.asarray(ids)
    steps = iter(range(1 << 20))

    def step() -> None:
        engine.step(numbers, numbers, next(steps), 1e-5)

    try:
        return seconds(step, repeats)
    finally:
        engine.close()


def loop(model: Any, ids: torch.Tensor, repeats: int) -> list[float]:
    """Time the same in a loop."""
    engine = offload(model, lr=1e-5, device="cuda")
    batch = {"input_ids": ids.cuda(), "labels": ids.cuda()}

    def step() -> None:
        engine.backward(engine(batch))
        engine.step()

    try:
        return seconds(step, repeats)
    finally:
        engine.close()


def measure(layers: int, rows: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row of each variant."""
    ids = torch.randint(0, SHAPE["vocab_size"], (rows, 1024))
    found = []
    for variant, run in (("own", own), ("loop", loop)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        times = run(model_of(layers), ids, repeats)
        row: dict[str, Any] = {"variant": variant, "layers": layers, "batch": rows}
        row["step_s"] = times
        row["tokens_per_s"] = rows * 1024 / median(times)
        row["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
        row["of_own"] = row["tokens_per_s"] / (
            found[0]["tokens_per_s"] if found else row["tokens_per_s"]
        )
        found.append(row)
        print(row, flush=True)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rows", default="4,16")


def main() -> None:
    args = parse_args(__doc__, arguments)
    rows: list[dict[str, Any]] = []
    for count in args.rows.split(","):
        rows += measure(args.layers, int(count), args.repeats)
    title = "SlideFormer: a loop of one's own"
    finish("slideformer/loop", rows, args, COLUMNS, title=title)


if __name__ == "__main__":
    main()
