"""Numbers a second of every form of the generator beside torch.randn, and what SplitMix64 saves over Philox4x32-10.

Philox is written here only, in the same ATen ops as `runtime_ops.graph`, to show why it was not chosen: in a
program without custom ops each instruction is a pass over memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import finish, interleaved, parse_args
from ondevice.runtime_ops import build, generator, graph, torch_ops

NEEDS = ("executorch",)
TENSOR = 0
LOW = 0xFFFFFFFF


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--count", type=int, default=614_400, help="elements of each query")
    parser.add_argument("--threads", type=int, default=2)


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., SC'11) on int64 tensors that hold 32-bit words: four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(10):
        if number:
            k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = graph._shift(p1, 32) ^ c1 ^ k0, p1 & LOW, graph._shift(p0, 32) ^ c3 ^ k1, p0 & LOW
    return [c0, c1, c2, c3]


def philox_normal(seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int) -> Tensor:
    """Normals from Philox: counter (element, step, query, tensor), key the seed; start and count multiples of 4."""
    element = torch.arange(start // 4, (start + count) // 4, dtype=torch.int64)[None, :]
    query = torch.arange(queries, dtype=torch.int64)[:, None]
    zero = torch.zeros_like(element * query)
    words = philox([element + zero, step & LOW, query + zero, step * 0 + tensor], [seed & LOW, graph._shift(seed, 32)])
    values = []
    for radius, angle in (words[:2], words[2:]):
        uniform = (radius.to(torch.float32) + 0.5) * 2.0**-32
        turn = ((angle & 0xFFFFFF).to(torch.float32) - 2.0**23) * (float(generator.TWO_PI) * 2.0**-24)
        size = (uniform.log() * -2.0).sqrt()
        values += [size * turn.cos(), size * turn.sin()]
    return torch.stack(values, dim=-1).reshape(queries, count)


class Draw(nn.Module):
    """One draw as a program."""

    def __init__(self, form: Callable[..., Tensor], queries: int, count: int) -> None:
        super().__init__()
        self.form, self.queries, self.count = form, queries, count

    def forward(self, seed: Tensor, step: Tensor) -> Tensor:
        return self.form(seed, step, TENSOR, self.queries, 0, self.count)


def lower(form: Callable[..., Tensor], args: Any, inputs: tuple[Tensor, Tensor]) -> tuple[Any, int]:
    """The program in the ExecuTorch runtime, and its number of kernel calls."""
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    program = torch.export.export(Draw(form, args.queries, args.count), inputs)
    lowered = to_edge_transform_and_lower(program, compile_config=graph.edge_compile_config()).to_executorch()
    loaded = Runtime.get().load_program(lowered.buffer)
    method: Any = loaded.load_method("forward")
    instructions = len(lowered.executorch_program.execution_plan[0].chains[0].instructions)
    return lambda _alive=(lowered, loaded): method.execute(list(inputs)), instructions


def check_philox() -> None:
    """Random123's known answers."""
    for fill, expected in ((0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
                           (LOW, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD))):  # fmt: skip
        words = philox([torch.tensor([fill])] * 4, [torch.tensor([fill])] * 2)
        assert tuple(int(w) for w in words) == expected, "this Philox is wrong"


def main() -> None:
    args = parse_args(__doc__, arguments)
    torch.set_num_threads(args.threads)
    check_philox()
    build.load_executorch_ops()
    torch_ops.register()
    inputs = (torch.tensor([1]), torch.tensor([2]))
    where = (TENSOR, args.queries, 0, args.count)
    ops = torch.ops.ondevice
    calls: dict[str, Callable[[], Any]] = {
        "torch.randn": lambda: torch.randn(args.queries, args.count),
        "normal, numpy": lambda: generator.normal(1, 2, *where),
        "normal, ATen in eager": lambda: graph.aten_normal(*inputs, *where),
        f"normal, op in eager ({torch_ops.generator_backend()})": lambda: ops.normal(*inputs, *where),
        "rademacher, numpy": lambda: generator.rademacher(1, 2, *where),
        "rademacher, ATen in eager": lambda: graph.aten_rademacher(*inputs, *where),
        f"rademacher, op in eager ({torch_ops.generator_backend()})": lambda: ops.rademacher(*inputs, *where),
    }
    instructions = {}
    for name, form in {
        "normal, ATen in ExecuTorch": graph.aten_normal,
        "Philox normal, ATen in ExecuTorch": philox_normal,
        "rademacher, ATen in ExecuTorch": graph.aten_rademacher,
        "normal, op in ExecuTorch": ops.normal,
        "rademacher, op in ExecuTorch": ops.rademacher,
    }.items():
        calls[name], instructions[name] = lower(form, args, inputs)
    if torch.cuda.is_available():
        there = tuple(value.cuda() for value in inputs)
        calls["torch.randn, CUDA"] = lambda: torch.randn(args.queries, args.count, device="cuda")
        calls["normal, Triton"] = lambda: ops.normal(*there, *where)
        calls["rademacher, Triton"] = lambda: ops.rademacher(*there, *where)
    numbers = args.queries * args.count
    seconds = interleaved(calls, args.repeats, warmup=2)
    rows = [
        {
            "form": name,
            "numbers_per_s": [numbers / value for value in values],
            "instructions": instructions.get(name),
        }
        for name, values in seconds.items()
    ]
    columns = [
        {"key": "form", "title": "Form"},
        {"key": "numbers_per_s", "title": "Numbers a second (10^6)", "scale": 1e-6, "digits": 0},
        {"key": "instructions", "title": "Instructions"},
    ]
    title = f"Generator, {numbers} numbers, {args.threads} threads"
    finish("generator", rows, args, columns, title=title, show_versions=["torch", "executorch"])


if __name__ == "__main__":
    main()
