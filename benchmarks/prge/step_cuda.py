"""Time of a P-RGE step on a GPU: inner loop against sequential forwards, MeZO and the bare forward
(P-RGE, Figure 3).

With several queries (`--queries 2`) the outer loop, too, is on and off. Everything but MeZO is a
CUDA graph, on both sides of every ratio: launch gaps would flatter the doubled batch. Weights are
random; only shapes matter. Without a GPU the same steps run in eager, which checks the script
alone.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish, interleaved, median, parse_args, write_result

NEEDS = ("cuda",)
SHAPES: dict[str, tuple[int, ...]] = {
    "Llama2-7B": (4096, 11008, 32, 32, 32, 32000),
    "TinyLlama-1.1B": (2048, 5632, 22, 32, 4, 32000),
    "tiny": (64, 128, 2, 4, 2, 512),
}
"""Hidden, intermediate, layers, heads, key and value heads, vocabulary."""
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS_A_ROUND = 4096
COLUMNS = [
    {"key": "model", "title": "Shape"},
    {"key": "length", "title": "Tokens"},
    {"key": "batch", "title": "Batch"},
    {"key": "queries", "title": "q"},
    {"key": "mezo_s", "title": "MeZO full (ms)", "digits": 1, "scale": 1000},
    {"key": "sequential_s", "title": "Sequential (ms)", "digits": 2, "scale": 1000},
    {"key": "signs_s", "title": "Only the inner loop (ms)", "digits": 2, "scale": 1000},
    {"key": "queries_s", "title": "Only the outer loop (ms)", "digits": 2, "scale": 1000},
    {"key": "inner_s", "title": "All in one pass (ms)", "digits": 2, "scale": 1000},
    {"key": "speedup", "title": "Speed-up", "digits": 2},
    {"key": "forward_speedup", "title": "Bare forward's", "digits": 2},
    {"key": "overhead", "title": "Step / one forward of as many rows", "digits": 3},
    {"key": "inner_peak_bytes", "title": "Peak above weights (MB)", "digits": 0, "scale": 1e-6},
    {"key": "doubled_peak_bytes", "title": "Doubled inference (MB)", "digits": 0, "scale": 1e-6},
    {"key": "memory_ratio", "title": "Total / inference", "digits": 3},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="Llama2-7B,TinyLlama-1.1B")
    parser.add_argument("--lengths", default="64,128,256")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument(
        "--queries", type=int, default=1, help="directions of a step; above 1 the outer loop counts"
    )
    parser.add_argument("--replays", type=int, default=10, help="steps a measured round, at most")
    parser.add_argument("--mezo", action="store_true", help="also MeZO over all parameters")


def build(shape: str) -> Any:
    """A random bf16 model on the GPU, as `load_model` would give it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ondevice.models import SourceInfo, tiny_model
    from ondevice.models.load import wrap
    from ondevice.models.registry import family_for

    sizes: dict[str, Any] = dict(zip(FIELDS, SHAPES[shape], strict=True))
    config = LlamaConfig(**sizes, **{"attn_implementation": "sdpa", "tie_word_embeddings": False})
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    source = SourceInfo(f"random {shape}", None, known_sha256="0")
    return wrap(model.eval(), tiny_model().tokenizer, family_for("llama", shape), source)


class Graph:
    """Any function of fixed shapes as a CUDA graph; without a GPU the function itself."""

    def __init__(self, function: Any, replays: int) -> None:
        self.replays, self.replay = replays, torch.no_grad()(function)
        if DEVICE == "cpu":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            function()
            function()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            function()
        self.replay = self.graph.replay

    def __call__(self) -> None:
        for _ in range(self.replays):
            self.replay()


def peak_bytes(function: Any) -> int | None:
    """Peak CUDA memory above the weights while `function` runs in eager, its second time."""
    with torch.no_grad():
        function()  # cuBLAS takes its workspace in the first call
        if DEVICE == "cpu":
            return None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(shape: str, args: Any, save: Any) -> list[dict[str, Any]]:
    """All lengths and batches of one model shape."""
    from ondevice.methods.model_loss import evaluate_hidden
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.layout import AdapterLayout
    from ondevice.methods.prge.step import PrgeProgram
    from ondevice.nn.graph_loss import graph_token_nll, weight_tiles
    from ondevice.runtime_ops import torch_ops

    program_class: Any = PrgeProgram
    if DEVICE == "cuda":
        from ondevice.methods.prge.cuda import CudaPrgeProgram as program_class
    loaded = build(shape)
    weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
    family = loaded.family
    torch_ops.register()
    config = PrgeConfig(queries=args.queries, loss_tiles=4)
    loss = graph_token_nll(weight_tiles(family.head_weight, 4))
    layout = AdapterLayout.build(loaded.dims, config, 0)
    plain = {(e.layer, e.target): family.linear(e.layer, e.target) for e in layout.entries}
    inner = program_class(family, layout, config, torch.ops.ondevice.normal, loss)
    off = {"batch_signs": False, "batch_queries": False}
    settings = {"sequential": off}
    if args.queries > 1:
        settings |= {"signs": {"batch_queries": False}, "queries": {"batch_signs": False}}
    programs = {"inner loop": inner}
    for name, values in settings.items():
        programs[name] = copy.copy(inner)
        programs[name].config = config.model_copy(update=values)
    rows, copies = [], config.copies
    for length in map(int, args.lengths.split(",")):
        for batch in map(int, args.batches.split(",")):
            ids = torch.randint(0, loaded.dims.vocab, (batch, length), device=DEVICE)
            adapter, rate = (
                torch.zeros(layout.size, device=DEVICE),
                torch.full((1,), 1e-3, device=DEVICE),
            )
            seed, number = (torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2))
            state = (ids, ids, adapter, seed, number, rate)
            replays = max(2, min(args.replays, TOKENS_A_ROUND // (copies * ids.numel())))

            def step(program: Any, state: Any = state) -> None:
                state[2].copy_(program.train_step(*state)[2])

            def forward(times: int, ids: Any = ids) -> None:
                evaluate_hidden(family, ids.repeat(times, 1), ids.repeat(times, 1), loss)

            graphs = {
                name: Graph(lambda program=program: step(program), replays)
                for name, program in programs.items()
            }
            peak = {
                name: peak_bytes(lambda program=program: step(program))
                for name, program in programs.items()
            }
            for (layer, target), module in plain.items():
                wrapper = family.linear(layer, target)
                family.set_linear(layer, target, module)
                plain[layer, target] = wrapper
            graphs["doubled forward"] = Graph(lambda: forward(copies), replays)
            graphs["two forwards"] = Graph(lambda: [forward(1) for _ in range(copies)], replays)
            peak["inference"] = peak_bytes(lambda: forward(1))
            peak["doubled"] = peak_bytes(lambda: forward(copies))
            for (layer, target), wrapper in plain.items():
                plain[layer, target] = family.linear(layer, target)
                family.set_linear(layer, target, wrapper)
            seconds = interleaved(graphs, args.repeats, warmup=2)
            times = {
                name: [value / replays for value in values] for name, values in seconds.items()
            }
            pick = {name: median(values) for name, values in times.items()}
            row = {
                "model": shape, "length": length, "batch": batch, "queries": args.queries,
                "signs_s": times.get("signs"), "queries_s": times.get("queries"),
                "sequential_s": times["sequential"], "inner_s": times["inner loop"],
                "doubled_forward_s": times["doubled forward"], "two_forwards_s": times["two forwards"],
                "speedup": pick["sequential"] / pick["inner loop"],
                "forward_speedup": pick["two forwards"] / pick["doubled forward"],
                "overhead": pick["inner loop"] / pick["doubled forward"],
                "inner_peak_bytes": peak["inner loop"], "sequential_peak_bytes": peak["sequential"],
                "inference_peak_bytes": peak["inference"], "doubled_peak_bytes": peak["doubled"],
                "weights_bytes": weights, "replays": replays,
            }  # fmt: skip
            if (ours := peak["inner loop"]) is not None and (
                plain_peak := peak["inference"]
            ) is not None:
                row["memory_ratio"] = (weights + ours) / (weights + plain_peak)
            print(
                shape,
                length,
                batch,
                *(f"{name} {1000 * value:.2f} ms" for name, value in pick.items()),
                flush=True,
            )
            rows.append(row)
            save(rows)
            del graphs
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    if args.mezo:
        for (layer, target), module in plain.items():
            family.set_linear(layer, target, module)
        add_mezo(loaded, rows, args)
    return rows


def add_mezo(loaded: Any, rows: list[dict[str, Any]], args: Any) -> None:
    """MeZO's eager step at batch 1: four passes over all parameters."""
    from ondevice.methods.mezo.config import MezoConfig
    from ondevice.methods.mezo.torch import MezoSession

    session = MezoSession(loaded, MezoConfig(), 0)
    for row in rows:
        if row["model"] == rows[-1]["model"] and row["batch"] == 1:
            ids = np.random.default_rng(0).integers(0, loaded.dims.vocab, (1, row["length"]))
            seconds = interleaved(
                {"mezo": lambda ids=ids: session.step(ids, ids, 0, 0.0)}, min(args.repeats, 5)
            )
            row["mezo_s"] = seconds["mezo"]
            print(row["model"], row["length"], "mezo", median(seconds["mezo"]), flush=True)


def main() -> None:
    args = parse_args(__doc__, arguments)
    rows: list[dict[str, Any]] = []
    extra = {
        "columns": COLUMNS,
        "title": f"P-RGE step in bf16, q = {args.queries}, LoRA-FA r = 16 on q and v",
    }
    for shape in args.shapes.split(","):

        def save(new: list[dict[str, Any]], old: tuple[dict[str, Any], ...] = tuple(rows)) -> None:
            if args.out:
                write_result("prge/step_cuda", [*old, *new], args.out, **extra)

        rows += [{"mezo_s": None, **row} for row in measure(shape, args, save)]
        save([], tuple(rows))
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    finish("prge/step_cuda", rows, args, **extra)


if __name__ == "__main__":
    main()
