"""The session of LSP-Offload: its engine, its state for checkpoints, the trained weights, and
checks of the bias."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import CheckpointError
from ondevice.core.session import OPTIMIZER_STEP
from ondevice.methods import ranked_session
from ondevice.methods.lsp.config import checks_bias
from ondevice.methods.lsp.engine import LspEngine
from ondevice.methods.lsp.projected import PastChange
from ondevice.methods.lsp.projector import Projector
from ondevice.models.save import as_numpy, save_weights
from ondevice.offload.device import memory_errors
from ondevice.offload.host import DTYPES
from ondevice.offload.session import EngineSession, join
from ondevice.offload.units import SINGLE, Ranks, checked_array

if TYPE_CHECKING:
    from ondevice.core.session import StepResult
    from ondevice.methods.lsp.config import LspConfig
    from ondevice.methods.lsp.matrix import Matrix
    from ondevice.models import LoadedModel
    from ondevice.nn.cross_entropy import WeighedRows
    from ondevice.offload.units import Arrays

OPEN_HINT = (
    "method.weight_dtype: nf4 or method.weight_placement: host, method.window: 2; "
    "`ondevice plan` lists what each part needs"
)
STEP_HINT = (
    "method.micro_batch_size: 1, method.activations: host, method.loss_chunk_tokens: 512; "
    "`ondevice plan` lists what each part needs"
)


SIDES = ("left", "right")


class LspSession(EngineSession):
    """AdamW over all parameters, of matrices in learned subspaces; see `Session`."""

    engine: LspEngine
    step_hint = STEP_HINT

    def __init__(
        self, loaded: LoadedModel, config: LspConfig, device: str, seed: int, ranks: Ranks = SINGLE
    ) -> None:  # fmt: skip
        with memory_errors("the weights, the projectors and the output head", OPEN_HINT):
            super().__init__(loaded, config, LspEngine(loaded.family, config, device, seed, ranks))
        self.bias_checks: dict[str, Any] = {}

    def _train(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        learning_rate: float,
        weighed: WeighedRows | None,
    ) -> StepResult:
        checking = checks_bias(self.config, self.steps_done)
        result = super()._train(ids, labels, learning_rate, weighed)
        self.bias_checks = {}
        if checking:
            self.bias_checks = self._bias_checks()
        return result

    def report(self) -> dict[str, Any] | None:
        """Return the overlap report of the step before the last, with the biases if that step
        checked them.

        `bias_checks` holds them by parameter, each [before, after]; the means of both come with it.
        If projectors stay, after equals before."""
        overlap = super().report()
        if overlap is None:
            return None
        return {**overlap, **self.bias_checks}

    def state(self) -> dict[str, np.ndarray]:
        """Return changes, projectors, moments, and the weights that changes have gone into: copies;
        bfloat16 as uint16. Rank 0 returns what all ranks have."""
        self.engine.flush()
        self.arrays = state_arrays(self.engine)
        arrays = {name: as_numpy(tensor) for name, tensor in self.arrays.items()}
        if self.ranks.rank == 0:
            done = {OPTIMIZER_STEP: np.array([self.steps_done], dtype=np.int64)}
        else:
            done = {}
        return {**arrays, **done}

    def _load(self, arrays: Arrays) -> None:
        load_arrays(self.engine, arrays)
        self.bias_checks = {}

    def _after_load(self) -> None:
        """Do nothing: the next pass fetches everything."""

    def weight_parts(self, arrays: dict[str, Tensor] | None) -> Iterator[tuple[str, int, Tensor]]:
        """See `EngineSession.weight_parts`."""
        engine = self.engine
        return engine.weight_parts(engine.store.flats() if arrays is None else arrays)

    @property
    def saved_dtype(self) -> torch.dtype:
        """The compute dtype."""
        return DTYPES[self.config.compute]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters by name, on the host in the compute dtype: bases with their
        changes."""
        self.engine.flush()
        return self.engine.weights(DTYPES[self.config.compute])

    def save_beside(self, folder: Path) -> None:
        """Write the weights as transformers loads them, into the checkpoint's folder."""
        save_weights(folder / "model", self.weights(), self.loaded)

    def _bias_checks(self) -> dict[str, Any]:
        pairs = {
            name: (check.before, check.before if check.after is None else check.after)
            for name, check in self.engine.bias_checks.items()
        }
        if not pairs:
            return {}
        before, after = (fmean(pair[side] for pair in pairs.values()) for side in (0, 1))
        return {"bias_before": before, "bias_after": after, "bias_checks": pairs}


class Leader(ranked_session.Leader, LspSession):
    """Rank 0's session."""


class Follower(ranked_session.Follower, LspSession):
    """Another rank's session."""


def state_arrays(engine: LspEngine) -> dict[str, Tensor]:
    """Return everything a resume needs, on the host, as copies; call `flush` before. Ranks but the
    first return only their shards of the states."""
    tensors = {name: tensor.clone() for name, tensor in engine.store.arrays().items()}
    if engine.ranks.rank:
        return tensors
    tensors |= engine.updater.clipping.norms()
    for part in engine.parts:
        if not part.matrices:
            continue
        key = part.unit.key
        tensors[f"decay/{key}"] = torch.tensor([part.decay, part.folded], dtype=torch.float64)
        if part.folded:
            tensors[f"base/{key}"] = engine.base_of(part)
        for _, matrix, _ in part.matrices:
            older = part.older.get(matrix.number, [])
            tensors[f"turn/{matrix.name}"] = torch.tensor([matrix.turn, len(older)])
            tensors |= _pair(matrix.name, matrix.left, matrix.right)
            for number, old in enumerate(older):
                name = f"{number}/{matrix.name}"
                tensors |= {
                    **_pair(name, old.left, old.right),
                    f"older/{name}": old.change.cpu().clone(),
                }
                tensors[f"gain/{name}"] = torch.tensor([old.gain], dtype=torch.float64)
    return tensors


def load_arrays(engine: LspEngine, saved: Arrays) -> None:
    """Take back what `state_arrays` gave, bfloat16 as uint16.

    Raises:
        CheckpointError: naming the first array that is missing or of another size or type.
    """
    for part in engine.parts:
        if saved.get(f"change/{part.unit.key}") is not None:
            raise CheckpointError(
                "the checkpoint is of an older version of lsp, whose changes were on the accelerator",
                expected="masters of the changes on the host",
                received=f"change/{part.unit.key}",
                hint="begin a new run from the checkpoint's folder model/",
            )
    engine.load(saved)
    for part in engine.parts:
        if not part.matrices:
            continue
        key = part.unit.key
        decay, folded = _array(saved, f"decay/{key}", torch.zeros(2, dtype=torch.float64)).tolist()
        part.older.clear()
        part.decay = 1.0
        part.decay_by(decay)
        if folded:
            engine.put_base(part, _array(saved, f"base/{key}", engine.base_of(part)))
        elif part.folded:
            raise CheckpointError(
                f"the weights of {part.unit.name} have changes that the checkpoint lacks",
                expected="a session that has not trained yet", hint="open the model again, then load the checkpoint",
            )  # fmt: skip
        for _, matrix, _ in part.matrices:
            turns = _array(saved, f"turn/{matrix.name}", torch.zeros(2, dtype=torch.int64)).tolist()
            matrix.turn = turns[0]
            matrix.put(*_projectors(saved, matrix.name, matrix))
            for number in range(turns[1]):
                name = f"{number}/{matrix.name}"
                change = _array(saved, f"older/{name}", torch.zeros(matrix.sizes)).to(matrix.device)
                gain = float(_array(saved, f"gain/{name}", torch.zeros(1, dtype=torch.float64)))
                part.older.setdefault(matrix.number, []).append(
                    PastChange(*_projectors(saved, name, matrix), gain, change)
                )


def _pair(name: str, left: Projector, right: Projector) -> dict[str, Tensor]:
    tensors = {}
    for side, projector in zip(SIDES, (left, right), strict=True):
        if projector.positions is not None:
            tensors[f"{side}_positions/{name}"] = projector.positions.to("cpu", torch.int32)
        if projector.values is not None:
            tensors[f"{side}_values/{name}"] = projector.values.cpu().clone()
        if projector.shares is not None:
            tensors[f"{side}_shares/{name}"] = projector.shares.cpu().clone()
    return tensors


def _projectors(saved: Arrays, name: str, matrix: Matrix) -> tuple[Projector, Projector]:
    projectors = []
    for side, like in zip(SIDES, (matrix.left, matrix.right), strict=True):
        if like.values is None:
            projectors.append(like)
            continue
        where = like.device
        positions = None
        if like.positions is not None:
            stored = like.positions.to("cpu", torch.int32)
            positions = _array(saved, f"{side}_positions/{name}", stored).to(where, torch.int64)
        values = _array(saved, f"{side}_values/{name}", like.values)
        shares = like.shares
        if shares is not None:
            shares = _array(saved, f"{side}_shares/{name}", shares).to(where)
        values = values.to(where)
        projectors.append(Projector(like.rows, like.size, where, positions, values, shares))
    return projectors[0], projectors[1]


def _array(saved: Arrays, name: str, like: Tensor) -> Tensor:
    """An array of the shape and type of `like`."""
    stored = torch.uint16
    if like.dtype != torch.bfloat16:
        stored = like.dtype
    dtype = torch.empty(0, dtype=stored).numpy().dtype
    hint = "resume with the settings that wrote it"
    value = checked_array(saved, name, tuple(like.shape), dtype, hint)
    return torch.from_numpy(np.array(value[0 : len(like)]))


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> LspSession:
    """See `MethodSpec.open_session`; the model is on the host. Projectors are drawn from `seed`.

    Under `torchrun` with several processes, rank 0 has a `Leader`, and the others a `Follower`.
    """
    ranks, where = join(device or "cpu", config.timeout_s)
    kind = Follower if ranks.rank else Leader
    if ranks.single:
        kind = LspSession
    return kind(loaded, ranks.settings(config), where, seed, ranks)
