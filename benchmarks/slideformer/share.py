"""What it is worth to update a share of the parameters on the GPU, with states that stay in host
memory.

    python -m benchmarks.slideformer.share --out FILE

Rates of AdamW in parameters a second, each over some seconds: on only the host's threads (`host`);
on the GPU, whose
states come over PCIe and go back, chunk after chunk (`gpu`); both at once on parameters of their
own (`both`); and the same three next to the copies of a step, weights twice to the GPU and
gradients back for each parameter that is updated (`with copies`). A share on the GPU wins if `both`
is more than `host`. States on the GPU itself (resident layers) are another thing: nothing of them
crosses the bus.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import finish, parse_args
from benchmarks.offload.model import Copies
from ondevice.offload.device import Device, open_device
from ondevice.offload.engine import host_threads
from ondevice.runtime_ops import layer_adam as la

NEEDS = ("cuda",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ADAM = la.AdamStep(1e-5, step=3)
COLUMNS = [
    {"key": "moments", "title": "Moments"},
    {"key": "where", "title": "Updated on"},
    {"key": "copies", "title": "Copies of a step meanwhile"},
    {"key": "host_per_s", "title": "Host (10⁹/s)", "scale": 1e-9, "digits": 2},
    {"key": "gpu_per_s", "title": "GPU (10⁹/s)", "scale": 1e-9, "digits": 2},
    {"key": "per_s", "title": "Together (10⁹/s)", "scale": 1e-9, "digits": 2},
    {"key": "of_host", "title": "Relative to the host only", "digits": 2},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument(
        "--parameters", type=int, default=256 << 20, help="of each side; they do not fit a cache"
    )
    parser.add_argument(
        "--chunk", type=int, default=32 << 20, help="parameters that are on the GPU at once, twice"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="of a rate")
    parser.add_argument("--moments", default="float32,bfloat16,int8")


def arrays(
    count: int, kind: str, make: Callable[[int, torch.dtype], Tensor]
) -> tuple[Tensor, la.HostState]:
    """A gradient and a state of zeros, each array from `make`."""
    kinds = la.Moments.empty(0, kind).tensors().items()
    moments = {name: make(_size(name, count), like.dtype) for name, like in kinds}
    state = la.HostState(
        None, make(count, torch.bfloat16), make(count, torch.uint16), la.Moments(kind, **moments)
    )
    return make(count, torch.bfloat16), state


def _size(name: str, count: int) -> int:
    return -(-count // la.TILE) if name.endswith("_scale") else count


def tensors(gradient: Tensor, state: la.HostState) -> list[Tensor]:
    """All arrays, the gradient first; what an update changes comes after it."""
    return [
        t
        for t in (gradient, state.high, state.low, *state.moments.tensors().values())
        if t is not None
    ]


class Host:
    """AdamW on the host's threads, again and again."""

    def __init__(self, args: Any, kind: str, device: Device, threads: int) -> None:
        self.gradient, self.state = arrays(args.parameters, kind, device.pinned)
        self.threads = threads

    def turn(self) -> int:
        la.layer_adam(self.gradient, self.state, ADAM, threads=self.threads)
        return self.gradient.numel()

    def close(self) -> None:
        return


class Gpu:
    """AdamW on the GPU: a chunk's arrays come, are updated, and go back; two chunks are under
    way."""

    def __init__(self, args: Any, kind: str, device: Device) -> None:
        self.device, self.at = device, 0
        chunks = max(2, args.parameters // args.chunk)
        self.hosts = [arrays(args.chunk, kind, device.pinned) for _ in range(chunks)]
        self.there = [arrays(args.chunk, kind, device.empty) for _ in range(2)]
        self.gone: list[Any] = [None, None]

    def turn(self) -> int:
        device, place = self.device, self.at % 2
        if self.gone[place] is not None:
            self.gone[place].wait()
        source, target = self.hosts[self.at % len(self.hosts)], self.there[place]
        self.at += 1
        for here, there in zip(tensors(*source), tensors(*target), strict=True):
            device.copy("h2d", there, here)
        device.hold("compute", device.record("h2d"))
        la.device_adam(*target, ADAM, None)
        device.hold("d2h", device.record("compute"))
        for here, there in list(zip(tensors(*source), tensors(*target), strict=True))[1:]:
            device.copy("d2h", here, there)
        self.gone[place] = device.record("d2h")
        return target[0].numel()

    def close(self) -> None:
        self.device.synchronize()


def rates(sides: dict[str, Any], copies: Copies | None, seconds: float) -> dict[str, float]:
    """Parameters a second of each side while all run."""
    counts, stop = dict.fromkeys(sides, 0), threading.Event()
    for side in sides.values():
        side.turn()

    def run(name: str) -> None:
        while not stop.is_set():
            counts[name] += sides[name].turn()

    threads = [threading.Thread(target=run, args=(name,)) for name in sides]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    while time.perf_counter() - started < seconds:
        if copies is not None:
            copies.follow(sum(counts.values()))
        time.sleep(0.001)
    stop.set()
    for thread in threads:
        thread.join()
    for side in sides.values():
        side.close()
    passed = time.perf_counter() - started
    return {name: count / passed for name, count in counts.items()}


def main() -> None:
    args = parse_args(__doc__, arguments)
    device, threads, rows = (
        open_device(args.device),
        host_threads(torch.device(args.device).type),
        [],
    )
    for kind in args.moments.split(","):
        host, gpu = Host(args, kind, device, threads), Gpu(args, kind, device)
        for copied in (False, True):
            alone = None
            for where, sides in (
                ("host", {"host": host}),
                ("gpu", {"gpu": gpu}),
                ("both", {"host": host, "gpu": gpu}),
            ):
                found = rates(sides, Copies(device, args.chunk) if copied else None, args.seconds)
                together = sum(found.values())
                alone = together if alone is None else alone
                row = {
                    "moments": kind,
                    "where": where,
                    "copies": "yes" if copied else "no",
                    "per_s": together,
                }
                row |= {f"{name}_per_s": rate for name, rate in found.items()} | {
                    "of_host": together / alone
                }
                rows.append(row)
                print(row, flush=True)
        del host, gpu
    notes = [
        f"{threads} threads of the host; {args.parameters / 1e6:.0f} M parameters each, {args.seconds:g} s a rate."
    ]
    device.close()
    finish(
        "slideformer/share",
        rows,
        args,
        COLUMNS,
        title="SlideFormer: a share of the update on the GPU",
        notes=notes,
    )


if __name__ == "__main__":
    main()
