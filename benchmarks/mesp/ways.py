"""One way to a gradient, in a process of its own: a model of random 4-bit weights, one step, what
it needed.

python -m benchmarks.mesp.ways '{"way": "mesp", "layers": 24, "length": 256}'    one line of JSON
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.mesp import baselines_mlx as baselines
from ondevice.core.dims import ModelDims
from ondevice.methods.mesp.mlx.model import Model
from ondevice.methods.mesp.mlx.settings import Rope, Settings
from ondevice.methods.mesp.mlx.weights import (
    FINAL,
    TABLE,
    Weights,
    block_file,
    open_weights,
    resident_weights,
)
from ondevice.training.metrics import AnonymousPeak, anonymous_bytes

RATE, MEZO_SCALE = 1e-4, 1e-3


@dataclass(frozen=True)
class Spec:
    """A way that is measured; the shape is Qwen2.5-0.5B's if no width is given.

    Attributes:
        way: mesp, blockwise, checkpoint, autodiff, or mezo.
        tiled_loss: the cross-entropy in tiles of the vocabulary; else all logits at once.
        tiles: the MLP in tiles and the attention scores in chunks.
        clear: give memory back after every evaluation.
        limit: execute task by task, so that peaks repeat.
        folder: of streamed weights; they are in memory without one.
    """

    way: str
    layers: int = 24
    length: int = 256
    rank: int = 8
    vocab: int = 151936
    hidden: int = 896
    intermediate: int = 4864
    loss_tiles: int = 64
    tiled_loss: bool = True
    tiles: bool = True
    clear: bool = True
    limit: bool = True
    product: Any = "quantized"
    steps: int = 1
    folder: str = field(default="", compare=False)


def dims(spec: Spec) -> ModelDims:
    """Qwen2.5-0.5B, with heads of 64 numbers at any width."""
    heads = spec.hidden // 64
    return ModelDims(
        family="qwen2", layers=spec.layers, hidden=spec.hidden, intermediate=spec.intermediate,
        heads=heads, kv_heads=max(1, heads // 7), head_dim=64, vocab=spec.vocab,
        tied=True, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6, max_positions=32768,
    )  # fmt: skip


def packed(name: str, outputs: int, inputs: int) -> dict[str, Any]:
    """A random matrix in 4 bits with float32 scales, of about the size that a trained one has."""
    scale = 1 / (4 * inputs**0.5)
    return {
        f"{name}.weight": mx.random.randint(0, 2**31 - 1, (outputs, inputs // 8)).astype(mx.uint32),
        f"{name}.scales": mx.random.uniform(0.5 * scale, scale, (outputs, inputs // 64)),
        f"{name}.biases": mx.full((outputs, inputs // 64), -5.5 * scale),
    }


def arrays(sizes: ModelDims) -> Any:
    """Name and arrays of each of the model's files."""
    for layer in range(sizes.layers):
        block = {f"{name}.weight": mx.ones((sizes.hidden,)) for name in ("input_norm", "mlp_norm")}
        for target, (inputs, outputs) in sizes.linear_shapes.items():
            block |= packed(target, outputs, inputs)
            if sizes.linear_bias(target):
                block[f"{target}.bias"] = mx.zeros((outputs,))
        yield block_file(layer), block
    yield TABLE, packed("embedding", sizes.vocab, sizes.hidden)
    yield FINAL, {"final_norm.weight": mx.ones((sizes.hidden,))}


def weights(spec: Spec, settings: Settings) -> Weights:
    """In memory, or streamed from files that are made when they are not there."""
    mx.random.seed(0)
    if not spec.folder:
        return resident_weights(evaluated(settings.dims), settings)
    folder = Path(spec.folder) / f"{spec.layers}-{spec.hidden}-{spec.vocab}"
    if not (folder / FINAL).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for name, actual in arrays(settings.dims):
            mx.save_safetensors(str(folder / name), actual)
    return open_weights(folder, settings)


def evaluated(sizes: ModelDims) -> Any:
    """The same, computed one file at a time."""
    for name, actual in arrays(sizes):
        mx.eval(actual)
        yield name, actual


def model(spec: Spec) -> Model:
    """With an adapter that changes it, on all seven projections."""
    sizes = dims(spec)
    tiles: dict[str, Any] = (
        {} if spec.tiles else {"mlp_tiles": 1, "query_chunk_tokens": spec.length}
    )
    settings = Settings(
        sizes, tuple(sizes.linear_shapes), 2.0, Rope(sizes.rope_theta), bits=4, product=spec.product,
        **tiles,
    )  # fmt: skip
    frozen = weights(spec, settings)
    built = Model(settings, frozen, loss_tiles=spec.loss_tiles, clear=spec.clear)
    mx.random.seed(1)
    for adapter in built.adapter:
        for target, (inputs, outputs) in sizes.linear_shapes.items():
            adapter[f"{target}.A"] = mx.random.normal((spec.rank, inputs)) / (3 * inputs) ** 0.5
            adapter[f"{target}.B"] = 0.001 * mx.random.normal((outputs, spec.rank))
    mx.eval(built.adapter)
    return built


def step(spec: Spec, built: Model, ids: np.ndarray, number: int) -> float:
    """One step of SGD (the paper's) or of MeZO; the mean loss."""
    labelled = ids.size - len(ids)
    if spec.way == "mezo":
        return baselines.mezo(built, ids, ids, 0, number, MEZO_SCALE, RATE)

    def on_gradient(layer: int, target: str, a: Any, b: Any) -> None:
        held = built.adapter[layer]
        for side, gradient in (("A", a), ("B", b)):
            held[f"{target}.{side}"] = held[f"{target}.{side}"] - RATE * gradient
            mx.eval(held[f"{target}.{side}"])

    if spec.way in ("checkpoint", "autodiff"):
        options = {"checkpointed": spec.way == "checkpoint", "tiled": spec.tiled_loss}
        return baselines.whole(built, ids, ids, 1 / labelled, on_gradient, **options) / labelled
    ways = {"mesp": Model.forward_backward, "blockwise": baselines.blockwise}
    return ways[spec.way](built, ids, ids, 1 / labelled, on_gradient) / labelled


def trim() -> None:
    """Give what glibc keeps back to the system; nothing elsewhere."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        except (OSError, AttributeError):
            pass


def measure(spec: Spec) -> dict[str, Any]:
    """Peaks of the first step, and seconds of each."""
    if spec.limit:
        mx.set_memory_limit(1)
    idle = anonymous_bytes()
    built = model(spec)
    mx.clear_cache()
    gc.collect()
    trim()
    ids = np.random.default_rng(0).integers(0, spec.vocab, (1, spec.length))
    resident = mx.get_active_memory()
    mx.reset_peak_memory()
    seconds, processor, losses = [], [], []
    with AnonymousPeak() as anonymous:
        for number in range(spec.steps):
            start, used = time.perf_counter(), time.process_time()
            losses.append(step(spec, built, ids, number))
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - used)
    peak = mx.get_peak_memory()
    return {
        "peak_bytes": peak,
        "resident_bytes": resident,
        "step_bytes": peak - resident,
        "rss_anon_bytes": anonymous.peak_bytes - idle,
        "idle_bytes": idle,
        "time_s": seconds,
        "cpu_s": processor,
        "loss": losses[0],
    }


if __name__ == "__main__":
    print(json.dumps(measure(Spec(**json.loads(sys.argv[1])))), flush=True)
