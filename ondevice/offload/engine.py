"""The offload engine: layers slide through the accelerator, gradients leave as soon as they are
there, and the host updates a layer while the accelerator computes the next (SlideFormer section
3.1).

A step goes through the layers once, up and down. All micro-batches pass a layer while it is there,
so accumulation costs no transfers, and gradients accumulate on the accelerator. Between two steps
only the embedding's rows of the batch and layer 0 are waited for.

A unit of the model crosses the bus as a unit of its own, its wire. Here the two are the same;
LSP-Offload's have few numbers for a large matrix. At the end: what overlapped in a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.offload.bus import throttled
from ondevice.offload.device import Spans, Timeline, open_device
from ondevice.offload.disk import Disk, open_disk
from ondevice.offload.experts import ExpertWindow, listen, open_window
from ondevice.offload.liger import patch_layers, use_liger
from ondevice.offload.momentum import MuonWindow
from ondevice.offload.muon import suits
from ondevice.offload.overdue import Overdue
from ondevice.offload.passes import Passes
from ondevice.offload.store import TieredStore
from ondevice.offload.tiles import tile
from ondevice.offload.transfers import Activations
from ondevice.offload.units import SINGLE, Ranks, Units, cut
from ondevice.offload.updater import Updater
from ondevice.offload.whole import WholePasses
from ondevice.offload.window import Window
from ondevice.offload.worker import FIRST, Task, Watch, Worker

if TYPE_CHECKING:
    from ondevice.nn.cross_entropy import WeighedRows
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.units import Arrays


class OffloadEngine:
    """AdamW steps of all parameters of a model that is larger than the accelerator.

    Args:
        family: the model on the CPU; its parameters' values move into the engine.
        config: sizes and precisions.
        device: `cpu`, `cuda` or `cuda:N`.
        ranks: those that train together. All make the same calls with the same batches; a step
            computes this rank's rows of its batch, and so does an evaluation.

    Attributes:
        wires: the units as they cross the bus and as the host keeps them.
        kernels: `liger` or `torch`, of the layers.
        dtypes: of the parameters before, by name.
        overlap: of the last step whose end the next pass has seen; `spans` likewise.

    Raises:
        StorageError: host memory cannot be locked, or the disk tier does not fit.
        MissingPackageError: the C++ update is asked for and cannot be compiled.
    """

    config: Any
    passes: Passes
    window: Window

    def __init__(
        self, family: Any, config: EngineConfig, device: str, ranks: Ranks = SINGLE
    ) -> None:
        config.check_training()
        if family.dims.traits.hands_on:  # blocks read more than the residual stream
            family = AnyDecoder(family.model)
        self.config = config
        self.where = torch.device(device)
        self.ranks = ranks
        self.device = open_device(device)
        if config.bus_limit_gb_per_s is not None:
            self.device = throttled(self.device, config.bus_limit_gb_per_s)
        on_cpu = self.device.type == "cpu" and config.kernels != "liger"
        self.liger = not on_cpu and use_liger(config, self.device.type)
        self.kernels = "torch"
        if self.liger and patch_layers(family):
            self.kernels = "liger"
        if family.dims.whole:
            _ = family.head_is_plain  # probed while the model has its values
        self.untile: Callable[[], None] = lambda: None
        if config.mlp_chunk_tokens is not None:
            self.untile = tile(family, config.mlp_chunk_tokens)
        self.dtypes = {name: value.dtype for name, value in family.model.named_parameters()}
        self.units = cut(family, config.decayed, suits if config.optimizer == "muon" else None)
        self.watch = Watch(config.timeout_s)
        self.timeline = Timeline(self.device)
        self.began: float | None = None  # of the last pass, if it was a step's
        self.overlap: Overlap | None = None
        self.spans: Spans = []
        self.overdue: Overdue | None = None
        self.stop_listening: Callable[[], object] = lambda: None
        self.last: Task | None = None
        self.disk: Disk | None = None
        self.transfers = Worker("transfer", self.watch)
        self.updates = Worker("update", self.watch)
        try:
            self._allocate(family)
        except BaseException:  # no file and no thread stays where memory does not suffice
            self.close()
            raise

    def _allocate(self, family: Any) -> None:
        config = self.config
        ranks = self.ranks
        self.wires = self._wires(family)
        states = inputs = None
        if config.uses_disk:
            tier = (self.device, self.timeline, self.watch, ranks)
            self.disk = open_disk(self.wires, config, *tier)
            states = self.disk.states
            inputs = self.disk.activations
        self.store = TieredStore(self.wires, config, self.device, states, ranks)
        shared = (self.wires, self.store, config, self.device, self.timeline)
        threads = config.threads or host_threads(self.device.type, ranks.sharing)
        self.updater = Updater(*shared, self.updates, self.watch, threads, states)
        self.window = self._window(family, *shared, self.transfers, self.updater)
        if isinstance(self.window, ExpertWindow):
            self.stop_listening = listen(family, self.window)
        if not ranks.single:
            self._meet_ranks()
        self.activations = Activations(self.device, self.timeline, config.activations, inputs)
        ahead = (self.units, config, self.device, self.timeline, self.window, self.activations)
        kind = WholePasses if family.dims.whole else Passes
        self.passes = kind(family, *ahead, self.where, self.liger)
        self.total = self.device.pinned(1, torch.float32)

    def _wires(self, family: Any) -> Units:
        """Return the units as they cross the bus."""
        return self.units

    def _window(self, family: Any, *shared: Any) -> Window:
        """Open the memory on the accelerator."""
        if self.config.optimizer == "muon":
            return MuonWindow(*shared)
        if self.config.fetched_experts != "all" and getattr(family.dims, "active_experts", 0):
            return open_window(family, *shared)
        return Window(*shared)

    def _meet_ranks(self) -> None:
        """Watch over what several ranks do together; their threads use this rank's device."""
        self.overdue = Overdue(self.watch, self.ranks)
        self.window.transfers.expect = self.overdue.expect
        for worker in (self.transfers, self.updates):
            worker.submit("its device", self.device.enter, FIRST)

    def step(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        step: int,
        learning_rate: float,
        weighed: WeighedRows | None = None,
    ) -> float:
        """Run one AdamW step on int64 [B, T] of all ranks; gives the mean loss, nats a labelled
        token.

        `weighed` weighs this rank's rows; the loss is then its own.

        Returns before the last updates are done; the next call, `flush` and `evaluate` wait for
        them.

        Raises:
            DataError: no token of the batch is labelled.
            ConfigError: the rows cannot be divided among the ranks.
            TrainingError: a thread died or hangs, and the message names the layer; or a step failed
                before.
        """
        count = self._labelled(labels)
        every = ids
        rows = self.ranks.rows(len(ids))
        self._open(True)
        self.updater.clipping.begin(step, learning_rate)
        ids = ids[rows]
        labels = labels[rows]
        micro_batches = self._micro_batches(ids)
        h = self.passes.forward(ids, micro_batches, keep=True, every=every)
        for unit in (
            self.store.resident.units
        ):  # no fetch waits for their norms, which clipping needs from here on
            self.updater.wait(unit)
        with self.watch.whole("the step"):  # gradients leave, and updates begin
            gradients, total = self.passes.head(
                h, [labels[rows] for rows in micro_batches], weighed or 1.0 / count
            )
            summed = self.window.all_reduce_total(total.reshape(1), self.total)
            self.passes.backward(gradients, ids, micro_batches)
            known = summed()
            self.last = self.transfers.submit("the end of the step", self.updater.end_backward)
        known.wait()
        return weighed.loss if weighed else float(self.total) / count

    def load(self, arrays: Arrays) -> None:
        """Take back what `arrays` of all ranks' stores and the norms gave; the engine is at rest.

        Raises:
            CheckpointError: naming the first array that is missing or of another size or type.
        """
        self.store.load(arrays)
        self.updater.loaded()
        self.updater.clipping.restore(arrays)

    def flush(self) -> None:
        """Wait until all updates are done: the host then has the state after the last step."""
        if self.last is not None:
            self.last.wait()
        self.updater.flush()
        self.device.synchronize()
        self.watch.check()

    @property
    def host_bytes(self) -> int:
        """Host memory of the engine: states, gradient and conversion buffers, activations."""
        return self.store.bytes + self.updater.bytes + self.activations.bytes + self.window.bytes

    def close(self) -> None:
        """End the threads and unlock the host memory; a hanging thread ends with the process."""
        self.stop_listening()
        self.untile()
        if self.overdue is not None:
            self.overdue.close()
        if all([worker.close() for worker in (self.transfers, self.updates)]):
            if self.disk is not None:
                self.disk.close()
            self.device.close()

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood, float32 [rows], and its labelled tokens, int64
        [rows].

        Each rank computes its rows, and all get the result."""
        rows = self._own_rows(len(ids))
        nll = self._row_losses(ids[rows], labels[rows], ids)
        return self.ranks.collect(nll).T.reshape(-1)[: len(ids)].numpy(), self._labels_a_row(labels)

    def evaluate_branches(
        self,
        ids: np.ndarray,
        position_ids: np.ndarray,
        branches: np.ndarray,
        sources: np.ndarray,
        labels: np.ndarray,
    ) -> np.ndarray:
        """Compute the labels' losses; see `core.session.Branching`. Each rank computes its rows."""
        world = self.ranks.world
        trees, tokens = np.divmod(sources, ids.shape[1])
        own = np.flatnonzero(trees % world == self.ranks.rank)
        places = trees[own] // world * ids.shape[1] + tokens[own]
        rows = self._own_rows(len(ids))
        self._open(False)
        tree = (position_ids[rows], branches[rows])
        micro_batches = self._micro_batches(rows)
        found = torch.zeros(len(labels))
        found[torch.from_numpy(own)] = self.passes.branches_nll(
            ids[rows], tree, micro_batches, ids, places, labels[own]
        ).cpu()
        return self.ranks.collect(found).sum(0).numpy()

    def _own_rows(self, count: int) -> np.ndarray:
        """Return the rows of this rank; if they do not divide evenly, the first one fills up."""
        filled = np.concatenate([np.arange(count), np.zeros(-count % self.ranks.world, np.int64)])
        return filled[self.ranks.rows(len(filled))]

    def _row_losses(self, ids: np.ndarray, labels: np.ndarray, every: np.ndarray) -> Tensor:
        """Float32 [rows] on the host; `every` is what all ranks read together."""
        self._open(False)
        micro_batches = self._micro_batches(ids)
        h = self.passes.forward(ids, micro_batches, False, every)
        return self.passes.score(h, [labels[rows] for rows in micro_batches]).cpu()

    def _labels_a_row(self, labels: np.ndarray) -> np.ndarray:
        return (labels[:, 1:] != IGNORE).sum(1).astype(np.int64)

    def _open(self, step: bool) -> bool:
        """Begin a pass, once the last one has been put into the queues. True if that was a step,
        whose spans are taken."""
        self.watch.check()
        if self.last is not None:
            self.last.wait()
            self.last = None
        self.updater.check_ended()
        now = time.perf_counter()
        spans = self.timeline.drain()
        seen = self.began is not None
        if self.began is not None:
            self.spans = spans
            self.overlap = overlap(spans, now - self.began, self.config.bus_limit_gb_per_s)
        self.began = now if step else None
        return seen

    def _labelled(self, labels: np.ndarray) -> int:
        """The number of labelled tokens of int64 [B, T].

        Raises:
            DataError: none is.
        """
        count = int((labels[:, 1:] != IGNORE).sum())
        if not count:
            raise DataError(
                "a batch has no token to learn from", hint="longer rows, or data.max_length_tokens"
            )
        return count

    def _micro_batches(self, ids: np.ndarray) -> list[slice]:
        size = self.config.micro_batch_size or len(ids)
        return [slice(low, min(low + size, len(ids))) for low in range(0, len(ids), size)]


def host_threads(device: str, sharing: int = 1) -> int:
    """Return the number of cores for this process of the `sharing` ones; with an accelerator, two
    less, which feed it."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    return max(1, processors // sharing - 2 * (device != "cpu"))


LANES = ("forward", "backward", "h2d", "d2h", "comm", "update", "disk")


@dataclass(frozen=True)
class Overlap:
    """One step, seconds and bytes. Sums are over what a lane was busy, not over wall time.

    Attributes:
        forward_s, backward_s: of the accelerator's computation; recomputation counts as backward.
        h2d_s, d2h_s: of copies; update_s: of AdamW on the host; disk_s: wall time with
            transfers to or from the disk under way.
        wall_s: from the step's begin to the next one's.
        idle_s: wall time in which the accelerator computed nothing.
        hiding_factor: backward_s / (d2h_s + max(update_s, disk_s)) (SlideFormer section 3.1); from
            1 on the update is hidden.
        bound: the lane that was busy longest.
        comm_s: of gathers and sums over ranks, including waits for other ranks; 0 in one process.
        simulated_gb_per_s: GB/s of a simulated bus (`bus_limit_gb_per_s`); None is the real one.
    """

    forward_s: float
    backward_s: float
    h2d_s: float
    d2h_s: float
    update_s: float
    disk_s: float
    wall_s: float
    idle_s: float
    hiding_factor: float
    h2d_bytes: int
    d2h_bytes: int
    bound: str
    comm_s: float = 0.0
    simulated_gb_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def overlap(spans: Spans, wall_s: float, simulated_gb_per_s: float | None = None) -> Overlap:
    """Sum up the spans of one step."""
    busy: dict[str, float] = dict.fromkeys(LANES, 0.0)
    sizes = {"h2d": 0, "d2h": 0}
    for lane, _, start, end, size in spans:
        busy[lane] += (end - start) * (lane != "disk")
        if lane in sizes:
            sizes[lane] += size
    busy["disk"] = _covered([(start, end) for lane, _, start, end, _ in spans if lane == "disk"])
    computed = busy["forward"] + busy["backward"]
    groups = {
        "compute": computed,
        **{lane: busy[lane] for lane in ("h2d", "d2h", "comm", "update", "disk")},
    }
    leaving = busy["d2h"] + max(busy["update"], busy["disk"])
    return Overlap(
        forward_s=busy["forward"],
        backward_s=busy["backward"],
        h2d_s=busy["h2d"],
        d2h_s=busy["d2h"],
        update_s=busy["update"],
        disk_s=busy["disk"],
        wall_s=wall_s,
        idle_s=max(0.0, wall_s - computed),
        hiding_factor=busy["backward"] / leaving if leaving else float("inf"),
        h2d_bytes=sizes["h2d"],
        d2h_bytes=sizes["d2h"],
        bound=max(groups, key=lambda lane: groups[lane]),
        comm_s=busy["comm"],
        simulated_gb_per_s=simulated_gb_per_s,
    )


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one span runs: the disk works at several transfers at once."""
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def chrome_trace(spans: Spans, path: Path) -> None:
    """Write spans for chrome://tracing or Perfetto, microseconds from the first."""
    first = min((span[2] for span in spans), default=0.0)
    events = [
        {
            "name": name, "cat": lane, "ph": "X", "pid": 0, "tid": LANES.index(lane),
            "ts": round((start - first) * 1e6, 1), "dur": round((end - start) * 1e6, 1), "args": {"bytes": size},
        }
        for lane, name, start, end, size in spans
    ]  # fmt: skip
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": lane}}
        for number, lane in enumerate(LANES)
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}) + "\n", encoding="utf-8")
