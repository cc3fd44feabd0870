"""The session of SlideFormer: its engine, its state for checkpoints, and the trained weights; and sessions for ranks.

Under `torchrun` rank 0 trains as if alone, and the others do what it does: data, log, progress and signals are rank 0's
alone. So nothing that trains a session knows of ranks. Of a checkpoint each rank writes its own share, beside the next
steps; it gets its name when all have.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ondevice.artifact.files import write_tensors
from ondevice.artifact.together import make, write_parts
from ondevice.core.errors import CheckpointError, OndeviceError, StorageError, TrainingError
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.methods.engine_session import EngineSession, as_numpy, steps_of
from ondevice.methods.slideformer.auto import agreed
from ondevice.methods.slideformer.engine import SlideformerEngine
from ondevice.models.save import FILE_NAME, save_description, save_weights
from ondevice.offload.device import memory_errors
from ondevice.offload.ranks import SINGLE, Ranks, join
from ondevice.offload.shares import Joined, unit_key

if TYPE_CHECKING:
    from ondevice.core.session import StepResult
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.models import LoadedModel


WINDOW_HINT = "method.window: 2, method.loss_tiles: 4; `ondevice plan` lists what each part needs"
STEP_HINT = "method.micro_batch_size: 1, method.loss_chunk_tokens: 512; `ondevice plan` lists what each part needs"


class SlideformerSession(EngineSession):
    """AdamW over all parameters of a model that need not fit the accelerator; see `Session`."""

    engine: SlideformerEngine
    step_hint = STEP_HINT
    saves_beside = True

    def __init__(self, loaded: LoadedModel, config: SlideformerConfig, device: str, ranks: Ranks = SINGLE) -> None:
        self.ranks = ranks
        with memory_errors("the window of layers and the output head", WINDOW_HINT):
            super().__init__(loaded, config, SlideformerEngine(loaded.family, config, device, ranks))
        self.unwritten: Counter[str] = Counter()
        self.arrays: dict[str, torch.Tensor] = {}

    def state(self) -> dict[str, np.ndarray]:
        """Return this rank's masters and moments as they lie in host memory, views that the next step changes; bfloat16
        as uint16."""
        self.engine.flush()
        arrays, first = self.engine.store.arrays(), self.ranks.rank == 0
        if first:
            arrays |= self.engine.updater.clipping.norms()
        arrays = self.arrays = dict(reversed(arrays.items()))  # what the next step updates first comes first
        self.unwritten = Counter(unit_key(name) for name in arrays)
        state = {name: as_numpy(tensor) for name, tensor in arrays.items()}
        return {**state, OPTIMIZER_STEP: np.array([self.steps_done], dtype=np.int64)} if first else state

    def hold(self) -> None:
        """Update no unit before `written` has named all its arrays: the last `state` is written beside the steps."""
        self.engine.updater.keep(set(self.unwritten))

    def written(self, name: str | None) -> None:
        """Note that the array `name` of `state` has been read, or None: nothing of it will be read any more."""
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

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Take back what `state` gave on any number of ranks; those but rank 0 have theirs from there."""
        self.engine.flush()
        problem: Exception | None = None
        with self.ranks.lent(Joined(state or {})) as arrays:
            try:
                done = steps_of(arrays.get(OPTIMIZER_STEP))
                self.engine.load(arrays)
                self.steps_done = done
            except CheckpointError as error:
                problem = error
        self.ranks.agree(problem)
        if not self.ranks.single:
            self.engine.window.gather_resident()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, views; bfloat16 where that is what was computed with. Of one process:
        no rank holds those of all."""
        self.engine.flush()
        return self.engine.store.weights(self.engine.store.flats())


class RankedSession(SlideformerSession):
    """One of several ranks: each writes its own share, of the model into one file, of the state into its own."""

    def make_model(self, folder: Path) -> None:
        """Make the model's folder, with room for what `write_model` writes on every rank."""
        folder.mkdir(parents=True, exist_ok=True)
        make(folder / FILE_NAME, *self._weights)
        dtype = torch.bfloat16 if self.engine.store.split else torch.float32
        save_description(folder, dtype, self.loaded)

    def write_model(self, folder: Path, arrays: dict[str, torch.Tensor]) -> None:
        """Write this rank's share of the weights, out of its `flats` or `arrays`.

        Raises:
            StorageError: the folder is not where rank 0 made it, or the disk fails.
        """
        parts = self.engine.store.weight_parts(arrays)
        try:
            write_parts(folder / FILE_NAME, *self._weights, ((name, at, as_numpy(t)) for name, at, t in parts))
        except OSError as error:
            raise StorageError(
                f"rank {self.ranks.rank} cannot write {folder / FILE_NAME}: {error.strerror}",
                hint="train.out must be in a file system that all hosts of the run share",
            ) from error

    def save_model(self, folder: Path) -> None:
        """Write the trained model as transformers loads it; all ranks together."""
        self.engine.flush()
        problem: Exception | None = None
        try:
            self.write_model(folder, self.engine.store.flats())
        except OndeviceError as error:
            problem = error
        self.ranks.agree(problem)

    @property
    def _weights(self) -> tuple[dict[str, tuple[int, ...]], str]:
        """Shapes of all parameters, and their type in the file."""
        pieces = (piece for unit in self.engine.units.all for piece in unit.pieces)
        return {piece.name: piece.shape for piece in pieces}, "BF16" if self.engine.store.split else "F32"


class Leader(RankedSession):
    """Rank 0's session: every call is made on all ranks, with the same arguments."""

    waiting: Literal["nobody", "folder", "files"] = "nobody"
    """What the others' threads wait for, or this one for theirs."""

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """Run one AdamW step on the rows of all ranks."""
        self.ranks.calls.broadcast(("step", (ids, labels, step, learning_rate)))
        return super().step(ids, labels, step, learning_rate)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; every rank computes its rows."""
        self.ranks.calls.broadcast(("evaluate", (ids, labels)))
        return super().evaluate(ids, labels)

    def state(self) -> dict[str, np.ndarray]:
        """Return this rank's masters and moments; the others hold theirs until `save_beside` or `written(None)`."""
        self.ranks.calls.broadcast(("state", ()))
        self.waiting = "folder"
        return super().state()

    def save_beside(self, folder: Path) -> Callable[[], dict[str, str]] | None:
        """Let all ranks write into the checkpoint's folder."""
        self.make_model(folder / "model")
        self.ranks.files.broadcast(folder)
        self.waiting = "files"
        self.write_model(folder / "model", self.arrays)

        def files() -> dict[str, str]:
            self.waiting = "nobody"
            digests: dict[str, str] = {}
            for answer in self.ranks.files.every(None)[1:]:
                if not isinstance(answer, tuple):
                    raise answer or TrainingError("a rank has not written its state")
                digests[answer[0]] = answer[1]
            for name in digests:
                if not (folder / name).is_file():
                    raise _not_shared(folder / name)
            return digests

        return files

    def written(self, name: str | None) -> None:
        """See `SlideformerSession.written`; None is for all ranks."""
        if name is None:
            waiting, self.waiting = self.waiting, "nobody"
            try:
                if waiting == "folder":
                    self.ranks.files.broadcast(None)
                elif waiting == "files":  # writing here failed: what the others say no longer matters
                    self.ranks.files.every(None)
            except TrainingError:  # a rank is gone: the next step says so
                pass
        super().written(name)

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Take back what `state` gave, and give the others theirs."""
        self.ranks.calls.broadcast(("load_state", (None,)))
        super().load_state(state)

    def save_model(self, folder: Path) -> None:
        """See `RankedSession.save_model`."""
        self.make_model(folder)
        self.ranks.calls.broadcast(("save_model", (folder,)))
        super().save_model(folder)

    def finish(self, outcome: Any) -> None:
        """Let the others end; `outcome` is what their `follow` returns."""
        self.ranks.calls.broadcast(("finish", outcome))


def _not_shared(path: Path) -> StorageError:
    return StorageError(
        f"{path} is not here, and another rank has written it",
        hint="train.out must be in a file system that all hosts of the run share",
    )


class Follower(RankedSession):
    """Another rank's session."""

    writer: threading.Thread | None = None

    def follow(self) -> Any:
        """Do what rank 0 does until it has finished.

        Raises:
            TrainingError: rank 0 has ended without a word.
        """
        while True:
            call: tuple[str, Any] = self.ranks.calls.broadcast()
            name, arguments = call
            if name == "finish":
                self.close()
                return arguments
            getattr(self, name)(*arguments)

    def state(self) -> dict[str, np.ndarray]:
        """Return this rank's masters and moments, which are written beside the next steps where rank 0 says."""
        self._end_writing()
        state = super().state()
        self.hold()
        self.writer = threading.Thread(target=self._write, args=(state,), name="ondevice-checkpoint", daemon=True)
        self.writer.start()
        return state

    def close(self) -> None:
        """See `EngineSession.close`; a checkpoint is written to its end."""
        self._end_writing()
        super().close()

    def _end_writing(self) -> None:
        if self.writer is not None:
            self.writer.join()

    def _write(self, state: dict[str, np.ndarray]) -> None:
        """Write into the folder that rank 0 names, and tell it the file's SHA-256, or what went wrong."""
        answer: tuple[str, str] | Exception
        try:
            folder = self.ranks.files.broadcast()
            if folder is None:
                return
            try:
                answer = self._write_state(folder, state)
            except (OSError, OndeviceError) as error:
                answer = error
            self.ranks.files.every(answer)
        except TrainingError:  # rank 0 is gone, which the next call says
            pass
        finally:
            self.written(None)

    def _write_state(self, folder: Path, state: dict[str, np.ndarray]) -> tuple[str, str]:
        for name, value in state.items():
            if value.dtype.kind == "f" and not np.isfinite(value).all():
                raise TrainingError(
                    f"step {self.steps_done - 1} left values in '{name}' that are no numbers",
                    expected="finite parameters",
                    received="inf or nan",
                    hint="a lower learning rate",
                )
        self.write_model(folder / "model", self.arrays)
        path = folder / f"state-{self.ranks.rank:05d}.safetensors"
        digest = write_tensors(path, state, written=self.written)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # on this host; rank 0 flushes its own
        finally:
            os.close(descriptor)
        return path.name, digest


def open_session(loaded: LoadedModel, config: Any, seed: int, device: str | None = None) -> SlideformerSession:
    """See `MethodSpec.open_session`; the model is on the host, and nothing is drawn from `seed`.

    Under `torchrun` with several processes, rank 0 has a `Leader`, and the others a `Follower`.
    """
    ranks, where = join(device or "cpu", config.timeout_s)
    kind = SlideformerSession if ranks.single else Follower if ranks.rank else Leader
    return kind(loaded, agreed(config, ranks), where, ranks)
