"""A model cut into units (SlideFormer section 3.1: one layer each), and each rank's shard of them.

A shard is ZeRO's partition (Rajbhandari et al. 2020, section 5). All shards of a unit are equally
long, so that one all-gather or reduce-scatter moves them; zeros pad the last ones. A shard begins
at a multiple of 128 elements, so that moments in 8 bits have the same scales whatever the number of
ranks, and a table's at a row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ondevice.core.errors import CheckpointError, ModelError
from ondevice.offload.config import check_rows
from ondevice.runtime_ops.layer_adam import TILE

ALIGN = 128
"""Elements; every parameter begins at a multiple of it, so that matrix products read aligned
memory."""
Bounds = tuple[int, ...]
"""Indices at which each rank's part begins, and the end of the last one."""
Kind = Literal["layer", "rest", "embedding", "head"]


@dataclass(frozen=True)
class Piece:
    """One parameter: elements `offset` to `offset + numel` of its unit; of a shard, those from
    `start` on of the parameter of shape `whole`. Weight decay shrinks it if it `decays`; it stays
    as it is unless it is `trained`; Muon updates it if it is one of its matrices, else AdamW."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    offset: int
    numel: int
    start: int = 0
    decays: bool = True
    trained: bool = True
    muon: bool = False
    whole: tuple[int, ...] = ()

    @property
    def stacked(self) -> bool:
        """True for matrices of experts, [experts, rows, columns]; a convolution of channels has one
        row for each."""
        return len(self.shape) == 3 and self.shape[1] > 1

    @property
    def experts(self) -> list[Piece]:
        """The matrix of each expert, as a piece of its own."""
        size = self.numel // self.shape[0]
        return [
            replace(
                self, name=f"{self.name}.{e}", shape=self.shape[1:], numel=size,
                offset=self.offset + e * size, start=self.start + e * size,
            )
            for e in range(self.shape[0])
        ]  # fmt: skip

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
        low, of: of a rank's shard (`ondevice.offload.units`): its first element, and the elements
            of the whole unit; `matrices_of` of which Muon updates.
    """

    index: int
    name: str
    kind: Kind
    order: int
    pieces: tuple[Piece, ...]
    numel: int
    low: int = 0
    of: int = 0
    matrices_of: int = 0

    @property
    def total(self) -> int:
        """Elements of the whole unit."""
        return self.of or self.numel

    @property
    def here(self) -> int:
        """Elements without what fills up a shard that reaches beyond its unit's end."""
        return min(self.numel, max(0, self.total - self.low))

    @property
    def matrices(self) -> int:
        """Elements, from the first on, that Muon updates, with padding."""
        ends = [piece.offset + piece.numel for piece in self.pieces if piece.muon]
        return -(-max(ends, default=0) // ALIGN) * ALIGN

    @property
    def key(self) -> str:
        """The name in a checkpoint."""
        return self.name.replace(" ", ".")

    @property
    def parameters(self) -> int:
        return sum(piece.numel for piece in self.pieces)


@dataclass(frozen=True)
class Units:
    """All units of a model. `head` is the embedding itself if the two are tied."""

    layers: tuple[Unit, ...]
    rest: Unit
    embedding: Unit
    head: Unit

    @property
    def tied(self) -> bool:
        return self.head is self.embedding

    @property
    def all(self) -> tuple[Unit, ...]:
        """By `index`; a table without rows is left out."""
        tables = (self.embedding, *(() if self.tied else (self.head,)))
        return (*self.layers, self.rest, *(table for table in tables if table.numel))

    @property
    def parameters(self) -> int:
        return sum(unit.parameters for unit in self.all)


def cut(
    family: Any,
    decayed: Literal["all", "matrices"] = "all",
    suits: Callable[[tuple[int, ...]], bool] | None = None,
) -> Units:
    """Cut a model into units; every parameter is in exactly one.

    Args:
        family: the model; names in its `frozen` are not trained, those in `undecayed` do not decay.
        decayed: what weight decay shrinks.
        suits: says by its shape whether Muon updates a layer's parameter; these come first.

    Raises:
        ModelError: a parameter is shared between layers.
    """
    names = {id(parameter): name for name, parameter in family.model.named_parameters()}
    seen: set[int] = set()
    count = family.dims.layers
    frozen = getattr(family, "frozen", frozenset())
    undecayed = getattr(family, "undecayed", frozenset())

    def unit(index: int, name: str, kind: Kind, order: int, parameters: list[nn.Parameter]) -> Unit:
        pieces = []
        offset = 0
        hidden = [
            kind == "layer" and suits is not None and suits(tuple(p.shape)) for p in parameters
        ]
        for is_hidden, parameter in sorted(
            zip(hidden, parameters, strict=True), key=lambda pair: not pair[0]
        ):
            # In two units it would be moved and updated twice a step.
            if id(parameter) in seen:
                raise ModelError(
                    f"parameter {names[id(parameter)]} is used by two layers", hint="untie it first"
                )
            seen.add(id(parameter))
            shape = tuple(parameter.shape)
            name_of = names[id(parameter)]
            decays = name_of not in undecayed and (decayed == "all" or parameter.ndim > 1)
            values = (name_of, parameter, shape, offset, parameter.numel())
            trained = name_of not in frozen
            pieces.append(Piece(*values, decays=decays, trained=trained, muon=is_hidden))
            offset += -(-parameter.numel() // ALIGN) * ALIGN
        numel = 0
        if pieces:
            numel = pieces[-1].offset + pieces[-1].numel
            if pieces[-1].muon:
                numel = offset  # what fills it up belongs to the matrices
        return Unit(index, name, kind, order, tuple(pieces), numel)

    layers = tuple(
        unit(i, f"layer {i}", "layer", i, list(family.layer(i).parameters())) for i in range(count)
    )
    table = family.embedding.weight
    head = family.head_weight
    if not isinstance(table, nn.Parameter):
        raise ModelError(
            "the embedding is not a parameter",
            expected="nn.Parameter",
            received=type(table).__name__,
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
            "the output head is not a parameter",
            expected="nn.Parameter",
            received=type(head).__name__,
        )
    return Units(layers, small, embedding, unit(count + 2, "head", "head", count, [head]))


TABLES = ("embedding", "head")


def shard_numel(unit: Unit, world: int) -> int:
    """Return the elements of each rank's shard."""
    if world == 1:
        return unit.numel
    step = ALIGN
    if unit.kind in TABLES:
        width = unit.pieces[0].shape[1]
        step = ALIGN * width // gcd(ALIGN, width)
    return -(-unit.numel // (world * step)) * step


def shard(unit: Unit, rank: int, world: int) -> Unit:
    """Return the shard of one rank as a unit of its own; of a table, a table of fewer rows, maybe
    0."""
    if world == 1:
        return unit
    size = shard_numel(unit, world)
    low = rank * size
    pieces = []
    for piece in unit.pieces:
        first = min(max(piece.offset, low), piece.offset + piece.numel)
        count = max(0, min(piece.offset + piece.numel, low + size) - first)
        if unit.kind in TABLES:
            width = piece.shape[1]
            shape: tuple[int, ...] = (count // width, width)
        elif count:
            shape = (count,)
        else:
            continue
        offset = (first - low) * (count > 0)
        cut_at = {"offset": offset, "numel": count, "start": first - piece.offset}
        pieces.append(replace(piece, shape=shape, whole=piece.shape, **cut_at))
    of = {"of": unit.numel, "matrices_of": unit.matrices}
    return replace(unit, pieces=tuple(pieces), numel=size, low=low, **of)


def shard_bounds(unit: Unit, world: int, span: slice | None = None) -> Bounds:
    """Return the begin of each rank's shard and the end of the last: `world + 1` elements.

    Args:
        span: only these elements of the unit are meant, and counted from the first of them; None:
            all, and what fills up the last shards.
    """
    size = shard_numel(unit, world)
    if span is None:
        return tuple(rank * size for rank in range(world + 1))
    inside = (min(max(rank * size, span.start), span.stop) - span.start for rank in range(world))
    return (*inside, span.stop - span.start)


def row_bounds(unit: Unit, world: int, rows: Tensor) -> Bounds:
    """Return the same for ascending rows of a table, int64 [R]: as indices into `rows`."""
    if world == 1:
        return (0, len(rows))
    firsts = torch.arange(world) * (shard_numel(unit, world) // unit.pieces[0].shape[1])
    return (*torch.searchsorted(rows, firsts).tolist(), len(rows))


class Arrays(Protocol):
    """Arrays by name, of a checkpoint on this rank or on rank 0."""

    def get(self, name: str, /) -> Any:
        """Return an object with `shape`, `dtype` and slices like an array; None for an unknown
        name."""
        ...


class Ranks:
    """One process, and its rank among those that train together; if it is the only one, every call
    is the identity. `ondevice.offload.ranks` has several.

    Attributes:
        calls, files: messages between several (`ondevice.offload.messages`).
        sharing: ranks that may use the same cores as this one.
        lost: the reason why the ranks no longer meet; None while they do.
    """

    calls: Any
    files: Any
    sharing = 1

    @property
    def lost(self) -> Exception | None:
        return None

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank = rank
        self.world = world
        self.single = world == 1

    def settings(self, config: Any) -> Any:
        """Return rank 0's settings: a choice that each rank made by itself might be another on
        each."""
        return config

    def shard(self, unit: Unit) -> Unit:
        """Return what this rank keeps and updates of `unit`."""
        return shard(unit, self.rank, self.world)

    def padded(self, unit: Unit) -> int:
        """Return the elements of all shards of a unit together."""
        return shard_numel(unit, self.world) * self.world

    def bounds(self, unit: Unit, span: slice | None = None) -> Bounds:
        """See `shard_bounds`."""
        return shard_bounds(unit, self.world, span)

    def row_bounds(self, unit: Unit, rows: Tensor) -> Bounds:
        """See `row_bounds`."""
        return row_bounds(unit, self.world, rows)

    def own(self, bounds: Bounds) -> slice:
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def rows(self, count: int) -> slice:
        """Return this rank's rows of a batch.

        Raises:
            ConfigError: the ranks cannot have equally many.
        """
        if not self.single:
            check_rows(count, self.world)
        return slice(self.rank, None, self.world)

    def gather(self, memory: Tensor, bounds: Bounds) -> None:
        """Fill every rank's part of `memory` (first dimension) from it, on the current stream."""

    def reduce(self, memory: Tensor, bounds: Bounds) -> None:
        """Sum every rank's part of `memory` on that rank; the rest becomes undefined. On the
        stream."""

    def all_reduce(self, memory: Tensor) -> None:
        """Sum `memory` into that of every rank, on the current stream (transfer thread)."""

    def first(self, memory: Tensor) -> None:
        """Fill `memory` with rank 0's, on the current stream (transfer thread)."""

    def sum(self, value: float) -> float:
        """Return the sum of all ranks' values, the same bits everywhere; waits (one thread at a
        time)."""
        return value

    def collect(self, values: Tensor) -> Tensor:
        """Return [world, n] of every rank's values [n], on the host; waits (main thread)."""
        return values[None]

    def agree(self, problem: Exception | None) -> None:
        """Raise the first rank's problem on every rank."""
        if problem is not None:
            raise problem

    def lent(self, arrays: Arrays) -> AbstractContextManager[Arrays]:
        """Return a context with rank 0's arrays; see `Messages.lent`."""
        return nullcontext(arrays)

    def abort(self) -> None:
        """Abort what the ranks do together; whatever waits for it continues."""


SINGLE = Ranks()
"""No other process."""


def extent(part: str, unit: Unit) -> tuple[int, int, int]:
    """Return of an array of a unit's state the first element that a shard has, how many it has, and
    how many there are; scales of moments are one for 128 elements."""
    matrices = unit.matrices_of if unit.of else unit.matrices
    first, last, begin, end = unit.low, unit.low + unit.here, 0, unit.total
    if part == "momentum":
        end = matrices
    elif part in ("m", "v", "m_scale", "v_scale"):
        begin = matrices
    each = TILE if part.endswith("_scale") else 1
    low, high = (min(max(at, begin), end) - begin for at in (first, last))
    return -(-low // each), -(-high // each) - -(-low // each), -(-(end - begin) // each)


def array_name(part: str, unit: Unit) -> str:
    """Return the name of an array in a checkpoint: `high/layer.3`, and of a shard
    `high/layer.3@first:last:all`."""
    if not unit.of:
        return f"{part}/{unit.key}"
    first, count, size = extent(part, unit)
    return f"{part}/{unit.key}@{first}:{first + count}:{size}"


def unit_key(name: str) -> str:
    """Return `Unit.key` of an array's name."""
    return name.partition("/")[2].partition("@")[0]


def checked_array(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: Any, hint: str) -> Any:
    """Return an array of a checkpoint.

    Raises:
        CheckpointError: it is missing or of another size or type.
    """
    value = arrays.get(name)
    if value is None or tuple(value.shape) != shape or value.dtype != dtype:
        raise CheckpointError(
            f"the checkpoint does not fit: {name}",
            expected=f"{dtype} {list(shape)}",
            received=None if value is None else f"{value.dtype} {list(value.shape)}",
            hint=hint,
        )
    return value


class Joined:
    """Arrays by name out of those of a checkpoint, which may be in shards of any number of
    ranks."""

    def __init__(self, arrays: Any) -> None:
        self.whole: dict[str, Any] = {}
        for name, value in arrays.items():
            base, _, span = name.partition("@")
            if span:
                first, last, size = (int(word) for word in span.split(":"))
                self.whole.setdefault(base, Pieces(base, size)).add(first, last, value)
            else:
                self.whole[name] = value

    def get(self, name: str, /) -> Any:
        """Return an array, or an object that is sliced like one; None for an unknown name."""
        return self.whole.get(name)


class Pieces:
    """One array in pieces; only requested elements are joined."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.shape = (size,)
        self.pieces = dict[int, tuple[int, np.ndarray]]()

    @property
    def dtype(self) -> Any:
        return next(iter(self.pieces.values()))[1].dtype

    def add(self, first: int, last: int, value: np.ndarray) -> None:
        """Add elements `first` to `last`, exclusive."""
        self.pieces[first] = last, value

    def __getitem__(self, span: slice) -> np.ndarray:
        found = []
        at = span.start
        for first, (last, value) in sorted(self.pieces.items()):
            if first <= at < min(last, span.stop):
                found.append(value[at - first : span.stop - first])
                at = min(last, span.stop)
        if at < span.stop:
            raise CheckpointError(
                f"the checkpoint lacks a part of {self.name}",
                expected=f"element {at}",
                hint="take an older checkpoint",
            )
        if len(found) == 1:
            return found[0]
        return np.concatenate([np.zeros(0, self.dtype), *found])
