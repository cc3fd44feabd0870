"""SlideFormer's session: `OffloadEngine` over all parameters, a state for checkpoints, and the
trained weights; of ranks, each one's shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.core.session import OPTIMIZER_STEP, HoldsState
from ondevice.methods import ranked_session
from ondevice.models.save import as_numpy, save_weights
from ondevice.offload.device import memory_errors
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.session import EngineSession, join
from ondevice.offload.units import SINGLE, Ranks, unit_key

if TYPE_CHECKING:
    from ondevice.methods.slideformer.config import SlideformerConfig
    from ondevice.models import LoadedModel
    from ondevice.offload.units import Arrays

WINDOW_HINT = "method.window: 2, method.loss_tiles: 4; `ondevice plan` lists what each part needs"
STEP_HINT = "method.micro_batch_size: 1, method.loss_chunk_tokens: 512; `ondevice plan` lists what each part needs"


class SlideformerSession(EngineSession, HoldsState):
    """AdamW over all parameters of a model that need not fit the accelerator; see `Session`."""

    engine: OffloadEngine
    step_hint = STEP_HINT

    def __init__(
        self, loaded: LoadedModel, config: SlideformerConfig, device: str, ranks: Ranks = SINGLE
    ) -> None:
        with memory_errors("the window of layers and the output head", WINDOW_HINT):
            super().__init__(loaded, config, OffloadEngine(loaded.family, config, device, ranks))
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

    def weight_parts(
        self, arrays: dict[str, torch.Tensor] | None
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Yield this rank's parts of the parameters, out of `arrays` or as they are now; see
        `EngineSession.weight_parts`."""
        store = self.engine.store
        return store.weight_parts(store.flats() if arrays is None else arrays)

    @property
    def saved_dtype(self) -> torch.dtype:
        """Type of the weights in a model's file."""
        return torch.bfloat16 if self.engine.store.split else torch.float32

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, views; bfloat16 if computed in it. Only for one
        process: no rank has the parameters of all."""
        self.engine.flush()
        return self.engine.store.weights(self.engine.store.flats())


class Leader(ranked_session.Leader, SlideformerSession):
    """Rank 0's session."""


class Follower(ranked_session.Follower, SlideformerSession):
    """Another rank's session."""


def agreed(config: SlideformerConfig, ranks: Ranks) -> SlideformerConfig:
    """Return rank 0's settings, with the least of each number that any rank chose."""
    if ranks.single:
        return config
    mine = {
        "window": config.slots,
        "resident_layers": config.kept_layers,
        "gradient_buffers": config.buffers,
        "presumed_layers": config.presumed,
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
