"""Time of a P-RGE step on a GPU: inner loop against sequential forwards, MeZO and the bare forward (P-RGE, Figure 3).

Everything but MeZO is a CUDA graph, on both sides of every ratio: launch gaps would flatter the doubled batch.
Weights are random; only shapes matter.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish, interleaved, median, parse_args

NEEDS = ("cuda",)
SHAPES: dict[str, dict[str, int]] = {
    "Llama2-7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "num_key_value_heads": 32, "vocab_size": 32000},
    "TinyLlama-1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                       "num_key_value_heads": 4, "vocab_size": 32000},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="Llama2-7B,TinyLlama-1.1B")
    parser.add_argument("--lengths", default="64,128,256")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--replays", type=int, default=10, help="steps a measured round")
    parser.add_argument("--mezo", action="store_true", help="also MeZO over all parameters")


def build(shape: str) -> Any:
    """A random bf16 model on the GPU, as `load_model` would give it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ondevice.models import SourceInfo, tiny_model
    from ondevice.models.load import wrap
    from ondevice.models.registry import family_for

    config = LlamaConfig(**SHAPES[shape], attn_implementation="sdpa", tie_word_embeddings=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return wrap(model.eval(), tiny_model().tokenizer, family_for("llama", shape), SourceInfo(f"random {shape}", None, known_sha256="0"))


class Graph:
    """Any function of fixed shapes as a CUDA graph."""

    def __init__(self, function: Any, replays: int) -> None:
        self.replays = replays
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            function()
            function()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            function()

    def __call__(self) -> None:
        for _ in range(self.replays):
            self.graph.replay()


def peak_bytes(function: Any) -> int:
    """Peak CUDA memory above the weights while `function` runs in eager."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(shape: str, args: Any) -> list[dict[str, Any]]:
    """All lengths and batches of one model shape."""
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.cuda import CudaPrgeProgram
    from ondevice.methods.prge.layout import AdapterLayout
    from ondevice.methods.whole_model import evaluate_hidden
    from ondevice.nn.graph_loss import graph_token_nll, weight_tiles
    from ondevice.runtime_ops import torch_ops

    loaded = build(shape)
    family = loaded.family
    torch_ops.register()
    config = PrgeConfig(queries=1, loss_tiles=4)
    loss = graph_token_nll(weight_tiles(family.head_weight, 4))
    layout = AdapterLayout.build(loaded.dims, config, 0)
    plain = {(e.layer, e.target): family.linear(e.layer, e.target) for e in layout.entries}
    inner = CudaPrgeProgram(family, layout, config, torch.ops.ondevice.normal, loss)
    sequential = copy.copy(inner)
    sequential.config = config.model_copy(update={"inner_loop": False})
    rows = []
    for length in map(int, args.lengths.split(",")):
        for batch in map(int, args.batches.split(",")):
            ids = torch.randint(0, loaded.dims.vocab, (batch, length), device="cuda")
            adapter = torch.zeros(layout.size, device="cuda")
            scalars = [torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")]
            rate = torch.full((1,), 1e-3, device="cuda")

            def step(program: Any, ids: Any = ids, adapter: Any = adapter, scalars: Any = scalars, rate: Any = rate) -> None:
                adapter.copy_(program.train_step(ids, ids, adapter, *scalars, rate)[2])

            def forward(times: int, ids: Any = ids) -> None:
                evaluate_hidden(family, ids.repeat(times, 1), ids.repeat(times, 1), loss)

            graphs = {"inner loop": Graph(lambda: step(inner), args.replays), "sequential": Graph(lambda: step(sequential), args.replays)}
            peak = {"inner": peak_bytes(lambda: step(inner)), "sequential": peak_bytes(lambda: step(sequential))}
            for (layer, target), module in plain.items():
                wrapper = family.linear(layer, target)
                family.set_linear(layer, target, module)
                plain[layer, target] = wrapper
            graphs["doubled forward"] = Graph(lambda: forward(2), args.replays)
            graphs["two forwards"] = Graph(lambda: (forward(1), forward(1)), args.replays)
            peak["inference"] = peak_bytes(lambda: forward(1))
            peak["doubled"] = peak_bytes(lambda: forward(2))
            for (layer, target), wrapper in plain.items():
                plain[layer, target] = family.linear(layer, target)
                family.set_linear(layer, target, wrapper)
            seconds = interleaved(graphs, args.repeats, warmup=2)
            times = {name: [value / args.replays for value in values] for name, values in seconds.items()}
            pick = {name: median(values) for name, values in times.items()}
            row = {
                "model": shape, "length": length, "batch": batch,
                "sequential_s": times["sequential"], "inner_s": times["inner loop"],
                "doubled_forward_s": times["doubled forward"], "two_forwards_s": times["two forwards"],
                "speedup": pick["sequential"] / pick["inner loop"],
                "forward_speedup": pick["two forwards"] / pick["doubled forward"],
                "overhead": pick["inner loop"] / pick["doubled forward"],
                "inner_peak_bytes": peak["inner"], "sequential_peak_bytes": peak["sequential"],
                "inference_peak_bytes": peak["inference"], "doubled_peak_bytes": peak["doubled"],
            }  # fmt: skip
            print({key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)
            rows.append(row)
            del graphs
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
            seconds = interleaved({"mezo": lambda ids=ids: session.step(ids, ids, 0, 0.0)}, min(args.repeats, 5))
            row["mezo_s"] = seconds["mezo"]
            print(row["model"], row["length"], "mezo", median(seconds["mezo"]), flush=True)


def main() -> None:
    args = parse_args(__doc__, arguments)
    rows: list[dict[str, Any]] = []
    for shape in args.shapes.split(","):
        rows += measure(shape, args)
        torch.cuda.empty_cache()
    columns = [
        {"key": "model", "title": "Shape"}, {"key": "length", "title": "Tokens"}, {"key": "batch", "title": "Batch"},
        {"key": "mezo_s", "title": "MeZO full (ms)", "digits": 1, "scale": 1000},
        {"key": "sequential_s", "title": "Sequential (ms)", "digits": 2, "scale": 1000},
        {"key": "inner_s", "title": "Inner loop (ms)", "digits": 2, "scale": 1000},
        {"key": "speedup", "title": "Speed-up", "digits": 2},
        {"key": "forward_speedup", "title": "Bare forward's", "digits": 2},
        {"key": "overhead", "title": "Step / doubled forward", "digits": 3},
        {"key": "inner_peak_bytes", "title": "Peak above weights (MB)", "digits": 0, "scale": 1e-6},
        {"key": "doubled_peak_bytes", "title": "Doubled inference (MB)", "digits": 0, "scale": 1e-6},
    ]  # fmt: skip
    for row in rows:
        row.setdefault("mezo_s", None)
    finish("prge_step_cuda", rows, args, columns=columns, title="P-RGE step in bf16, q = 1, LoRA-FA r = 16 on q and v")


if __name__ == "__main__":
    main()
