"""The base of the offload engines: the device, a model cut into units, spans of a step,
evaluation."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import DataError
from ondevice.core.session import IGNORE
from ondevice.offload.cuda import CudaDevice, throttled
from ondevice.offload.device import CpuDevice, Device, Overlap, Spans, Timeline, overlap
from ondevice.offload.kernels import patch_layers, use_liger
from ondevice.offload.ranks import SINGLE, Ranks
from ondevice.offload.units import cut
from ondevice.offload.worker import Watch

if TYPE_CHECKING:
    from ondevice.models import Family
    from ondevice.offload.config import EngineConfig
    from ondevice.offload.passes import Passes


class OffloadEngine:
    """A model cut into units, on a device that is open, with its clock.

    Attributes:
        ranks: those that train together. All make the same calls with the same batches; a step
            computes this rank's rows of its batch, and so does an evaluation.
        kernels: `liger` or `torch`, of the layers.
        overlap: of the last step whose end the next pass has seen; `spans` likewise.
    """

    config: EngineConfig
    passes: Passes

    def __init__(
        self, family: Family, config: EngineConfig, device: str, ranks: Ranks = SINGLE
    ) -> None:
        self.config = config
        self.where = torch.device(device)
        self.ranks = ranks
        self.device = open_device(device)
        if config.bus_limit_gb_per_s is not None:
            self.device = throttled(self.device, config.bus_limit_gb_per_s)
        self.liger = use_liger(config, self.device.type)
        self.kernels = "liger" if self.liger and patch_layers(family) else "torch"
        self.units = cut(family)
        self.watch = Watch(config.timeout_s)
        self.timeline = Timeline(self.device)
        self.began: float | None = None  # of the last pass, if it was a step's
        self.overlap: Overlap | None = None
        self.spans: Spans = []

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood, float32 [rows], and its labelled tokens, int64
        [rows].

        Each rank computes its rows, and all get the result. If the rows do not divide evenly, the
        first one fills up."""
        count = len(ids)
        world = self.ranks.world
        filled = np.concatenate([np.arange(count), np.zeros(-count % world, dtype=np.int64)])
        rows = filled[self.ranks.rows(len(filled))]
        nll = self._row_losses(ids[rows], labels[rows], ids)
        return self.ranks.collect(nll).T.reshape(-1)[:count].numpy(), self._labels_a_row(labels)

    def _row_losses(self, ids: np.ndarray, labels: np.ndarray, every: np.ndarray) -> Tensor:
        """Float32 [rows] on the host; `every` is what all ranks read together."""
        self._open(False)
        micro_batches = self._micro_batches(ids)
        h = self.passes.forward(ids, micro_batches, False, every)
        return self.passes.score(h, [labels[rows] for rows in micro_batches]).cpu()

    def _labels_a_row(self, labels: np.ndarray) -> np.ndarray:
        return (labels[:, 1:] != IGNORE).sum(1).astype(np.int64)

    def _open(self, step: bool) -> bool:
        """Begin a pass. True if the one before was a step, whose spans are taken."""
        self.watch.check()
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


def open_device(name: str) -> Device:
    """Open `cpu`, or `cuda` with an optional index."""
    device = torch.device(name)
    return CpuDevice() if device.type == "cpu" else CudaDevice(device.index)
