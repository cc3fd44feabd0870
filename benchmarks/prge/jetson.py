"""P-RGE over NF4 weights: inner loop against sequential forwards, seconds a step and peak memory
(P-RGE, Table 3).

python -m benchmarks.prge.jetson                                  both shapes, on the GPU at hand
python -m benchmarks.prge.jetson --shapes tiny --lengths 8 --batches 1,2    the script itself, without a GPU

Both sides are the artifact's own step as a CUDA graph over the same packed weights: the sequential
side dequantises every matrix in each of its two passes, the inner loop once. They run in turns in
one process. Weights are random and made on the GPU a layer at a time; only shapes matter. The
paper's figures are a Jetson Orin Nano's and stand next to those of the GPU that the caption names,
which is none.
"""

from __future__ import annotations

import argparse
import copy
import gc
from typing import Any

import torch

from benchmarks.common import finish, interleaved, median, parse_args, write_result

NEEDS = ("cuda", "bitsandbytes")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES: dict[str, dict[str, int]] = {
    "TinyLlama-1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                       "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000},
    "Llama2-7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
PAPER = {
    "TinyLlama-1.1B": ((0.69, 0.71, 0.89, 1.28, 0.70, 0.88, 1.27, 2.18),
                       (0.43, 0.49, 0.69, 1.15, 0.49, 0.69, 1.13, 2.00),
                       (1.62, 1.45, 1.29, 1.12, 1.42, 1.29, 1.12, 1.09)),
    "Llama2-7B": ((3.10, 3.37, 4.44, 6.46, 3.37, 4.44, 6.47, 10.83),
                  (1.69, 2.22, 3.22, 5.38, 2.22, 3.22, 5.37, 8.60),
                  (1.83, 1.52, 1.38, 1.20, 1.52, 1.38, 1.21, 1.26)),
}  # fmt: skip
"""Table 3: sequential and inner loop in seconds a step, and the ratio as printed, at lengths 64 and
128 and batches 1, 2, 4, 8."""
PLACES = [(length, batch) for length in (64, 128) for batch in (1, 2, 4, 8)]
TOKENS_A_ROUND = 4096
SPEEDUP_BAR, MEMORY_BAR_BYTES = 1.9, 4.5e9
COLUMNS = [
    {"key": "model", "title": "Shape"},
    {"key": "length", "title": "Tokens"},
    {"key": "batch", "title": "Batch"},
    {"key": "sequential_s", "title": "Sequential (ms)", "digits": 2, "scale": 1000},
    {"key": "inner_s", "title": "Inner loop (ms)", "digits": 2, "scale": 1000},
    {"key": "speedup", "title": "Speed-up", "digits": 2},
    {"key": "dequantise_s", "title": "Dequantising once (ms)", "digits": 2, "scale": 1000},
    {"key": "inner_peak_bytes", "title": "Peak, inner loop (GB)", "digits": 2, "scale": 1e-9},
    {"key": "sequential_peak_bytes", "title": "Peak, sequential (GB)", "digits": 2, "scale": 1e-9},
    {"key": "paper_sequential_s", "title": "Paper's Jetson: sequential (s)", "digits": 2},
    {"key": "paper_inner_s", "title": "Paper's Jetson: inner loop (s)", "digits": 2},
    {"key": "paper_speedup", "title": "Paper's Jetson: speed-up", "digits": 2},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", default="TinyLlama-1.1B,Llama2-7B")
    parser.add_argument("--lengths", default="64,128")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--replays", type=int, default=10, help="steps a measured round, at most")


def build(shape: str) -> Any:
    """A model of random NF4 matrices on the device, packed as each is made: the dense model never
    exists."""
    from torch import nn

    from ondevice.models.families.llama import FAMILY
    from ondevice.models.packed import empty_model
    from ondevice.nn.packed import Nf4Matrix, PackedLinear

    config = {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        **SHAPES[shape],
    }
    family = empty_model(FAMILY, config, torch.bfloat16, torch.device(DEVICE))

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) * 0.02

    for layer in range(family.dims.layers):
        for target in family.linear_targets:
            inputs, outputs = family.dims.linear_shape(target)
            family.set_linear(layer, target, PackedLinear(Nf4Matrix.pack(random(outputs, inputs))))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            fill(getattr(family.layer(layer), norm))
    fill(family.model.model.norm)
    for table in (family.embedding, family.model.lm_head):
        table.weight = nn.Parameter(
            random(family.dims.vocab, family.dims.hidden), requires_grad=False
        )
    family.model.eval().requires_grad_(False)
    release()
    return family


def fill(norm: Any) -> None:
    """A norm's weight is one."""
    norm.weight = torch.nn.Parameter(
        torch.ones(norm.weight.shape, device=DEVICE, dtype=torch.bfloat16)
    )


def release() -> None:
    """Give back what nothing refers to, so that a peak is that of what runs."""
    gc.collect()
    if DEVICE == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # of streams that earlier graphs were made on
        torch.cuda.empty_cache()


def peak_bytes(function: Any) -> int | None:
    """Peak of PyTorch's CUDA memory while `function` runs its second time; weights and all else
    included."""
    with torch.no_grad():
        if DEVICE == "cpu":
            return None
        function()  # Triton compiles, and cuBLAS chooses
        release()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


class Steps:
    """So many steps of a graph; the step number goes on, so that noise and adapter move."""

    def __init__(self, graph: Any, batch: tuple[torch.Tensor, torch.Tensor], replays: int) -> None:
        self.graph, self.batch, self.replays, self.number = graph, batch, replays, 0

    @torch.no_grad()
    def __call__(self) -> None:
        for _ in range(self.replays):
            self.graph(*self.batch, self.number, 1e-6)
            self.number += 1


def dequantise(family: Any) -> list[float]:
    """Seconds of making every matrix dense once, as a graph."""
    matrices = [
        family.linear(i, target)
        for i in range(family.dims.layers)
        for target in family.linear_targets
    ]
    matrices = [getattr(matrix, "base", matrix) for matrix in matrices]

    def once() -> None:
        for matrix in matrices:
            matrix.dense()

    run = once
    if DEVICE == "cuda":
        once()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()
        run = graph.replay
    return interleaved({"dequantise": run}, 5, warmup=2)["dequantise"]


def measure(shape: str, args: Any, save: Any) -> list[dict[str, Any]]:
    """All lengths and batches of one model shape."""
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.cuda import CudaPrgeProgram, GraphedStep
    from ondevice.methods.prge.layout import AdapterLayout
    from ondevice.methods.prge.step import PrgeProgram
    from ondevice.nn.graph_loss import graph_token_nll, weight_tiles
    from ondevice.runtime_ops import torch_ops

    torch_ops.register()
    family = build(shape)
    once_s = dequantise(family)
    release()
    config = PrgeConfig(queries=1)
    layout = AdapterLayout.build(family.dims, config, 0)
    loss = graph_token_nll(weight_tiles(family.head_weight, config.loss_tiles))
    kind = CudaPrgeProgram if DEVICE == "cuda" else PrgeProgram
    inner = kind(family, layout, config, torch_ops.noise("gaussian"), loss)
    sequential = copy.copy(inner)
    sequential.config = config.model_copy(update={"batch_signs": False})
    programs, rows = {"sequential": sequential, "inner": inner}, []
    for length in map(int, args.lengths.split(",")):
        for batch in map(int, args.batches.split(",")):
            ids = torch.randint(0, family.dims.vocab, (batch, length), device=DEVICE)
            adapter = torch.zeros(layout.size, device=DEVICE)
            scalars = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
            state: Any = (ids, ids, adapter, *scalars, torch.full((1,), 1e-6, device=DEVICE))
            peaks, losses = {}, {}
            for name, program in programs.items():
                peaks[name] = peak_bytes(
                    lambda program=program, state=state: program.train_step(*state)
                )
                with torch.no_grad():
                    losses[name] = program.train_step(*state)[0]
            apart = float(
                ((losses["inner"] - losses["sequential"]) / losses["sequential"]).abs().max()
            )
            assert apart < 2e-2, f"the two forms disagree: relative loss difference {apart:.3g}"
            replays = max(2, min(args.replays, TOKENS_A_ROUND // (2 * ids.numel())))
            graphs = {}
            for name, program in programs.items():
                with torch.no_grad():
                    graph = GraphedStep(program, ids, ids, adapter.clone(), 0)
                graphs[name] = Steps(graph, (ids, ids), replays)
            seconds = interleaved(graphs, args.repeats, warmup=2)
            times = {
                name: [value / replays for value in values] for name, values in seconds.items()
            }
            row = {
                "model": shape, "length": length, "batch": batch,
                "sequential_s": times["sequential"], "inner_s": times["inner"],
                "speedup": median(times["sequential"]) / median(times["inner"]),
                "dequantise_s": once_s,
                "inner_peak_bytes": peaks["inner"], "sequential_peak_bytes": peaks["sequential"],
                "loss_difference": apart, "replays": replays, **paper(shape, length, batch),
            }  # fmt: skip
            spread = " ".join(
                f"{name} {1000 * median(values):.2f} ms" for name, values in times.items()
            )
            print(
                shape,
                length,
                batch,
                spread,
                f"ratio {row['speedup']:.3f}",
                f"peak {peaks['inner']}",
                flush=True,
            )
            rows.append(row)
            save(rows)
            del graphs, graph
            release()
    return rows


def paper(shape: str, length: int, batch: int) -> dict[str, float | None]:
    """Table 3's figures of this place."""
    names = ("paper_sequential_s", "paper_inner_s", "paper_speedup")
    if shape not in PAPER or (length, batch) not in PLACES:
        return dict.fromkeys(names)
    return {
        name: figures[PLACES.index((length, batch))] for name, figures in zip(names, PAPER[shape])
    }


def bars(rows: list[dict[str, Any]]) -> list[str]:
    """Hold this run against the bars, one sentence each."""
    by_shape = {(row["model"], row["length"], row["batch"]): row for row in rows}
    sentences = []
    if row := by_shape.get(("Llama2-7B", 64, 1)):
        word = "met" if row["speedup"] >= SPEEDUP_BAR else "missed"
        sentences.append(
            f"Llama2-7B, 64 tokens, batch 1: {row['speedup']:.2f} times, the bar of {SPEEDUP_BAR} is {word}."
        )
    if (row := by_shape.get(("Llama2-7B", 128, 2))) and row["inner_peak_bytes"]:
        word = "met" if row["inner_peak_bytes"] <= MEMORY_BAR_BYTES else "missed"
        peak = row["inner_peak_bytes"] / 1e9
        sentences.append(
            f"Llama2-7B, 128 tokens, batch 2: {peak:.2f} GB at the peak, the bar of 4.5 GB is {word}."
        )
    return sentences


def main() -> None:
    args = parse_args(__doc__, arguments)
    rows: list[dict[str, Any]] = []
    title = "P-RGE step over NF4 weights, q = 1, LoRA-FA r = 16 on q and v"
    extra: dict[str, Any] = {"columns": COLUMNS, "title": title}
    if DEVICE == "cuda":
        extra["show_versions"] = ["torch", "bitsandbytes", "triton"]
    for shape in args.shapes.split(","):

        def save(new: list[dict[str, Any]], old: tuple[dict[str, Any], ...] = tuple(rows)) -> None:
            if args.out:
                write_result("prge/jetson", [*old, *new], args.out, **extra)

        rows += measure(shape, args, save)
        release()
    notes = [
        *bars(rows),
        "Peaks are of PyTorch's CUDA memory, weights included, the CUDA context not.",
    ]
    finish("prge/jetson", rows, args, notes=notes, **extra)


if __name__ == "__main__":
    main()
