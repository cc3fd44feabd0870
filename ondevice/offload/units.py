"""A model cut into the units that slide, each one flat run of parameters (SlideFormer section 3.1: one layer each)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from ondevice.core.errors import ModelError

if TYPE_CHECKING:
    from ondevice.models import Family

ALIGN = 128
"""Elements; every parameter begins at a multiple of it, so that matrix products read aligned memory."""
Kind = Literal["layer", "rest", "embedding", "head"]


@dataclass(frozen=True)
class Piece:
    """One parameter: elements `offset` to `offset + numel` of its unit; of a share, those from `start` on."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    offset: int
    numel: int
    start: int = 0

    @property
    def values(self) -> Tensor:
        """Its elements of the parameter, flat."""
        return self.parameter.detach().reshape(-1)[self.start : self.start + self.numel]


@dataclass(frozen=True)
class Unit:
    """Parameters that move and are updated together.

    Attributes:
        name: `layer 3`, `embedding`, `head` or `rest` (what belongs to no layer: the final norm).
        order: when a forward pass needs it; the update thread takes the lowest first.
        numel: elements, with padding between parameters; `parameters` without.
        low, of: of a rank's share (`ondevice.offload.shares`): its first element, and the elements of the whole unit.
    """

    index: int
    name: str
    kind: Kind
    order: int
    pieces: tuple[Piece, ...]
    numel: int
    low: int = 0
    of: int = 0

    @property
    def total(self) -> int:
        """Elements of the whole unit."""
        return self.of or self.numel

    @property
    def here(self) -> int:
        """Elements without what fills up a share that reaches beyond its unit's end."""
        return min(self.numel, max(0, self.total - self.low))

    @property
    def key(self) -> str:
        """The name in a checkpoint."""
        return self.name.replace(" ", ".")

    @property
    def parameters(self) -> int:
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True)
class Units:
    """All units of a model. `head` is the embedding itself where the two are tied."""

    layers: tuple[Unit, ...]
    rest: Unit
    embedding: Unit
    head: Unit

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    @property
    def all(self) -> tuple[Unit, ...]:
        """By `index`."""
        return (*self.layers, self.rest, self.embedding, *(() if self.tied else (self.head,)))

    @property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.all)


def cut(family: Family) -> Units:
    """Cut a model into units; every parameter is in exactly one.

    Raises:
        ModelError: a parameter is shared between layers.
    """
    names = {id(parameter): name for name, parameter in family.model.named_parameters()}
    seen: set[int] = set()
    count = family.dims.layers

    def unit(index: int, name: str, kind: Kind, order: int, parameters: list[nn.Parameter]) -> Unit:
        pieces, offset = [], 0
        for parameter in parameters:
            # In two units it would be moved and updated twice a step.
            if id(parameter) in seen:
                raise ModelError(
                    f"parameter {names[id(parameter)]} is used by two layers", hint="untie it first"
                )
            seen.add(id(parameter))
            shape = tuple(parameter.shape)
            pieces.append(Piece(names[id(parameter)], parameter, shape, offset, parameter.numel()))
            offset += -(-parameter.numel() // ALIGN) * ALIGN
        numel = pieces[-1].offset + pieces[-1].numel if pieces else 0
        return Unit(index, name, kind, order, tuple(pieces), numel)

    layers = tuple(
        unit(i, f"layer {i}", "layer", i, list(family.layer(i).parameters())) for i in range(count)
    )
    table, head = family.embedding.weight, family.head_weight
    if not isinstance(table, nn.Parameter):
        raise ModelError(
            "the embedding is no parameter", expected="nn.Parameter", received=type(table).__name__
        )
    tied = head is table or head.data_ptr() == table.data_ptr()
    tables = {id(table), id(head)}
    rest = [p for p in family.model.parameters() if id(p) not in seen and id(p) not in tables]
    small = unit(count, "rest", "rest", -1, rest)
    embedding = unit(count + 1, "embedding", "embedding", -2, [table])
    if tied:
        return Units(layers, small, embedding, embedding)
    if not isinstance(head, nn.Parameter):
        raise ModelError(
            "the output head is no parameter", expected="nn.Parameter", received=type(head).__name__
        )
    return Units(layers, small, embedding, unit(count + 2, "head", "head", count, [head]))
