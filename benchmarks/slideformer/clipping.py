"""What exact clipping costs the schedule: steps with `clip: global` that wait for the norm, and
steps that presume it.

    python -m benchmarks.slideformer.clipping --record

    python -m benchmarks.slideformer.clipping --shape Llama2-7B --batches 8,16 --host-gib 110 --record

Without `--shape`, lanes of known lengths, so that any machine shows the schedule: copies and updates sleep, on the
engine of the CPU with a tiny model. A copy of a layer's weights is a forward pass, and two are a
backward pass: the weights come, and the gradients leave. `--lengths 3x1.5`: an update takes three
copies, and one that keeps a record, or is taken back by it, 1.5 times as long. Engines take turns.

- `not clipped`: no norm; the least that a step can take.
- `waits`: updates begin after the backward pass.
- `presumes`: every layer may be, and no step is clipped.
- `presumes, clipped late`: a limit just below the norm, so that every presumed update is taken back.
- `presumes, clipped early`: the first gradient exceeds the limit, so that nothing is presumed.

With `--shape`, steps of that model with random weights on the GPU, by one engine with the memory
for exact clipping, which is told before each burst what it does: host memory holds no second one.
`auto` chooses how many layers may be presumed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch

from benchmarks.committed import write
from benchmarks.common import add_arguments, finish, median, parse_args, result
from benchmarks.offload import model as om
from ondevice.methods.slideformer.auto import Room, Work, resolve
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.models.load import tiny_model
from ondevice.offload import presumed, updater
from ondevice.offload.calibrate import calibrate
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.units import cut
from ondevice.planning.devices import find_device

NEEDS = ()
LAYERS = 6
COPY_S = 0.08
"""Seconds of a layer's copy: long compared with what Python does between two."""
BURST = 3
"""Steps between two looks at the clock; one before them fills the lanes."""
NEVER = 1e9
BELOW = 1 - 1e-4
MODES = (
    "not clipped",
    "waits",
    "presumes",
    "presumes, clipped late",
    "presumes, clipped early",
)
COLUMNS = [
    {"key": "shape", "title": "Shape"},
    {"key": "batch", "title": "Batch"},
    {"key": "moments", "title": "Moments"},
    {"key": "update", "title": "Update over copy", "digits": 1},
    {"key": "beside", "title": "Presumed update over update", "digits": 1},
    {"key": "variant", "title": "Steps"},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "of_unclipped", "title": "Of not clipped", "digits": 3},
    {"key": "presumed", "title": "Presumed updates a step", "digits": 1},
    {"key": "presumed_layers", "title": "of at most"},
    {"key": "gpu_peak_bytes", "title": "GPU peak (GB)", "scale": 1e-9, "digits": 1},
    {"key": "host_bytes", "title": "Host, ours (GB)", "scale": 1e-9, "digits": 1},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        default="2x1,3x1,3x1.5",
        help="of an update, in copies, and of a presumed one, in updates",
    )
    parser.add_argument("--shape", help="a real one, on the GPU: " + ", ".join(om.SHAPES))
    parser.add_argument("--batches", default="8")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_arguments(parser, "--host-gib")


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
        return {
            "variant": name,
            "step_s": self.seconds,
            "of_unclipped": min(self.seconds) / min(unclipped),
            "presumed": self.begun / self.steps,
        }


@contextmanager
def sleeping(numel: int, update: float, beside: float) -> Iterator[None]:
    """Let updates sleep by their length; what is no layer's is a small part of one."""

    def late(gradient: torch.Tensor, *_: Any, copies: float = update, **__: Any) -> None:
        time.sleep(COPY_S * copies * min(1.0, len(gradient) / numel))

    longer = partial(late, copies=update * beside)
    with ExitStack() as patches:
        patches.enter_context(patch.object(updater, "layer_adam", late))
        patches.enter_context(patch.object(presumed, "layer_adam", longer))
        patches.enter_context(patch.object(presumed, "undo_adam", longer))
        patches.enter_context(patch.object(presumed, "finish_adam", lambda *_, **__: None))
        yield


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


class Switched:
    """One engine that clips as it is told, and the seconds of its steps."""

    def __init__(self, args: Any, rows: int) -> None:
        config = SlideformerConfig(
            moments=args.moments, clip="global", max_grad_norm=NEVER, timeout_s=120.0
        )
        dims, host = om.shape_dims(args.shape)[0], int(args.host_gib * 2**30)
        rates = calibrate(config, args.device)
        room = Room(find_device(f"this-{args.device}").usable_bytes, host)
        self.config, why = resolve(config, dims, Work(rows, args.length), room, rates)
        print(why, flush=True)
        om.release(args.device)
        family = om.make_family(args.shape, om.random_block(args.shape, args.device))
        self.engine = OffloadEngine(family, self.config, args.device)
        self.presumable: Any = self.engine.updater.presumed.units
        self.steps = self.begun = 0
        states: Any = self.engine.updater.presumed
        begin = states.begin

        def counted(*rest: Any) -> Any:
            state = begin(*rest)
            self.begun += state is not None
            return state

        states.begin = counted

    def switch(self, mode: str, norm: float) -> None:
        """Clip as `mode` says from the next step on; nothing of the last one is left."""
        self.engine.flush()
        limits = {"presumes, clipped late": BELOW * norm, "presumes, clipped early": 1e-6 * norm}
        limit = None if mode == "not clipped" else limits.get(mode, NEVER)
        own: Any = self.engine.updater
        own.clipping.limit = limit
        own.config = self.config.model_copy(update={"max_grad_norm": limit})
        own.last = self.engine.window.clipping = limit is not None
        own.presumed.units = self.presumable if mode.startswith("presumes") else set()

    def step(self, ids: np.ndarray) -> None:
        self.engine.step(ids, ids, self.steps, 1e-9)
        self.steps += 1

    def burst(self, ids: np.ndarray) -> tuple[float, float]:
        """Seconds a step, and how many updates were presumed a step."""
        self.step(ids)
        before, started = self.begun, time.perf_counter()
        for _ in range(BURST):
            self.step(ids)
        return (time.perf_counter() - started) / BURST, (self.begun - before) / BURST


def real(args: Any, written: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Rows of real steps; bursts of the modes in turns. `written` is given the rows after each
    batch."""
    batches = [int(word) for word in args.batches.split(",")]
    one = Switched(args, min(batches))
    rows = []
    try:
        for batch in batches:
            vocabulary = om.shape_dims(args.shape)[0].vocab
            ids = np.random.default_rng(0).integers(0, vocabulary, (batch, args.length))
            one.switch("waits", 0.0)
            one.step(ids)
            one.engine.flush()
            norm = one.engine.updater.clipping.now.norm
            seen: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
            for turn in range(args.repeats):
                for mode in reversed(MODES) if turn % 2 else MODES:
                    one.switch(mode, norm)
                    seen[mode].append(one.burst(ids))
                    print(batch, mode, seen[mode][-1], flush=True)
            rows += _rows(args, one, batch, seen)
            written(rows)
    finally:
        one.engine.close()
    return rows


def _rows(
    args: Any, one: Switched, batch: int, seen: dict[str, list[tuple[float, float]]]
) -> list[dict[str, Any]]:
    peak = torch.cuda.max_memory_allocated() if args.device != "cpu" else None
    base = {"shape": args.shape, "batch": batch, "moments": args.moments, "gpu_peak_bytes": peak}
    base |= {"presumed_layers": one.config.presumed, "host_bytes": one.engine.host_bytes}
    unclipped = median([seconds for seconds, _ in seen["not clipped"]])
    rows = []
    for mode, bursts in seen.items():
        times = [seconds for seconds, _ in bursts]
        row = {**base, "variant": mode, "step_s": times, "of_unclipped": median(times) / unclipped}
        rows.append(row | {"presumed": sum(count for _, count in bursts) / len(bursts)})
    return rows


def main() -> None:
    args = parse_args(__doc__, arguments, repeats=3)
    if args.shape:
        if args.host_gib is None:
            args.host_gib = psutil.virtual_memory().available / 2**30
        note = f"{args.length} tokens a row; medians of bursts of {BURST} steps each, in turns."
        title = "SlideFormer: exact clipping, waiting for the norm and presuming it"

        def written(rows: list[dict[str, Any]]) -> None:
            if args.out:
                told = {"title": title, "notes": [note]}
                write(result("slideformer/clipping", rows, COLUMNS, **told), args.out)

        rows = real(args, written)
        finish("slideformer/clipping", rows, args, COLUMNS, title=title, notes=[note])
        return
    rows = []
    for pair in args.lengths.split(","):
        update, beside = map(float, pair.split("x"))
        rows += schedule(update, beside, args.repeats)
    finish(
        "slideformer/clipping",
        rows,
        args,
        columns=COLUMNS,
        title="SlideFormer: exact clipping, waiting for the norm and presuming it, by lanes of known lengths",
        notes=[
            "Of not clipped: of the quickest of the bursts of three steps each, as whatever else the "
            "machine does only adds to a sleep."
        ],
    )


if __name__ == "__main__":
    main()
