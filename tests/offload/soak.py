"""Trains tiny models for hours with random settings, while every lane is late at random and the checker looks on.

    python -m tests.offload.soak --minutes 30 --seed 0        prints one line an episode, and a summary
    python -m tests.offload.soak --episode 1234               one episode again

An episode is one engine: settings, batches, evaluations and checkpoints that its number draws. It runs twice: first
without delays, then with a device whose lanes end late, a disk, an update, a checkpoint and a calling thread that pause
at random, under `happens_before`. Nothing may hang, no access may come too early, and both runs must give the same
losses, evaluations, checkpoints and weights, bit for bit. The delays depend on the machine, so a number brings back the
settings and not the schedule.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.methods.lsp import window as lsp_window
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.lsp.engine import LspEngine
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.torch import SlideformerSession
from ondevice.models.load import tiny_model
from ondevice.offload import disk, disk_states, drive, presumed, store, updater, worker
from ondevice.offload import engine as offload_engine
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.units import SINGLE, Ranks
from ondevice.training.checkpoint import CheckpointStore
from tests.methods.slideformer.reference import batches
from tests.offload.checked_device import CheckedDevice, CheckedEvent
from tests.offload.clocks import Clock
from tests.offload.happens_before import CheckedRanks, Checker, checking, names

TIMEOUT_S = 60.0
LANES = ("compute", "h2d", "d2h", "comm", "update", "disk", "checkpoint", "caller")
PAUSES_S = (0.0, 0.0, 0.0002, 0.001, 0.004)
"""Mean delays of a lane; one in a hundred is twenty times as long."""


class Delays:
    """How late each lane of an episode is."""

    def __init__(self, dice: random.Random) -> None:
        self.mean_s = {lane: dice.choice(PAUSES_S) for lane in LANES}

    def draw(self, lane: str) -> float:
        mean_s = self.mean_s[lane]
        return (
            random.expovariate(1 / mean_s) * (20 if random.random() < 0.01 else 1)
            if mean_s
            else 0.0
        )

    def pause(self, lane: str) -> None:
        if (delay_s := self.draw(lane)) > 0:
            time.sleep(delay_s)

    def before(self, lane: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def late(*args: Any, **options: Any) -> Any:
            self.pause(lane)
            return call(*args, **options)

        return late


class LateEvent(CheckedEvent):
    """A point in a lane, reached at a time of `time.perf_counter`."""

    def done(self) -> bool:
        return time.perf_counter() >= self.at and super().done()

    def wait(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))
        super().wait()


class LateDevice(CheckedDevice):
    """Lanes whose work ends late; what it does to memory the checker holds against the order of events."""

    def __init__(self, checker: Checker, delays: Delays) -> None:
        super().__init__(checker)
        self.delays, self.reached = delays, dict.fromkeys(LANES, 0.0)

    def record(self, lane: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            self.delays.pause("caller")
        with self.checker.lock:
            event = LateEvent(self.checker, super().record(lane).clock)
            event.at = max(self.reached[lane], event.at) + self.delays.draw(lane)
            self.reached[lane] = event.at
            return event

    def hold(self, lane: Any, event: Any) -> None:
        with self.checker.lock:
            super().hold(lane, event)
            self.reached[lane] = max(self.reached[lane], event.at)


@dataclass
class Episode:
    """What a number draws: a method, its settings, a model, and what the calling thread does, in order."""

    number: int
    method: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    layers: int = 0
    tied: bool = False
    ranked: bool = False
    actions: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        dice = random.Random(self.number)
        self.method = dice.choice(("slideformer", "slideformer", "slideformer", "lsp"))
        self.layers, self.tied, self.ranked = (
            dice.randint(1, 6),
            dice.random() < 0.5,
            dice.random() < 0.25,
        )
        self.settings = {"timeout_s": TIMEOUT_S, "threads": 1} | _drawn(self.method, dice)
        self.delays = Delays(dice)
        kinds = ["step"] * 6 + ["evaluate", "pause", "flush"]
        if self.method == "slideformer" and not self.ranked:
            kinds += ["checkpoint"] * 2
        for _ in range(dice.randint(5, 12)):
            rows, length = dice.choice((2, 4, 8, 16)), dice.choice((4, 6, 9))
            batch = batches(1, rows, length, seed=dice.randrange(1 << 30))[0]
            self.actions.append((dice.choice(kinds), batch))
        self.actions.append(("step", self.actions[0][1]))

    def __str__(self) -> str:
        shown = {
            key: value
            for key, value in self.settings.items()
            if key not in ("timeout_s", "threads")
        }
        late = {lane: s * 1000 for lane, s in self.delays.mean_s.items() if s}
        does = " ".join(
            f"{kind}{len(batch[0]) if kind == 'step' else ''}" for kind, batch in self.actions
        )
        how = f"{self.layers} layers{', tied' * self.tied}{', ranks' * self.ranked}"
        return f"{self.number} {self.method} ({how}) {shown} late by ms {late}: {does}"


def _drawn(method: str, dice: random.Random) -> dict[str, Any]:
    """Settings of a method that go together."""
    some: dict[str, Any] = {
        "micro_batch_size": dice.choice((None, 1, 2, 3, 8)),
        "gradient_buffers": dice.choice((2, 3, 4)),
        "window": dice.choice((2, 3, 5)),
        "compute": dice.choice(("bfloat16", "float32")),
        "optimizer": dice.choice(("auto", "torch")),
    }
    if dice.random() < 0.6:
        some |= {"max_grad_norm": 0.1, "clip": dice.choice(("previous", "layer", "global"))}
    if method == "lsp":
        some["schedule"] = dice.choice(("layerwise", "zero"))
        some["project"] = dice.random() < 0.7
        some["activations"] = dice.choice(("device", "host"))
        if some["project"]:
            some["weight_placement"] = dice.choice(("device", "host"))
            some |= {"subspace": 24, "nonzeros": 4, "check_every": 3, "threshold": 0.0}
        return some
    some["loss_tiles"] = dice.choice((1, 1, 2, 3))
    some["activations"] = dice.choice(("device", "host", "host", "disk"))
    some["disk_fraction"] = dice.choice((0.0, 0.0, 0.5, 1.0))
    some["disk_masters"] = bool(some["disk_fraction"]) and dice.random() < 0.5
    if some.get("clip") == "global":
        some["presumed_layers"] = dice.choice((0, 1, 3, 6))
        some["max_grad_norm"] = dice.choice((0.1, 1.0, 1e6))
    else:
        some["resident_layers"] = dice.choice((0, 0, 1, 2))
        some["resident_tables"] = dice.random() < 0.25
    if some["optimizer"] == "auto":
        some["moments"] = dice.choice(("float32", "bfloat16", "int8"))
    return some


class Run:
    """One engine through an episode, and what came out of it."""

    def __init__(
        self, episode: Episode, folder: Path, checker: Checker | None, ranks: Ranks = SINGLE
    ) -> None:
        self.episode, self.folder, self.checker = episode, folder, checker
        self.outcome: list[Any] = []
        self.saving: threading.Thread | None = None
        self.saved: Exception | None = None
        self.ended: Clock = {}
        loaded = tiny_model("llama", layers=episode.layers, tied=episode.tied)
        with checker.quiet() if checker else nullcontext():
            if episode.method == "lsp":
                self.session: Any = None
                self.engine: Any = LspEngine(
                    loaded.family, LspConfig(**episode.settings), "cpu", ranks=ranks
                )
            elif ranks.single:
                self.session = SlideformerSession(
                    loaded, SlideformerConfig(**episode.settings), "cpu"
                )
                self.engine = self.session.engine
            else:
                self.session = None
                self.engine = OffloadEngine(
                    loaded.family, SlideformerConfig(**episode.settings), "cpu", ranks
                )
        self.store = CheckpointStore(folder, {}, seed=0, backend="torch-cpu")
        if checker:
            names(checker, self.engine, "engine")
            self._wait_for_scores()

    def _wait_for_scores(self) -> None:
        """Let an evaluation wait for its result, as `Tensor.cpu` does for what an accelerator computes."""
        passes, device = self.engine.passes, self.engine.device
        score = passes.score

        def waits(*rest: Any) -> torch.Tensor:
            losses = score(*rest)
            device.record("compute").wait()
            return losses

        passes.score = waits

    def all(self) -> list[Any]:
        try:
            for number, (kind, batch) in enumerate(self.episode.actions):
                self._act(kind, batch, number)
            self._end_saving()
            self.engine.flush()
            if self.engine.ranks.single:
                lsp = self.episode.method == "lsp"
                self.outcome.append(self.engine.weights() if lsp else self.engine.store.masters())
        finally:
            if self.saving is not None:
                self.session.written(None)
                self.saving.join()
            self.engine.close()
        return self.outcome

    def _act(self, kind: str, batch: Any, number: int) -> None:
        if kind == "step":
            step = self.session.step if self.session else self.engine.step
            result = step(*batch, number, 1e-3)
            self.outcome.append(getattr(result, "loss", result))
        elif kind == "evaluate":
            self.outcome.append(
                dict(enumerate(torch.from_numpy(part) for part in self.engine.evaluate(*batch)))
            )
        elif kind == "checkpoint":
            self._save(number)
        elif kind == "flush":
            self.engine.flush()
        elif self.checker:
            time.sleep(0.02)

    def _save(self, number: int) -> None:
        """Write a checkpoint next to the steps that follow, as the training loop does."""
        self._end_saving()
        state = self.session.state()
        self.session.hold()
        clock = self.checker.leave() if self.checker else None
        # Of what stays on the accelerator `state` gives copies, which it has waited for.
        mine = {
            name: x
            for name, x in self.session.arrays.items()
            if self.checker and self.checker.is_host(x)
        }

        def written(name: str) -> None:
            if self.checker:
                self.episode.delays.pause("checkpoint")
                if name in mine:
                    self.checker.access(self.checker.me, mine[name], write=False)
            self.session.written(name)

        def save() -> None:
            if self.checker and clock is not None:
                self.checker.merge(clock)
            try:
                self.store.save(number, state, written=written, beside=None)
            except Exception as error:
                self.saved = error
            self.session.written(None)
            self.ended = self.checker.leave() if self.checker else {}

        self.saving = threading.Thread(target=save, name=f"checkpoint {number}")
        self.saving.start()

    def _end_saving(self) -> None:
        """Wait for the checkpoint that is under way, and keep what it says."""
        if self.saving is None:
            return
        self.saving.join()
        self.saving = None
        if self.checker:
            self.checker.merge(self.ended)
        if self.saved is not None:
            raise self.saved
        loaded = self.store.newest(lambda _: None)
        assert loaded is not None
        self.outcome.append(
            {name: torch.from_numpy(np.array(value)) for name, value in loaded.state.items()}
        )


@contextmanager
def late(episode: Episode, monkeypatch: Any) -> Any:
    """A checker, and engines whose lanes are late."""
    delays = episode.delays
    with checking(monkeypatch, updater, presumed, store, disk, disk_states, lsp_window) as (
        checker,
        _,
    ):
        monkeypatch.setattr(offload_engine, "open_device", lambda name: LateDevice(checker, delays))
        for module in (updater, presumed):
            for name in ("layer_adam", "torch_adam", "undo_adam", "finish_adam"):
                if update := getattr(module, name, None):
                    monkeypatch.setattr(module, name, delays.before("update", update))
        monkeypatch.setattr(store, "device_adam", delays.before("compute", store.device_adam))
        monkeypatch.setattr(drive.Drive, "move", delays.before("disk", drive.Drive.move))
        lanes = {"transfer": "h2d", "offload": "d2h", "upload": "h2d", "update": "update"}
        taken = worker.Worker._next

        def take(self: Any) -> Any:
            task = taken(self)
            delays.pause(lanes[self.name])
            return task

        monkeypatch.setattr(worker.Worker, "_next", take)
        yield checker


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    return a == b


def run(episode: Episode) -> str | None:
    """Return what went wrong in an episode, or None."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        expected = [] if episode.ranked else Run(episode, Path(folder) / "plain", None).all()
        with late(episode, monkeypatch) as checker:
            ranks = CheckedRanks(checker) if episode.ranked else SINGLE
            received = Run(episode, Path(folder) / "late", checker, ranks).all()
        if checker.races:
            return "\n".join(list(checker.races)[:3])
        for number, (a, b) in enumerate(zip(expected, received, strict=not episode.ranked)):
            if not same(a, b):
                return f"result {number} of {len(expected)} differs from the run without delays"
    return None


def soak(numbers: Any, until_s: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the episodes of `numbers` until a time of `time.monotonic`; return counts and what went wrong."""
    counts, failures, began = Counter[str](), dict[str, str](), time.monotonic()
    for number in numbers:
        if time.monotonic() > until_s:
            break
        episode = Episode(number)
        tell(str(episode))
        try:
            problem = run(episode)
        except Exception as error:
            faulthandler.dump_traceback(sys.stderr)
            problem = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        if problem:
            failures[str(episode)] = problem
            tell(f"FAILED {problem}")
        counts["episodes"] += 1
        counts[episode.method] += 1
        counts["with ranks"] += episode.ranked
        counts["with a disk"] += bool(
            episode.settings.get("disk_fraction") or episode.settings.get("activations") == "disk"
        )
        for kind, batch in episode.actions:
            counts[f"{kind}s"] += 1
            counts["steps of 16 rows"] += kind == "step" and len(batch[0]) == 16
    return {"seconds": round(time.monotonic() - began), **counts, "failures": failures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--seed", type=int, default=0, help="the first episode's number is a million times that"
    )
    parser.add_argument("--episode", type=int, help="run one episode")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = options.seed * 1_000_000
    numbers = range(first, first + 1_000_000) if options.episode is None else [options.episode]
    result = soak(
        numbers, time.monotonic() + 60 * options.minutes, lambda line: print(line, flush=True)
    )
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
