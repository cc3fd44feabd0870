"""One AdamW step of flat arrays on the CPU: the fused pass of `runtime_ops.layer_adam` against
torch's fused AdamW.

The peer is what a PyTorch program does between bfloat16 gradients and bfloat16 parameters: convert
the gradient to float32, `torch._fused_adamw_`, convert the parameter to bfloat16. The prediction is
the bytes that a step has to move over the bandwidth of `x.add_(y)` (reads two float32 arrays,
writes one in place), measured in the same turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import finish, interleaved, median, parse_args
from ondevice.runtime_ops import layer_adam as la
from ondevice.runtime_ops.adam_undo import CODE_BYTES

NEEDS = ("torch",)
PEER_BYTES = (
    6 + 28 + 6
)  # gradient bfloat16 to float32; g, p, m, v read and p, m, v written; master to bfloat16
TRIAD_BYTES = 12
FORMS = (("plain", "float32"), ("split", "float32"), ("split", "bfloat16"), ("split", "int8"))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parameters", type=int, default=64 * 2**20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--calls", type=int, default=1, help="steps a measured value")


def make(master: Tensor, form: str, kind: str) -> la.HostState:
    """A state in one form that holds `master`, after its first touch."""
    count, moments = master.numel(), la.Moments.empty(master.numel(), kind)
    high, low = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.uint16)
    if form == "plain":
        return la.HostState(master.clone(), high, None, moments)
    la.split_(master, high, low, moments)
    return la.HostState(None, high, low, moments)


def stepper(step: Callable[[la.AdamStep], None], calls: int) -> Callable[[], None]:
    """Takes `calls` steps whose numbers go on."""
    number = 0

    def run() -> None:
        nonlocal number
        for _ in range(calls):
            number += 1
            step(la.AdamStep(1e-4, weight_decay=0.01, step=number))

    return run


def measure(args: Any) -> list[dict[str, Any]]:
    """A row for the peer and for each form."""
    torch.manual_seed(0)
    master, grad = (
        torch.randn(args.parameters).mul_(0.02),
        torch.randn(args.parameters).mul_(1e-3).bfloat16(),
    )
    scratch, plain = torch.zeros(args.parameters), make(master, "plain", "float32")

    def triad() -> None:
        for _ in range(args.calls):
            master.add_(scratch)

    calls: dict[str, Callable[[], None]] = {
        "triad": triad,
        "torch fused": stepper(lambda step: la.torch_adam(grad, plain, step, scratch), args.calls),
    }
    moved = {"triad": float(TRIAD_BYTES), "torch fused": float(PEER_BYTES)}
    for form, kind in FORMS:
        state = make(master, form, kind)
        name = f"{form}, {kind} moments"
        moved[name] = la.BYTES[form, kind].moved

        step = partial(la.layer_adam, grad, state, threads=args.threads)
        calls[name] = stepper(step, args.calls)
        name += ", recorded"  # as a step that may be taken back
        moved[name] = la.BYTES[form, kind].moved + CODE_BYTES[kind] / la.TILE
        recorded = partial(step, undo=la.UndoRecord.empty(args.parameters, kind))
        calls[name] = stepper(recorded, args.calls)
    seconds = interleaved(calls, args.repeats, warmup=1)
    seconds = {name: [value / args.calls for value in values] for name, values in seconds.items()}
    bandwidth = TRIAD_BYTES * args.parameters / median(seconds["triad"])
    return [
        {
            "form": name,
            "bytes_a_parameter": moved[name],
            "step_s": values,
            "predicted_s": moved[name] * args.parameters / bandwidth,
            "parameters_a_second": args.parameters / median(values),
            "bandwidth": moved[name] * args.parameters / median(values),
            "times_faster": median(seconds["torch fused"]) / median(values),
        }
        for name, values in seconds.items()
    ]


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=11)
    torch.set_num_threads(args.threads)
    columns = [
        {"key": "form", "title": "Form"},
        {"key": "bytes_a_parameter", "title": "Bytes moved a parameter", "digits": 1},
        {"key": "step_s", "title": "Step (ms)", "scale": 1e3, "digits": 1},
        {"key": "predicted_s", "title": "Predicted (ms)", "scale": 1e3, "digits": 1},
        {"key": "parameters_a_second", "title": "Parameters (10⁹/s)", "scale": 1e-9, "digits": 2},
        {"key": "bandwidth", "title": "GB/s", "scale": 1e-9, "digits": 1},
        {"key": "times_faster", "title": "Times faster than torch", "digits": 2},
    ]
    title = f"AdamW on the CPU, {args.parameters / 1e6:.0f} M parameters, {args.threads} threads"
    finish("runtime_ops/layer_adam", measure(args), args, columns, title=title)


if __name__ == "__main__":
    main()
