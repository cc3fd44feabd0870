"""The head's loss and gradients, Figure 6 of the paper: PyTorch over all logits, our chunks of
tokens, liger's fused kernel.

    python -m benchmarks.slideformer.head --record                       Llama 3.1 8B's head on a GPU
    python -m benchmarks.slideformer.head --device cpu --vocab 4096 --hidden 64 --batches 1,2

Each side gets hidden states and the head in bfloat16, and leaves the summed loss, the gradient of
the hidden states, and adds the head's gradient to one that is there. Memory is the peak beyond
these inputs and that gradient. A side that does not fit has its error in place of figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.common import finish, interleaved, parse_args, peak_bytes
from ondevice.offload.config import EngineConfig
from ondevice.offload.gradients import ChunkedLoss
from ondevice.offload.liger import LigerLoss

NEEDS = ("cuda",)
ROW_TOKENS = 1024
CHUNK_TOKENS = EngineConfig.model_fields["loss_chunk_tokens"].default
COLUMNS = [
    {"key": "batch", "title": "Batch"},
    {"key": "side", "title": "Loss by"},
    {"key": "seconds", "title": "Time (ms)", "scale": 1e3, "digits": 1},
    {"key": "peak_bytes", "title": "Peak beyond inputs (MB)", "scale": 1e-6, "digits": 0},
    {"key": "of_torch", "title": "Of PyTorch's", "digits": 3},
    {"key": "loss", "title": "Loss of a token", "digits": 4},
    {"key": "error", "title": "Error"},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", default="2,4,8,16,32,64")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--device", default="cuda")


def whole(hidden: Tensor, labels: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    """PyTorch's own: every logit exists, in bfloat16 and in float32."""
    hidden = hidden.detach().requires_grad_(True)
    weight = weight.detach().requires_grad_(True)
    logits = functional.linear(hidden, weight)
    loss = functional.cross_entropy(logits.float(), labels, reduction="sum")
    _, of_head = torch.autograd.grad(loss, (hidden, weight))
    gradient.add_(of_head)
    return loss.detach()


def chunks(hidden: Tensor, labels: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return ChunkedLoss(hidden, labels, 1.0, CHUNK_TOKENS).forward_backward(weight, gradient)


def fused(hidden: Tensor, labels: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return LigerLoss(hidden, labels, 1.0).forward_backward(weight, gradient)


def sides(device: str) -> dict[str, Callable[..., Tensor]]:
    found: dict[str, Callable[..., Tensor]] = {"PyTorch": whole, "chunks of tokens": chunks}
    if device != "cpu" and find_spec("liger_kernel"):
        found["liger"] = fused
    return found


def measure(batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each side of one batch size."""
    random = torch.Generator(args.device).manual_seed(batch)
    tokens = batch * ROW_TOKENS

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=args.device).bfloat16()

    inputs = (
        drawn(tokens, args.hidden),
        torch.randint(args.vocab, (tokens,), generator=random, device=args.device),
        drawn(args.vocab, args.hidden).mul_(args.hidden**-0.5),
    )
    gradient = torch.zeros_like(inputs[2])
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for name, side in sides(args.device).items():
        rows[name] = {"batch": batch, "side": name}
        try:
            peak = peak_bytes(lambda side=side: side(*inputs, gradient), args.device)
            loss = float(side(*inputs, gradient))
        except torch.OutOfMemoryError as error:
            rows[name]["error"] = str(error).split(".")[0]
            torch.cuda.empty_cache()
            continue
        rows[name] |= {"peak_bytes": peak, "loss": loss / tokens}
        calls[name] = lambda side=side: side(*inputs, gradient)
    for name, seconds in interleaved(calls, args.repeats).items():
        rows[name]["seconds"] = seconds
    first = rows["PyTorch"].get("peak_bytes")
    for row in rows.values():
        if first and row.get("peak_bytes"):
            row["of_torch"] = row["peak_bytes"] / first
    return list(rows.values())


def main() -> None:
    args = parse_args(__doc__, arguments)
    rows = [row for batch in args.batches.split(",") for row in measure(int(batch), args)]
    finish(
        "slideformer/head", rows, args, COLUMNS, title="The head's loss and its gradients",
        notes=[f"{ROW_TOKENS} tokens a row, a head of {args.vocab} x {args.hidden} in bfloat16."],
    )  # fmt: skip


if __name__ == "__main__":
    main()
