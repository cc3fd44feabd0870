"""MeSP on a GPU: time and memory of a step against automatic differentiation with checkpoints, and the longest row.

python -m benchmarks.mesp_cuda              an 8B-shape model of some layers, bfloat16 and NF4, each way to gradients
python -m benchmarks.mesp_cuda --longest    all layers in NF4: the longest row that a step fits with

Weights are random; every method has the same ones, the same loss, and AdamW on rank-8 pairs beside all seven linears.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np

from benchmarks.common import finish, parse_args

NEEDS = ("cuda",)
SHAPE = {"hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256, "tied": False}
COLUMNS = [
    {"key": "method", "title": "Method"},
    {"key": "weights", "title": "Weights"},
    {"key": "layers", "title": "Layers"},
    {"key": "tokens", "title": "Tokens"},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "ratio", "title": "× checkpoint"},
    {"key": "step_bytes", "title": "Step (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "peak_bytes", "title": "Peak (MiB)", "scale": 2**-20, "digits": 0},
]
METHODS = {
    "manual": {"gradients": "manual", "kernels": "torch"},
    "manual, liger": {"gradients": "manual", "kernels": "liger"},
    "blockwise": {"gradients": "blockwise"},
    "checkpoint": {"gradients": "checkpoint"},
}


def main() -> None:
    """Measure and write the table."""

    def more(parser: Any) -> None:
        parser.add_argument("--layers", type=int, default=8)
        parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
        parser.add_argument("--longest", action="store_true")

    args = parse_args(__doc__, more)
    if args.longest:
        rows = longest()
    else:
        rows = [row for bits in (None, 4) for row in compare(args.layers, args.tokens, bits, args.repeats)]
    finish("mesp_cuda", rows, args, columns=COLUMNS, title="MeSP on a GPU, 8B shape, one row, rank 8")


def model(layers: int) -> Any:
    """A random bfloat16 model, made on the GPU."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from ondevice.models.llama import Llama
    from ondevice.models.load import wrap
    from ondevice.models.source import SourceInfo
    from ondevice.models.tiny import tiny_tokenizer

    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=SHAPE["hidden"],
        intermediate_size=SHAPE["intermediate"],
        num_attention_heads=SHAPE["heads"],
        num_key_value_heads=SHAPE["kv_heads"],
        vocab_size=SHAPE["vocab"],
        tie_word_embeddings=False,
        max_position_embeddings=1 << 22,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    with torch.device("cuda"):
        made: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return wrap(made, tiny_tokenizer(), Llama, SourceInfo("random:8b", None, known_sha256="0"))


def batch(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, SHAPE["vocab"], (1, tokens))
    return ids, ids.copy()


def opened(loaded: Any, bits: int | None, **settings: Any) -> Any:
    """A session; `loss_chunk_tokens` bounds the logits of long rows for every method."""
    from ondevice.methods.mesp.torch import open_session
    from ondevice.methods.registry import method_config

    values = {"bits": bits, "loss_tiles": 8, "loss_chunk_tokens": 4096, **settings}
    return open_session(loaded, method_config("mesp", values), 0, "cuda")


def compare(layers: int, lengths: list[int], bits: int | None, repeats: int) -> list[dict[str, Any]]:
    """Every method at every length, in turns; the weights are shared, so only the steps differ."""
    import torch

    loaded = model(layers)
    first = opened(loaded, bits)
    sessions = {}
    for name, settings in METHODS.items():
        try:
            sessions[name] = opened(loaded, None, **settings)
        except Exception as error:
            print(f"{name}: {error}", flush=True)
            continue
        sessions[name].weights = sessions[name].passes.weights = first.weights
        sessions[name].passes.loss.head = first.weights
    torch.cuda.synchronize()
    rows = []
    for tokens in lengths:
        given, seconds, memory = batch(tokens), {name: [] for name in sessions}, {}
        for turn in range(repeats + 1):
            for name, session in sessions.items():
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                resident, started = torch.cuda.memory_allocated(), time.perf_counter()
                session.step(*given, turn, 1e-4)
                torch.cuda.synchronize()
                if turn:
                    seconds[name].append(time.perf_counter() - started)
                peak = torch.cuda.max_memory_allocated()
                memory[name] = (peak - resident, peak)
        base = float(np.median(seconds["checkpoint"]))
        for name in sessions:
            step, peak = memory[name]
            rows.append(
                {
                    "method": name,
                    "weights": "NF4" if bits else "bfloat16",
                    "layers": layers,
                    "tokens": tokens,
                    "step_s": seconds[name],
                    "ratio": float(np.median(seconds[name])) / base,
                    "step_bytes": step,
                    "peak_bytes": peak,
                }
            )
            print(rows[-1], flush=True)
    return rows


def longest(limit_bytes: int = 80 * 10**9) -> list[dict[str, Any]]:
    """All 32 layers in NF4: double the row until a step passes `limit_bytes` or the GPU's memory."""
    import torch

    from ondevice.errors import DoesNotFitError

    loaded, rows = model(32), []
    first = opened(loaded, 4)
    for name, settings in (
        ("checkpoint", {"gradients": "checkpoint"}),
        ("manual", {}),
        ("manual, inputs on the host", {"activations": "host"}),
    ):
        session = opened(loaded, None, loss_chunk_tokens=2048, **{k: v for k, v in settings.items()})
        session.weights = session.passes.weights = first.weights
        session.passes.loss.head = first.weights
        tokens, best = 32768, None
        while tokens <= 1 << 20:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            try:
                session.torn = False
                session.step(*batch(tokens), 0, 1e-4)
            except (DoesNotFitError, torch.OutOfMemoryError) as error:
                print(name, tokens, str(error).splitlines()[0], flush=True)
                break
            seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated()
            print(name, tokens, f"{seconds:.1f} s, {peak / 2**30:.1f} GiB", flush=True)
            if peak > limit_bytes:
                break
            best = {"method": name, "weights": "NF4", "layers": 32, "tokens": tokens, "step_s": [seconds],
                    "ratio": None, "step_bytes": None, "peak_bytes": peak}  # fmt: skip
            if seconds > 100:
                break
            tokens *= 2
        if best is not None:
            rows.append(best)
    return rows


if __name__ == "__main__":
    main()
