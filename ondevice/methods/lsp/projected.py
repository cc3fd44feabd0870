"""Trained parameters of one unit: the changes of its projected matrices, and all others directly.

Both are in one flat run, the changes first: the unit's wire. To the engine it is a unit like any
other, so its masters and moments, shards and checkpoints are the engine's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ondevice.methods.lsp.matrix import Group, Matrix, Plane, add_change
from ondevice.methods.lsp.projector import Projector
from ondevice.offload.units import ALIGN, Piece, Unit, Units

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
        wire: what crosses the bus and what the host keeps: the change D of every matrix, named like
            its weight, and the other parameters; the unit itself without matrices.
        matrices: each with its piece of the unit and its piece of the wire; of a mixture each
            expert has its own.
        held: the unit's pieces that are made of matrices: parameters.
        exact: the wire's other pieces, which are parameters.
        decay: factor of the base, of weight decay; set by `decay_by`.
        factor: the same on the accelerator, float32 [1], which a graph reads again; None without
            weight decay.
        older: by matrix number.
        folded: whether the base is no longer what was loaded.
    """

    unit: Unit
    wire: Unit
    matrices: list[tuple[Piece, Matrix, Piece]]
    exact: tuple[Piece, ...]
    held: tuple[Piece, ...] = ()
    decay: float = 1.0
    older: dict[int, list[PastChange]] = field(default_factory=dict)
    folded: bool = False
    factor: Tensor | None = None

    def decay_by(self, by: float) -> None:
        """Shrink base and older changes once more; computations that follow see it."""
        self.decay *= by
        for older in self.older.values():
            for old in older:
                old.change.mul_(by)
        if self.factor is not None:
            self.factor.fill_(self.decay)

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


def numbered(name: str, numbers: dict[str, int], expert: int | None = None) -> int:
    """Return a matrix's number in the model, which its random numbers follow from."""
    if expert is None:
        return numbers[name]
    return numbers[name] + (expert + 1) * len(numbers)


def split(
    unit: Unit, index: int, config: ProjectorConfig | None, seed: int, numbers: dict[str, int],
    device: Device, where: torch.device, plane: Plane, linear: set[int], decays: bool = False,
) -> ProjectedUnit:  # fmt: skip
    """Decide what of a unit is projected: matrices with a side longer than the subspace, of layers
    and tables.

    Args:
        index: of the wire.
        config: None projects nothing.
        numbers: of the model's parameters by name.
        linear: ids of the layers' weights whose modules can be attached. Any other matrix of a
            layer, such as a mixture's router, is trained as it is, but for those of experts.
        decays: there is weight decay.
    """
    matrices = []
    pieces: list[Piece] = []
    group = Group(plane, where)

    def add(piece: Piece) -> Piece:
        offset = 0
        if pieces:
            offset = -(-(pieces[-1].offset + pieces[-1].numel) // ALIGN) * ALIGN
        pieces.append(replace(piece, offset=offset))
        return pieces[-1]

    rest = []
    held = []
    for piece in unit.pieces:
        stacked = unit.kind == "layer" and piece.stacked
        attaches = unit.kind != "layer" or stacked or id(piece.parameter) in linear
        projects = config is not None and unit.kind != "rest" and attaches
        if config is not None and not config.project_tables:
            projects = projects and unit.kind == "layer"
        shape = piece.shape[1:] if stacked else piece.shape
        if config is None or not projects or not is_projected(shape, config.subspace):
            rest.append(piece)
            continue
        held.append(piece)
        for e, part in enumerate(piece.experts if stacked else [piece]):
            number = numbered(piece.name, numbers, e if stacked else None)
            matrix = Matrix(part.name, (shape[0], shape[1]), number, config, seed, group)
            change = nn.Parameter(torch.zeros(()).expand(matrix.sizes), requires_grad=False)
            own = replace(part, parameter=change, shape=matrix.sizes, numel=matrix.numel, start=0)
            matrices.append((part, matrix, add(own)))
    if not matrices:
        return ProjectedUnit(unit, replace(unit, index=index), [], unit.pieces)
    exact = tuple(add(piece) for piece in rest)
    numel = pieces[-1].offset + pieces[-1].numel
    wire = replace(unit, index=index, kind="layer", pieces=tuple(pieces), numel=numel)
    factor = None
    if decays:
        factor = device.empty(1, torch.float32).fill_(1.0)
    return ProjectedUnit(unit, wire, matrices, exact, tuple(held), factor=factor)


def wires(units: Units, parts: list[ProjectedUnit]) -> Units:
    """Return the wires of all units. A projected table is one more layer, after those of the
    model, and in its place is a table without rows."""
    layers = tuple(part.wire for part in parts if part.wire.kind == "layer")
    rest = parts[units.rest.index].wire

    def table(unit: Unit) -> Unit:
        part = parts[unit.index]
        if not part.matrices:
            return part.wire
        none = replace(unit.pieces[0], shape=(0, unit.pieces[0].shape[1]), offset=0, numel=0)
        return replace(unit, name=f"no {unit.name}", index=-1, pieces=(none,), numel=0)

    embedding = table(units.embedding)
    return Units(layers, rest, embedding, embedding if units.tied else table(units.head))
