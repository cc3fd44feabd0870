"""Numbers a second of every form of the generator next to torch.randn, and what SplitMix64 saves
over Philox4x32-10.

Forms whose package or device is not there are left out. A ratio is the median over the rounds of a
form's speed against torch.randn's in the same round, on the same device and with the same number of
threads. Philox is written here only, in the same ATen ops as `runtime_ops.graph`, to show why it
was not chosen: in a program without custom ops each instruction is a pass over memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import finish, interleaved, median, parse_args
from ondevice.runtime_ops import build, generator, graph, torch_ops

NEEDS = ("torch",)
TENSOR = 0
LOW = 0xFFFFFFFF


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument("--count", type=int, default=614_400, help="elements of each query")
    parser.add_argument("--threads", type=int, default=2, help="of the forms that can use several")


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10 (Salmon et al., SC'11) on int64 tensors that hold 32-bit words: four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(10):
        if number:
            k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            graph._shift(p1, 32) ^ c1 ^ k0,
            p1 & LOW,
            graph._shift(p0, 32) ^ c3 ^ k1,
            p0 & LOW,
        )
    return [c0, c1, c2, c3]


def philox_normal(
    seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int
) -> Tensor:
    """Normals from Philox: counter (element, step, query, tensor), key the seed; start and count
    multiples of 4."""
    element = torch.arange(start // 4, (start + count) // 4, dtype=torch.int64)[None, :]
    query = torch.arange(queries, dtype=torch.int64)[:, None]
    zero = torch.zeros_like(element * query)
    words = philox(
        [element + zero, step & LOW, query + zero, step * 0 + tensor],
        [seed & LOW, graph._shift(seed, 32)],
    )
    values = []
    for radius, angle in (words[:2], words[2:]):
        uniform = (radius.to(torch.float32) + 0.5) * 2.0**-32
        turn = ((angle & 0xFFFFFF).to(torch.float32) - 2.0**23) * (
            float(generator.TWO_PI) * 2.0**-24
        )
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
    lowered = to_edge_transform_and_lower(
        program, compile_config=graph.edge_compile_config()
    ).to_executorch()
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


@dataclass
class Form:
    """One row: what is measured, on how many threads (None: the GPU), and the torch.randn it is
    held against."""

    name: str
    threads: int | None
    call: Callable[[], Any]
    peer: str | None = None
    instructions: int | None = None


def on_cpu(
    args: Any, inputs: tuple[Tensor, Tensor], where: tuple[int, int, int, int]
) -> list[Form]:
    """Eager PyTorch with one thread and with `--threads`, and numpy."""
    ops, backend = torch.ops.ondevice, torch_ops.generator_backend()

    def threaded(threads: int, call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> None:
            torch.set_num_threads(threads)
            call()

        return run

    forms = []
    for threads in sorted({1, args.threads}):
        peer = f"torch.randn {threads}"
        for name, call, held in (
            ("torch.randn", lambda: torch.randn(args.queries, args.count), None),
            (f"normal, op in eager ({backend})", lambda: ops.normal(*inputs, *where), peer),
            (f"rademacher, op in eager ({backend})", lambda: ops.rademacher(*inputs, *where), None),
            ("normal, ATen in eager", lambda: graph.aten_normal(*inputs, *where), peer),
            ("rademacher, ATen in eager", lambda: graph.aten_rademacher(*inputs, *where), None),
        ):
            forms.append(Form(name, threads, threaded(threads, call), held))
    forms.append(Form("normal, numpy", 1, lambda: generator.normal(1, 2, *where), "torch.randn 1"))
    return [*forms, Form("rademacher, numpy", 1, lambda: generator.rademacher(1, 2, *where))]


def in_mlx(args: Any, where: tuple[int, int, int, int]) -> list[Form]:
    """MLX on its CPU device, which runs a graph on one thread; on Metal if that is the default
    device."""
    import mlx.core as mx

    from ondevice.runtime_ops import mlx_ops

    device, shape = "Metal" if mx.default_device() == mx.gpu else "CPU", [args.queries, args.count]
    peer = "torch.randn 1"
    return [
        Form(f"mx.random.normal, MLX {device}", 1, lambda: mx.eval(mx.random.normal(shape)), peer),
        Form(f"normal, MLX {device}", 1, lambda: mx.eval(mlx_ops.normal(1, 2, *where)), peer),
        Form(f"rademacher, MLX {device}", 1, lambda: mx.eval(mlx_ops.rademacher(1, 2, *where))),
    ]


def in_executorch(args: Any, inputs: tuple[Tensor, Tensor]) -> list[Form]:
    """Programs without and with the custom op in the ExecuTorch runtime."""
    build.load_executorch_ops()
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(args.threads)
    ops, forms = torch.ops.ondevice, []
    for name, form in {
        "normal, ATen in ExecuTorch": graph.aten_normal,
        "Philox normal, ATen in ExecuTorch": philox_normal,
        "rademacher, ATen in ExecuTorch": graph.aten_rademacher,
        "normal, op in ExecuTorch": ops.normal,
        "rademacher, op in ExecuTorch": ops.rademacher,
    }.items():
        call, instructions = lower(form, args, inputs)
        peer = f"torch.randn {args.threads}" if "normal" in name else None
        forms.append(Form(name, args.threads, call, peer, instructions))
    return forms


def on_cuda(
    args: Any, inputs: tuple[Tensor, Tensor], where: tuple[int, int, int, int]
) -> list[Form]:
    """Triton and torch.randn on the GPU."""
    ops, there = torch.ops.ondevice, tuple(value.cuda() for value in inputs)
    backend = torch_ops.generator_backend("cuda")
    return [
        Form(
            "torch.randn, CUDA", None, lambda: torch.randn(args.queries, args.count, device="cuda")
        ),
        Form(
            f"normal, CUDA ({backend})",
            None,
            lambda: ops.normal(*there, *where),
            "torch.randn, CUDA None",
        ),
        Form(f"rademacher, CUDA ({backend})", None, lambda: ops.rademacher(*there, *where)),
    ]


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=21)
    load = os.getloadavg()[0]
    check_philox()
    torch_ops.register()
    inputs = (torch.tensor([1]), torch.tensor([2]))
    where = (TENSOR, args.queries, 0, args.count)
    forms = on_cpu(args, inputs, where)
    if importlib.util.find_spec("mlx"):
        forms += in_mlx(args, where)
    if importlib.util.find_spec("executorch"):
        forms += in_executorch(args, inputs)
    if torch.cuda.is_available():
        forms += on_cuda(args, inputs, where)
    numbers = args.queries * args.count
    seconds = interleaved(
        {f"{form.name} {form.threads}": form.call for form in forms}, args.repeats, warmup=2
    )
    rows = []
    for form, values in zip(forms, seconds.values(), strict=True):
        peer = seconds.get(form.peer or "")
        rows.append(
            {
                "form": form.name,
                "threads": form.threads,
                "numbers_per_s": [numbers / value for value in values],
                "ratio": median(p / v for p, v in zip(peer, values, strict=True)) if peer else None,
                "instructions": form.instructions,
            }
        )
    columns = [
        {"key": "form", "title": "Form"},
        {"key": "threads", "title": "Threads"},
        {"key": "numbers_per_s", "title": "Numbers a second (10^6)", "scale": 1e-6, "digits": 0},
        {"key": "ratio", "title": "× torch.randn", "digits": 2},
        {"key": "instructions", "title": "Instructions"},
    ]
    shown = ["torch", "executorch", "mlx", *(["triton"] if torch.cuda.is_available() else [])]
    extra: dict[str, Any] = {
        "title": f"Generator, {numbers} numbers a call",
        "show_versions": shown,
    }
    if load > 0.5:  # of other processes: this one has not begun to compute
        note = f"Other processes shared the machine (load average {load:.1f} at the start): go by the ratios."
        extra["notes"] = [note]
    finish("runtime_ops/generator", rows, args, columns, **extra)


if __name__ == "__main__":
    main()
