"""The session of SlideFormer: its engine, its state for checkpoints, and the trained weights; and
those of ranks."""

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
from ondevice.methods.engine_session import EngineSession, as_numpy
from ondevice.methods.slideformer.auto import agreed
from ondevice.methods.slideformer.engine import SlideformerEngine
from ondevice.models.save import FILE_NAME, save_description, save_weights
from ondevice.nn.memory import memory_errors
from ondevice.offload.ranks import SINGLE, Ranks, join
from ondevice.offload.units import unit_key

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.models import LoadedModel
    from ondevice.offload.messages import Arrays


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
        dtype = torch.bfloat16 if self.engine.store.split else torch.float32
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


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> SlideformerSession:
    """See `MethodSpec.open_session`; the model is on the host, and `seed` is not used.

    Under `torchrun` with several processes, rank 0 has a `Leader`, and the others a `Follower`.
    """
    ranks, where = join(device or "cpu", config.timeout_s)
    if ranks.single:
        kind = SlideformerSession
    elif ranks.rank:
        kind = Follower
    else:
        kind = Leader
    return kind(loaded, agreed(config, ranks), where, ranks)
