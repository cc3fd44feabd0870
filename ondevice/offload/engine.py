"""The offload engine: layers slide through the accelerator, gradients leave as soon as they are
there, and the host updates a layer while the accelerator computes the next (SlideFormer section
3.1).

A step goes through the layers once, up and down. All micro-batches pass a layer while it is there,
so accumulation costs no transfers, and gradients accumulate on the accelerator. Between two steps
only the embedding's rows of the batch and layer 0 are waited for.

A unit of the model crosses the bus as a unit of its own, its wire. Here the two are the same;
LSP-Offload's have few numbers for a large matrix."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.models.families.any_decoder import as_whole
from ondevice.offload.bus import throttled
from ondevice.offload.device import Spans, Timeline, open_device
from ondevice.offload.disk import Disk, open_disk
from ondevice.offload.experts import listen, open_window
from ondevice.offload.liger import patch_layers, use_liger
from ondevice.offload.momentum import MuonWindow
from ondevice.offload.muon import suits
from ondevice.offload.overdue import Overdue
from ondevice.offload.report import Overlap, overlap
from ondevice.offload.store import TieredStore
from ondevice.offload.tiles import tile
from ondevice.offload.transfers import Activations
from ondevice.offload.units import SINGLE, Ranks, Units, cut
from ondevice.offload.updater import Updater
from ondevice.offload.whole import open_passes
from ondevice.offload.window import Window
from ondevice.offload.worker import FIRST, Task, Watch, Worker

if TYPE_CHECKING:
    from ondevice.nn.cross_entropy import WeighedRows
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.passes import Passes
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
        family = as_whole(family)
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
        self.stop_listening = listen(family, self.window)
        if not ranks.single:
            self._meet_ranks()
        self.activations = Activations(self.device, self.timeline, config.activations, inputs)
        ahead = (self.units, config, self.device, self.timeline, self.window, self.activations)
        self.passes = open_passes(family, *ahead, self.where, self.liger)
        self.total = self.device.pinned(1, torch.float32)

    def _wires(self, family: Any) -> Units:
        """Return the units as they cross the bus."""
        return self.units

    def _window(self, family: Any, *shared: Any) -> Window:
        """Open the memory on the accelerator."""
        if self.config.optimizer == "muon":
            return MuonWindow(*shared)
        return open_window(family, *shared)

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
