"""Sessions of methods that train in ranks (`torchrun`): rank 0 trains as if there were no others,
and they follow it.

Only rank 0 has data, log, progress and signals, so nothing that trains a session knows of ranks. Of
a checkpoint each rank writes its own shard, during the next steps if memory allows; it gets its
name when all have.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from ondevice.artifact.files import not_finite, write_tensors
from ondevice.artifact.together import make, write_parts
from ondevice.core.errors import OndeviceError, StorageError, TrainingError
from ondevice.models.save import FILE_NAME, as_numpy, save_description
from ondevice.offload.session import EngineSession

if TYPE_CHECKING:
    from ondevice.core.session import StepResult, Weigh


class RankedSession(EngineSession):
    """One of several ranks: each writes its own shard, of the model into one file, of the state
    into its own."""

    def make_model(self, folder: Path) -> None:
        """Make the model's folder, with room for what `write_model` writes on every rank."""
        folder.mkdir(parents=True, exist_ok=True)
        make(folder / FILE_NAME, *self._described)
        save_description(folder, self.saved_dtype, self.loaded)

    def write_model(self, folder: Path, arrays: dict[str, torch.Tensor] | None) -> None:
        """Write this rank's shard of the weights, out of `arrays` or as they are now.

        Raises:
            StorageError: rank 0's folder is not visible here, or the disk fails.
        """
        try:
            write_parts(
                folder / FILE_NAME,
                *self._described,
                ((name, at, as_numpy(part)) for name, at, part in self.weight_parts(arrays)),
            )
        except OSError as error:
            raise StorageError(
                f"rank {self.ranks.rank} cannot write {folder / FILE_NAME}: {error.strerror}",
                hint="train.out must be in a file system that all hosts of the run share",
            ) from error

    @property
    def _described(self) -> tuple[dict[str, tuple[int, ...]], str]:
        """Shapes of all parameters, and their type in the file."""
        pieces = (piece for unit in self.engine.units.all for piece in unit.pieces)
        kind = "BF16" if self.saved_dtype == torch.bfloat16 else "F32"
        return {piece.name: piece.shape for piece in pieces}, kind

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one AdamW step on the weighted rows of all ranks; see `Weighing`.

        Rank 0 calls its `weigh` with the losses of all rows; the others get their weights from it.
        """

        def weigh_own(nll: np.ndarray) -> tuple[float, np.ndarray]:
            every = self.ranks.collect(torch.from_numpy(nll)).T.reshape(-1).numpy()
            graded = None if self.ranks.rank else weigh(every)
            loss, weights = self.ranks.calls.broadcast(graded)
            return loss, weights[self.ranks.rows(len(every))]

        return super().weighted_step(ids, labels, weigh_own, step, learning_rate)

    def save_model(self, folder: Path) -> None:
        """Write the trained model as transformers loads it; all ranks together."""
        self.engine.flush()
        self._agreed(lambda: None if self.ranks.rank else self.make_model(folder))
        self._agreed(lambda: self.write_model(folder, None))

    def _agreed(self, write: Callable[[], None]) -> None:
        problem: Exception | None = None
        try:
            write()
        except OndeviceError as error:
            problem = error
        self.ranks.agree(problem)


class Leader(RankedSession):
    """Rank 0's session: every call is made on all ranks, with the same arguments."""

    waiting: Literal["nobody", "folder", "files"] = "nobody"
    """The message of a checkpoint that is still due: its folder, to the others, or their files, to
    this rank."""

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one AdamW step on the rows of all ranks."""
        self.ranks.calls.broadcast(("step", (ids, labels, step, learning_rate)))
        return super().step(ids, labels, step, learning_rate)

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """See `RankedSession.weighted_step`; the others need no `weigh`."""
        self.ranks.calls.broadcast(("weighted_step", (ids, labels, None, step, learning_rate)))
        return super().weighted_step(ids, labels, weigh, step, learning_rate)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; every rank computes its rows."""
        self.ranks.calls.broadcast(("evaluate", (ids, labels)))
        return super().evaluate(ids, labels)

    def evaluate_branches(self, *tree: np.ndarray) -> np.ndarray:
        """Compute the labels' losses; every rank computes its rows."""
        self.ranks.calls.broadcast(("evaluate_branches", tree))
        return super().evaluate_branches(*tree)

    def state(self) -> dict[str, np.ndarray]:
        """Return this rank's share of the state; the others hold theirs until `save_beside` or
        `written(None)`."""
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
        """See `HoldsState.written`; None is for all ranks."""
        if name is None:
            waiting = self.waiting
            self.waiting = "nobody"
            try:
                if waiting == "folder":
                    self.ranks.files.broadcast(None)
                elif (
                    waiting == "files"
                ):  # writing here failed: what the others say no longer matters
                    self.ranks.files.every(None)
            except TrainingError:  # a rank is gone: the next step says so
                pass
        super().written(name)

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Take back what `state` gave, and give the others theirs."""
        self.ranks.calls.broadcast(("load_state", (None,)))
        super().load_state(state)  # type: ignore[arg-type]

    def save_model(self, folder: Path) -> None:
        """See `RankedSession.save_model`."""
        self.ranks.calls.broadcast(("save_model", (folder,)))
        super().save_model(folder)

    def finish(self, result: Any) -> None:
        """Let the others end; `result` is what their `follow` returns."""
        self.ranks.calls.broadcast(("finish", result))


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
        """Return this rank's shard of the state, which is written during the next steps if rank 0
        says so."""
        self._end_writing()
        state = super().state()
        self.hold()
        self.writer = threading.Thread(
            target=self._write, args=(state,), name="ondevice-checkpoint", daemon=True
        )
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
        """Write into the folder that rank 0 names, and tell it the file's SHA-256, or what went
        wrong."""
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
        name = not_finite(state)
        if name is not None:
            raise TrainingError(
                f"step {self.steps_done - 1} left values in '{name}' that are not numbers",
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


def _not_shared(path: Path) -> StorageError:
    return StorageError(
        f"{path} is not here, and another rank has written it",
        hint="train.out must be in a file system that all hosts of the run share",
    )
