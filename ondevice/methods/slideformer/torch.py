"""The session of SlideFormer: its engine, its state for checkpoints, and the trained weights; and sessions for ranks.

Under `torchrun` rank 0 trains as if alone, and the others do what it does: data, log, checkpoints, progress and signals
are rank 0's alone. So nothing that trains a session knows of ranks.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.core.errors import CheckpointError
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.methods.engine_session import EngineSession, as_numpy, steps_of
from ondevice.methods.slideformer.engine import SlideformerEngine
from ondevice.models.save import save_weights
from ondevice.offload.device import memory_errors
from ondevice.offload.ranks import SINGLE, Ranks, join

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
        """Return masters and moments as they lie in host memory, views that the next step changes; bfloat16 as
        uint16."""
        self.engine.flush()
        arrays = self.ranks.gather(self.engine.store.arrays() | self.engine.updater.clipping.norms())
        arrays = self.arrays = dict(reversed(arrays.items()))  # what the next step updates first comes first
        self.unwritten = Counter(name.partition("/")[2] for name in arrays)
        state = {name: as_numpy(tensor) for name, tensor in arrays.items()}
        return {**state, OPTIMIZER_STEP: np.array([self.steps_done], dtype=np.int64)}

    def hold(self) -> None:
        """Update no unit before `written` has named all its arrays: the last `state` is written beside the steps."""
        self.engine.updater.keep(set(self.unwritten))

    def written(self, name: str | None) -> None:
        """Note that the array `name` of `state` has been read, or None: nothing of it will be read any more."""
        if name is None:
            self.engine.updater.release(None)
            self.arrays = {}
            return
        key = name.partition("/")[2]
        self.unwritten[key] -= 1
        if not self.unwritten[key]:
            self.engine.updater.release(key)

    def save_beside(self, folder: Path) -> None:
        """Write the weights as transformers loads them, into the checkpoint's folder."""
        save_weights(folder / "model", self.engine.store.weights(self.arrays), self.loaded)

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Take back what `state` gave, on any number of ranks; those but rank 0 have it from there."""
        self.engine.flush()
        problem: Exception | None = None
        with self.ranks.lent(state) as arrays:
            try:
                done = steps_of(arrays.get(OPTIMIZER_STEP))
                self.engine.store.load(arrays)
                self.engine.updater.clipping.restore(arrays)
                self.steps_done = done
            except CheckpointError as error:
                problem = error
        self.ranks.agree(problem)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, views; bfloat16 where that is what was computed with."""
        self.engine.flush()
        flats = self.ranks.gather(self.engine.store.flats())
        return self.engine.store.weights(flats) if self.ranks.rank == 0 else {}


class Leader(SlideformerSession):
    """Rank 0's session: every call is made on all ranks, with the same arguments."""

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """Run one AdamW step on the rows of all ranks."""
        self.ranks.broadcast_object(("step", (ids, labels, step, learning_rate)))
        return super().step(ids, labels, step, learning_rate)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; every rank computes all rows."""
        self.ranks.broadcast_object(("evaluate", (ids, labels)))
        return super().evaluate(ids, labels)

    def state(self) -> dict[str, np.ndarray]:
        """Return masters and moments of all ranks: this one's as views, copies of the others'."""
        self.ranks.broadcast_object(("state", ()))
        return super().state()

    def load_state(self, state: dict[str, np.ndarray] | None) -> None:
        """Take back what `state` gave, and give the others theirs."""
        self.ranks.broadcast_object(("load_state", (None,)))
        super().load_state(state)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters of all ranks by name."""
        self.ranks.broadcast_object(("weights", ()))
        return super().weights()

    def finish(self, outcome: Any) -> None:
        """Let the others end; `outcome` is what their `follow` returns."""
        self.ranks.broadcast_object(("finish", outcome))


class Follower(SlideformerSession):
    """Another rank's session."""

    def follow(self) -> Any:
        """Do what rank 0 does until it has finished.

        Raises:
            TrainingError: rank 0 has ended without a word.
        """
        while True:
            call: tuple[str, Any] = self.ranks.broadcast_object()
            name, arguments = call
            if name == "finish":
                self.close()
                return arguments
            getattr(self, name)(*arguments)
            if name == "state":
                self.written(None)


def open_session(loaded: LoadedModel, config: Any, seed: int, device: str | None = None) -> SlideformerSession:
    """See `MethodSpec.open_session`; the model is on the host, and nothing is drawn from `seed`.

    Under `torchrun` with several processes, rank 0 has a `Leader`, and the others a `Follower`.
    """
    ranks, where = join(device or "cpu", config.timeout_s)
    kind = SlideformerSession if ranks.single else Follower if ranks.rank else Leader
    return kind(loaded, config, where, ranks)
