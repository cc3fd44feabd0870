"""What exact clipping costs the schedule: steps with `clip: global` that wait for the norm, and
steps that presume it.

    python -m benchmarks.slideformer.clipping --record

Lanes of known lengths, so that any machine shows the schedule: copies and updates sleep, on the
engine of the CPU with a tiny model. A copy of a layer's weights is a forward pass, and two are a
backward pass: the weights come, and the gradients leave. An update takes `--update` copies; one
that writes beside the old state takes `--beside` times as long, which `--kernel` measures here.
Engines take turns.

- `not clipped`: no norm; the least that a step can take.
- `waits`: updates begin after the backward pass.
- `presumes`: every layer may be, and no step is clipped.
- `presumes, clipped late`: a limit just below the norm, so that every presumed state is dropped.
- `presumes, clipped early`: the first gradient exceeds the limit, so that nothing is presumed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish, interleaved, median, parse_args
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.models.load import tiny_model
from ondevice.offload import presumed, updater
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.units import cut
from ondevice.runtime_ops.layer_adam import AdamStep, HostState, Moments, layer_adam

LAYERS = 8
COPY_S = 0.02
"""Seconds of a layer's copy: long compared with what Python does between two."""
BURST = 3
"""Steps between two looks at the clock; one before them fills the lanes."""
NEVER = 1e9
BELOW = 1 - 1e-4
KERNEL_NUMEL = 32 << 20
COLUMNS = [
    {"key": "update", "title": "Update over copy", "digits": 1},
    {"key": "beside", "title": "Presumed update over update", "digits": 1},
    {"key": "variant", "title": "Steps"},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "of_unclipped", "title": "Of not clipped", "digits": 3},
    {"key": "presumed", "title": "Presumed states a step", "digits": 1},
    {"key": "moments", "title": "Moments"},
    {"key": "in_place_s", "title": "In place (s)", "digits": 3},
    {"key": "beside_s", "title": "Beside (s)", "digits": 3},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--update", default="1.5,2,3", help="lengths of an update, in copies")
    parser.add_argument("--beside", default="1,1.5", help="of a presumed update, in updates")
    parser.add_argument("--kernel", action="store_true", help="also time the updates themselves")


class Variant:
    """An engine, and the seconds of its steps."""

    def __init__(self, ids: np.ndarray, **settings: Any) -> None:
        family = tiny_model("llama", layers=LAYERS, tied=False).family
        self.numel = cut(family).layers[0].numel
        config = SlideformerConfig(
            window=2, threads=1, activations="device",
            bus_limit_gb_per_s=2 * self.numel / COPY_S / 1e9, **settings,
        )  # fmt: skip
        self.engine = OffloadEngine(family, config, "cpu")
        self.ids = ids
        self.steps = self.begun = 0
        self.seconds: list[float] = []
        self.states: Any = self.engine.updater.presumed
        begin = self.states.begin

        def counted(*rest: Any) -> Any:
            state = begin(*rest)
            self.begun += state is not None
            return state

        self.states.begin = counted

    def step(self) -> None:
        self.engine.step(self.ids, self.ids, self.steps, 1e-9)
        self.steps += 1

    def burst(self) -> None:
        self.step()
        started = time.perf_counter()
        for _ in range(BURST):
            self.step()
        self.seconds.append((time.perf_counter() - started) / BURST)
        self.engine.flush()

    def row(self, name: str, unclipped: list[float]) -> dict[str, Any]:
        shares = [one / other for one, other in zip(self.seconds, unclipped, strict=True)]
        return {
            "variant": name,
            "step_s": self.seconds,
            "of_unclipped": median(shares),
            "presumed": self.begun / self.steps,
        }


@contextmanager
def sleeping(numel: int, update: float, beside: float) -> Iterator[None]:
    """Let updates sleep by their length; what is no layer's is a small part of one."""

    def late(gradient: torch.Tensor, *_: Any, into: Any = None, **__: Any) -> None:
        copies = update * (1.0 if into is None else beside)
        time.sleep(COPY_S * copies * min(1.0, len(gradient) / numel))

    before = updater.layer_adam, presumed.layer_adam
    updater.layer_adam = presumed.layer_adam = late
    try:
        yield
    finally:
        updater.layer_adam, presumed.layer_adam = before


@contextmanager
def opened() -> Iterator[dict[str, Variant]]:
    """The engines, all on the same batch."""
    ids = np.random.default_rng(0).integers(0, 256, (1, 8))
    every: dict[str, Variant] = {}
    exact: dict[str, Any] = {"clip": "global", "max_grad_norm": NEVER}

    def add(name: str, **settings: Any) -> Variant:
        every[name] = Variant(ids, **settings)
        return every[name]

    try:
        add("not clipped")
        waits = add("waits", **exact, presumed_layers=0)
        waits.step()
        waits.engine.flush()
        norm = waits.engine.updater.clipping.now.norm
        exact["presumed_layers"] = LAYERS
        add("presumes", **exact)
        add("presumes, clipped late", **(exact | {"max_grad_norm": BELOW * norm}))
        add("presumes, clipped early", **(exact | {"max_grad_norm": 1e-6 * norm}))
        yield every
    finally:
        for one in every.values():
            one.engine.close()


def schedule(update: float, beside: float, repeats: int) -> list[dict[str, Any]]:
    """Rows of one pair of lengths."""
    with opened() as every:
        numel = next(iter(every.values())).numel
        for one in every.values():
            one.steps = one.begun = 0
        with sleeping(numel, update, beside):
            for turn in range(repeats):
                names = list(every)
                for name in reversed(names) if turn % 2 else names:
                    every[name].burst()
        unclipped = every["not clipped"].seconds
        lengths = {"update": update, "beside": beside}
        return [{**lengths, **one.row(name, unclipped)} for name, one in every.items()]


def kernels(repeats: int) -> list[dict[str, Any]]:
    """Seconds of an update in place and of one beside the old state, by kind of moments."""
    rows = []
    count = KERNEL_NUMEL
    gradient = torch.zeros(count, dtype=torch.bfloat16)
    adam = AdamStep(1e-9)
    for kind in ("float32", "bfloat16", "int8"):
        halves = [torch.zeros(count, dtype=dtype) for dtype in (torch.bfloat16, torch.uint16)]
        state = HostState(None, halves[0], halves[1], Moments.empty(count, kind))
        into = replace(state, high=halves[0].clone(), low=halves[1].clone())
        into.moments = Moments.empty(count, kind)
        ways = {
            "in_place_s": lambda state=state: layer_adam(gradient, state, adam),
            "beside_s": lambda state=state, into=into: layer_adam(gradient, state, adam, into=into),
        }
        seconds = interleaved(ways, repeats)
        shares = [b / a for a, b in zip(seconds["in_place_s"], seconds["beside_s"], strict=True)]
        rows.append({"moments": kind, **seconds, "beside": median(shares)})
    return rows


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=7)
    rows = kernels(args.repeats) if args.kernel else []
    for update in map(float, args.update.split(",")):
        for beside in map(float, args.beside.split(",")):
            rows += schedule(update, beside, args.repeats)
    finish(
        "slideformer/clipping",
        rows,
        args,
        columns=COLUMNS,
        title="SlideFormer: exact clipping, waiting for the norm and presuming it, by lanes of known lengths",
        notes=[
            "Of not clipped: the median over bursts of three steps, each against the one beside it."
        ],
    )


if __name__ == "__main__":
    main()
