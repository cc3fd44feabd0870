"""Linear layers with 4-bit weights (`ondevice::q4_linear`) against XNNPACK's float32, both in the
ExecuTorch runtime.

The peer multiplies the same, dequantised, weights. A measured value is one call: the mean over
`--calls` calls in a row; the two are measured in turns in one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import finish, interleaved, median, parse_args
from ondevice.runtime_ops import build, quantized, torch_ops

NEEDS = ("executorch",)
SHAPES = ((576, 1536), (1536, 576), (576, 576), (576, 192))


class Q4(nn.Module):
    """y = q4_linear(x)."""

    def __init__(self, packed: Tensor, scales: Tensor, mins: Tensor) -> None:
        super().__init__()
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("mins", mins)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.ondevice.q4_linear(x, self.packed, self.scales, self.mins, 32)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", default="128,256")
    parser.add_argument("--calls", type=int, default=20, help="calls a measured value")
    parser.add_argument("--threads", type=int, default=2)


def load(module: nn.Module, x: Tensor, partitioners: list[Any]) -> tuple[Callable[[], Tensor], int]:
    """A function that runs the lowered module on x, and the program's bytes."""
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    program = torch.export.export(module.eval(), (x,))
    lowered = to_edge_transform_and_lower(program, partitioner=partitioners).to_executorch()
    loaded = Runtime.get().load_program(lowered.buffer)
    method: Any = loaded.load_method("forward")
    return lambda _alive=(lowered, loaded): method.execute([x])[0], len(lowered.buffer)


def repeat(call: Callable[[], Any], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def measure(rows: int, inputs: int, outputs: int, args: Any) -> dict[str, Any]:
    """One shape."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    torch.manual_seed(0)
    x, packed = torch.randn(rows, inputs), quantized.quantize_q4(torch.randn(outputs, inputs))
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(quantized.dequantize_q4(*packed), requires_grad=False)
    ours, our_bytes = load(Q4(*packed), x, [])
    peer, peer_bytes = load(linear, x, [XnnpackPartitioner()])
    expected = x.double() @ linear.weight.double().T
    error = float((ours().double() - expected).norm() / expected.norm())
    calls = {"q4": repeat(ours, args.calls), "xnnpack": repeat(peer, args.calls)}
    seconds = interleaved(calls, args.repeats, warmup=2)
    times = {name: [value / args.calls for value in values] for name, values in seconds.items()}
    return {
        "rows": rows,
        "shape": f"{inputs} → {outputs}",
        "q4_s": times["q4"],
        "xnnpack_fp32_s": times["xnnpack"],
        "ratio": median(times["q4"]) / median(times["xnnpack"]),
        "q4_best_s": min(times["q4"]),
        "xnnpack_fp32_best_s": min(times["xnnpack"]),
        "error": error,
        "q4_bytes": our_bytes,
        "xnnpack_fp32_bytes": peer_bytes,
    }


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=21)
    torch_ops.register()
    build.load_executorch_ops()
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(args.threads)
    rows = [measure(int(rows), *shape, args) for rows in args.rows.split(",") for shape in SHAPES]
    columns = [
        {"key": "rows", "title": "Rows"},
        {"key": "shape", "title": "Layer"},
        {"key": "q4_s", "title": "q4_linear (ms)", "scale": 1e3, "digits": 2},
        {"key": "xnnpack_fp32_s", "title": "XNNPACK fp32 (ms)", "scale": 1e3, "digits": 2},
        {"key": "ratio", "title": "Ratio of medians", "digits": 2},
        {"key": "q4_bytes", "title": "q4 program (kB)", "scale": 1e-3, "digits": 0},
        {"key": "xnnpack_fp32_bytes", "title": "fp32 program (kB)", "scale": 1e-3, "digits": 0},
    ]
    title = f"4-bit linear layers in the ExecuTorch runtime, {args.threads} threads"
    finish(
        "runtime_ops/q4_linear",
        rows,
        args,
        columns,
        title=title,
        show_versions=["torch", "executorch"],
    )


if __name__ == "__main__":
    main()
