"""Trained parameters of one unit: the changes of its projected matrices, and all others directly.

Both are in one flat run, the changes first, so that each unit sends one gradient and gets one
update. Each of several ranks updates its shards of the two (`ondevice.offload.units`), padded to
equal lengths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.methods.lsp.matrix import Group, Matrix, Plane, add_change
from ondevice.methods.lsp.projector import Projector
from ondevice.offload.units import ALIGN, SINGLE, Piece, Ranks, Unit
from ondevice.runtime_ops.layer_adam import Moments

if TYPE_CHECKING:
    from ondevice.methods.lsp.config import ProjectorConfig
    from ondevice.offload.device import Device


@dataclass
class PastChange:
    """A change in a former subspace, retained if the base cannot take it."""

    left: Projector
    right: Projector
    gain: float
    change: Tensor


@dataclass
class ProjectedUnit:
    """A unit whose large matrices change in a subspace and whose other parameters change as they
    are.

    Attributes:
        matrices: each with its piece and the offset of its s x s numbers.
        exact: the unit of the other parameters, one after the other; the entire unit without
            projections.
        narrow: numbers of all matrices together.
        change: float32 [narrow] on the accelerator, D of every matrix.
        decay: factor of the base, of weight decay; set by `decay_by`.
        factor: the same on the accelerator, float32 [1], which a graph reads again; None without
            weight decay.
        older: by matrix number.
        folded: whether the base is no longer what was loaded.
        subspace: the changes as a unit; `own` is this rank's shard of it, and `own_exact` of
            `exact`.
        start: offset of `exact` in the run, and `numel` its end: all ranks' shards together.
        moments: AdamW's of this rank's shard of the changes, on the host.
    """

    unit: Unit
    matrices: list[tuple[Piece, Matrix, int]]
    exact: Unit
    narrow: int
    change: Tensor
    ranks: Ranks = SINGLE
    decay: float = 1.0
    older: dict[int, list[PastChange]] = field(default_factory=dict)
    folded: bool = False
    factor: Tensor | None = None

    def __post_init__(self) -> None:
        ranks = self.ranks
        exact = self.exact
        self.subspace = replace(self.unit, kind="layer", pieces=(), numel=self.narrow)
        self.own = ranks.shard(self.subspace)
        self.own_exact = exact
        if exact.numel:
            self.own_exact = ranks.shard(exact)
        self.start = ranks.padded(self.subspace)
        self.numel = self.start + (ranks.padded(exact) if exact.numel else 0)
        self.moments = Moments.empty(self.own.numel)

    @property
    def here(self) -> int:
        """Numbers that leave for this rank in a step, and come back."""
        return self.own.numel + self.own_exact.numel

    def decay_by(self, by: float) -> None:
        """Shrink the base once more; computations that follow see it."""
        self.decay *= by
        if self.factor is not None:
            self.factor.fill_(self.decay)

    def changes(self, matrix: Matrix, offset: int, change: Tensor | None = None) -> Tensor:
        """Return D of a matrix, [s, s], out of all of them or of a copy of these in another
        dtype."""
        return (self.change if change is None else change)[offset : offset + matrix.numel].view(
            matrix.sizes
        )

    def effective(self, matrix: Matrix, change: Tensor, base: Tensor, out: Tensor) -> Tensor:
        """Return the weight itself: base [m, n] and its change [s, s], into `out` [m, n], all of
        one dtype."""
        matrix.effective(base, change, self.decay if self.factor is None else self.factor, out)
        for old in self.older.get(matrix.number, ()):
            widen(old, out)
        return out


def widen(old: PastChange, out: Tensor, factor: float = 1.0) -> None:
    """Add an older change to a weight [m, n]."""
    pair = [None if side.exact else side.dense(out.dtype) for side in (old.left, old.right)]
    add_change(out, old.change.to(out.dtype), (pair[0], pair[1]), old.gain * factor, 1.0, out)


def is_projected(shape: tuple[int, ...], subspace: int) -> bool:
    """Return True for a shape that is updated in a subspace: a matrix with a side longer than it.
    Norms, biases and small matrices are updated as they are."""
    return len(shape) == 2 and max(shape) > subspace


def split(
    unit: Unit, config: ProjectorConfig | None, seed: int, numbers: dict[str, int], device: Device, where: torch.device,
    plane: Plane, decays: bool = False, ranks: Ranks = SINGLE,
) -> ProjectedUnit:  # fmt: skip
    """Decide what of a unit is projected: matrices with a side longer than the subspace, of layers
    and tables.

    Args:
        config: None projects nothing.
        numbers: of the model's parameters by name.
        decays: there is weight decay.
    """
    matrices = []
    rest = []
    narrow = 0
    group = Group(plane, where)
    for piece in unit.pieces:
        if config is None or unit.kind == "rest" or not is_projected(piece.shape, config.subspace):
            rest.append(piece)
            continue
        shape = (piece.shape[0], piece.shape[1])
        number = numbers[piece.name]
        matrix = Matrix(piece.name, shape, number, config, seed, group)
        matrices.append((piece, matrix, narrow))
        narrow += matrix.numel
    exact = unit
    if matrices:
        exact = _packed(unit, rest)
    factor = None
    if decays and matrices:
        factor = device.empty(1, torch.float32).fill_(1.0)
    change = device.empty(narrow, torch.float32)
    return ProjectedUnit(unit, matrices, exact, narrow, change, ranks, factor=factor)


def _packed(unit: Unit, pieces: list[Piece]) -> Unit:
    """A unit of some of a unit's parameters."""
    packed = []
    offset = 0
    for piece in pieces:
        packed.append(replace(piece, offset=offset))
        offset += -(-piece.numel // ALIGN) * ALIGN
    return replace(
        unit, pieces=tuple(packed), numel=packed[-1].offset + packed[-1].numel if packed else 0
    )
