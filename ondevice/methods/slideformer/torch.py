"""The layer-sliding engine (SlideFormer section 3.1): the accelerator holds a window of layers,
gradients leave as soon as they are there, and the host updates a layer while the accelerator
computes the next.

A step goes through the layers once, up and down. All micro-batches pass a layer while it is there,
so accumulation costs no transfers, and gradients accumulate on the accelerator. Between two steps
only the embedding's rows of the batch and layer 0 are waited for.

Its session adds a state for checkpoints, and the trained weights; of ranks, each one's shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.artifact.together import make, write_parts
from ondevice.core.errors import StorageError
from ondevice.core.session import OPTIMIZER_STEP, HoldsState
from ondevice.methods import ranked_session
from ondevice.methods.slideformer.disk import Disk, open_disk
from ondevice.methods.slideformer.store import TieredStore
from ondevice.methods.slideformer.updater import Updater
from ondevice.methods.slideformer.window import Window
from ondevice.models.save import FILE_NAME, as_numpy, save_description, save_weights
from ondevice.nn.memory import memory_errors
from ondevice.offload.engine import EngineSession, OffloadEngine, host_threads, join
from ondevice.offload.passes import Passes
from ondevice.offload.transfers import Activations
from ondevice.offload.units import SINGLE, Ranks, unit_key
from ondevice.offload.worker import Task, Worker

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.models import Family, LoadedModel
    from ondevice.offload.units import Arrays


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
        config.check_training()
        super().__init__(family, config, device, ranks)
        self.last: Task | None = None
        self.disk: Disk | None = None
        if config.uses_disk:
            self.disk = open_disk(self.units, config, self.device, self.timeline, self.watch, ranks)
        self.transfers = Worker("transfer", self.watch)
        self.updates = Worker("update", self.watch)
        try:
            self._allocate(family)
        except BaseException:  # no file and no thread stays where memory does not suffice
            self.close()
            raise

    def _allocate(self, family: Family) -> None:
        config = self.config
        ranks = self.ranks
        states = inputs = None
        if self.disk is not None:
            states = self.disk.states
            inputs = self.disk.activations
        self.store = TieredStore(self.units, config, self.device, states, ranks)
        shared = (self.units, self.store, config, self.device, self.timeline)
        threads = config.threads or host_threads(self.device.type, ranks.sharing)
        self.updater = Updater(*shared, self.updates, self.watch, threads, states)
        self.window = Window(*shared, self.transfers, self.updater)
        self._meet_ranks(self.window.transfers, (self.transfers, self.updates))
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


WINDOW_HINT = "method.window: 2, method.loss_tiles: 4; `ondevice plan` lists what each part needs"
STEP_HINT = "method.micro_batch_size: 1, method.loss_chunk_tokens: 512; `ondevice plan` lists what each part needs"


class SlideformerSession(EngineSession, HoldsState):
    """AdamW over all parameters of a model that need not fit the accelerator; see `Session`."""

    engine: SlideformerEngine
    step_hint = STEP_HINT

    def __init__(
        self, loaded: LoadedModel, config: SlideformerConfig, device: str, ranks: Ranks = SINGLE
    ) -> None:
        with memory_errors("the window of layers and the output head", WINDOW_HINT):
            super().__init__(
                loaded, config, SlideformerEngine(loaded.family, config, device, ranks)
            )
        self.unwritten: Counter[str] = Counter()

    def state(self) -> dict[str, np.ndarray]:
        """Return this rank's masters and moments: views that the next step changes; bfloat16 as
        uint16."""
        self.engine.flush()
        arrays = self.engine.store.arrays()
        first = self.ranks.rank == 0
        if first:
            arrays |= self.engine.updater.clipping.norms()
        arrays = self.arrays = dict(
            reversed(arrays.items())
        )  # what the next step updates first comes first
        self.unwritten = Counter(unit_key(name) for name in arrays)
        state = {name: as_numpy(tensor) for name, tensor in arrays.items()}
        if first:
            return {**state, OPTIMIZER_STEP: np.array([self.steps_done], dtype=np.int64)}
        return state

    def hold(self) -> None:
        """Update no unit before `written` has named all its arrays: the last `state` is being
        written."""
        self.engine.updater.keep(set(self.unwritten))

    def written(self, name: str | None) -> None:
        """Note that the array `name` of `state` has been read; None: no more will be."""
        if name is None:
            self.engine.updater.release(None)
            self.arrays = {}
            return
        key = unit_key(name)
        self.unwritten[key] -= 1
        if not self.unwritten[key]:
            self.engine.updater.release(key)

    def save_beside(self, folder: Path) -> Callable[[], dict[str, str]] | None:
        """Write the weights as transformers loads them, into the checkpoint's folder."""
        save_weights(folder / "model", self.engine.store.weights(self.arrays), self.loaded)
        return None

    def _load(self, arrays: Arrays) -> None:
        self.engine.load(arrays)

    def _after_load(self) -> None:
        if not self.ranks.single:
            self.engine.window.gather_resident()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, views; bfloat16 if computed in it. Only for one
        process: no rank has the parameters of all."""
        self.engine.flush()
        return self.engine.store.weights(self.engine.store.flats())


class RankedSession(SlideformerSession):
    """One of several ranks: each writes its own shard, of the model into one file, of the state
    into its own."""

    def make_model(self, folder: Path) -> None:
        """Make the model's folder, with room for what `write_model` writes on every rank."""
        folder.mkdir(parents=True, exist_ok=True)
        make(folder / FILE_NAME, *self._weights)
        dtype = torch.float32
        if self.engine.store.split:
            dtype = torch.bfloat16
        save_description(folder, dtype, self.loaded)

    def write_model(self, folder: Path, arrays: dict[str, torch.Tensor] | None) -> None:
        """Write this rank's shard of the weights, out of `arrays` or as they are now.

        Raises:
            StorageError: rank 0's folder is not visible here, or the disk fails.
        """
        store = self.engine.store
        parts = store.weight_parts(store.flats() if arrays is None else arrays)
        try:
            write_parts(
                folder / FILE_NAME,
                *self._weights,
                ((name, at, as_numpy(t)) for name, at, t in parts),
            )
        except OSError as error:
            raise StorageError(
                f"rank {self.ranks.rank} cannot write {folder / FILE_NAME}: {error.strerror}",
                hint="train.out must be in a file system that all hosts of the run share",
            ) from error

    @property
    def _weights(self) -> tuple[dict[str, tuple[int, ...]], str]:
        """Shapes of all parameters, and their type in the file."""
        pieces = (piece for unit in self.engine.units.all for piece in unit.pieces)
        return {
            piece.name: piece.shape for piece in pieces
        }, "BF16" if self.engine.store.split else "F32"


class Leader(ranked_session.Leader, RankedSession):
    """Rank 0's session."""


class Follower(ranked_session.Follower, RankedSession):
    """Another rank's session."""


def agreed(config: SlideformerConfig, ranks: Ranks) -> SlideformerConfig:
    """Return rank 0's settings, with the least of each number that any rank chose."""
    if ranks.single:
        return config
    mine = {
        "window": config.slots,
        "resident_layers": config.kept_layers,
        "gradient_buffers": config.buffers,
        "resident_tables": config.keeps_tables,
    }
    every = ranks.calls.every(mine)
    return ranks.settings(config).model_copy(
        update={name: min(other[name] for other in every) for name in mine}
    )


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> SlideformerSession:
    """See `MethodSpec.open_session`; the model is on the host, and `seed` is not used.

    Under `torchrun` with several processes, rank 0 has a `Leader`, and the others a `Follower`.
    """
    ranks, where = join(device or "cpu", config.timeout_s)
    if ranks.single:
        return SlideformerSession(loaded, config, where, ranks)
    kind = Follower if ranks.rank else Leader
    return kind(loaded, agreed(config, ranks), where, ranks)
