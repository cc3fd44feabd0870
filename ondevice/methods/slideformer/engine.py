"""The layer-sliding engine (SlideFormer section 3.1): the accelerator holds a window of layers,
gradients leave as soon as they are there, and the host updates a layer while the accelerator
computes the next.

A step goes through the layers once, up and down. All micro-batches pass a layer while it is there,
so accumulation costs no transfers, and gradients accumulate on the accelerator. Between two steps
only the embedding's rows of the batch and layer 0 are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ondevice.core.errors import ConfigError
from ondevice.methods.slideformer.disk import Disk, open_disk
from ondevice.methods.slideformer.store import TieredStore
from ondevice.methods.slideformer.updater import Updater
from ondevice.methods.slideformer.window import Window
from ondevice.offload.engine import OffloadEngine, host_threads
from ondevice.offload.overdue import Overdue
from ondevice.offload.passes import Passes
from ondevice.offload.ranks import SINGLE, Ranks
from ondevice.offload.transfers import Activations
from ondevice.offload.worker import Task, Worker

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.models import Family
    from ondevice.offload.ranks import Arrays


class SlideformerEngine(OffloadEngine):
    """Full-parameter AdamW steps of a model that is larger than the accelerator.

    Args:
        family: the model on the CPU; its parameters' values move into the engine.
        config: sizes and precisions.
        device: `cpu`, `cuda` or `cuda:N`.
        ranks: those that train together. All make the same calls with the same batches; a step
            computes this rank's rows of its batch, and so does an evaluation.

    Raises:
        StorageError: host memory cannot be locked, or the disk tier does not fit.
        MissingPackageError: the C++ update is asked for and cannot be compiled.
    """

    config: SlideformerConfig

    def __init__(
        self, family: Family, config: SlideformerConfig, device: str, ranks: Ranks = SINGLE
    ) -> None:
        _check(config)
        super().__init__(family, config, device, ranks)
        self.last: Task | None = None
        self.disk: Disk | None = None
        if config.uses_disk:
            self.disk = open_disk(self.units, config, self.device, self.timeline, self.watch, ranks)
        self.transfers = Worker("transfer", self.watch)
        self.updates = Worker("update", self.watch)
        self.overdue = None if ranks.single else Overdue(self.watch, ranks)
        try:
            self._allocate(family)
        except BaseException:  # no file and no thread stays where memory does not suffice
            self.close()
            raise

    def _allocate(self, family: Family) -> None:
        config = self.config
        ranks = self.ranks
        states = None if self.disk is None else self.disk.states
        inputs = None if self.disk is None else self.disk.activations
        self.store = TieredStore(self.units, config, self.device, states, ranks)
        if not ranks.single:
            for worker in (self.transfers, self.updates):
                worker.submit("its device", self.device.enter)
        shared = (self.units, self.store, config, self.device, self.timeline)
        threads = config.threads or host_threads(self.device.type, ranks.sharing)
        self.updater = Updater(*shared, self.updates, self.watch, threads, states)
        self.window = Window(*shared, self.transfers, self.updater)
        if self.overdue is not None:
            self.window.transfers.expect = self.overdue.expect
        self.activations = Activations(self.device, self.timeline, config.activations, inputs)
        ahead = (self.units, config, self.device, self.timeline, self.window, self.activations)
        self.passes = Passes(family, *ahead, self.where, self.liger)
        self.total = self.device.pinned(1, torch.float32)

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> float:
        """Run one AdamW step on int64 [B, T] of all ranks; gives the mean loss, nats a labelled
        token.

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
                h, [labels[rows] for rows in micro_batches], 1.0 / count
            )
            summed = self.window.all_reduce_total(total.reshape(1), self.total)
            self.passes.backward(gradients, ids, micro_batches)
            known = summed()
            self.last = self.transfers.submit("the end of the step", self.updater.end_backward)
        known.wait()
        return float(self.total) / count

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
        if self.overdue is not None:
            self.overdue.close()
        if all([worker.close() for worker in (self.transfers, self.updates)]):
            if self.disk is not None:
                self.disk.close()
            self.device.close()

    def _open(self, step: bool) -> bool:
        """Begin a pass, once the last one has been put into the queues."""
        self.watch.check()
        if self.last is not None:
            self.last.wait()
            self.last = None
        return super()._open(step)


def _check(config: SlideformerConfig) -> None:
    """Settings that exclude each other."""
    if (
        (config.kept_layers or config.keeps_tables)
        and config.max_grad_norm is not None
        and config.clip == "global"
    ):
        raise ConfigError(
            "resident units are updated at once, before a global norm is known",
            expected="resident_layers: 0 and resident_tables: false, or clip: previous or layer",
            received=f"resident_layers: {config.kept_layers}, resident_tables: {config.keeps_tables}",
        )
    if config.disk_masters and not config.disk_fraction:
        raise ConfigError(
            "masters go to the disk with the moments of their layers, but no moments do",
            expected="disk_fraction above 0, or disk_masters: false",
            received="disk_masters: true, disk_fraction: 0",
        )
