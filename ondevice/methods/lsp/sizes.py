"""Costs of a subspace, from dimensions only: numbers over the bus, and additional
multiplications."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ondevice.core.dims import MoeDims
from ondevice.offload.config import CODED_BYTES

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.lsp.config import LspConfig

Kind = Literal["layer", "head", "embedding"]
KINDS: tuple[Kind, ...] = ("layer", "head", "embedding")


@dataclass(frozen=True)
class Projected:
    """Weights of one shape that are updated in a subspace.

    Attributes:
        rows, columns: of the weight, m and n.
        left, right: of the subspace; a side that is no longer than it stays as it is.
        count: how many of them a model has; `each` of them a layer, which are its experts' if they
            are several.
    """

    kind: Kind
    rows: int
    columns: int
    left: int
    right: int
    count: int = 1
    each: int = 1

    @property
    def numel(self) -> int:
        """Numbers that cross the bus in each direction."""
        return self.left * self.right

    @property
    def sides(self) -> int:
        """Rows of its projectors together."""
        return self.rows * (self.left < self.rows) + self.columns * (self.right < self.columns)

    @property
    def dense(self) -> int:
        """Elements of its projectors with all their zeros."""
        return self.rows * self.left * (self.left < self.rows) + self.columns * self.right * (
            self.right < self.columns
        )

    def making(self, rows: int | None = None) -> int:
        """Return multiplications of P D Q^T, or of some of its rows."""
        count = self.rows if rows is None else rows
        return (
            count
            * self.right
            * (self.left * (self.left < self.rows) + self.columns * (self.right < self.columns))
        )

    def collecting(self, tokens: int) -> int:
        """Return multiplications of (dY P)^T (X Q) for T tokens."""
        return tokens * (self.dense + self.numel)

    def narrowing(self) -> int:
        """Return multiplications of P^T G Q for a gradient G."""
        return self.rows * self.right * (self.columns * (self.right < self.columns) + self.left)


def projected(dims: ModelDims, config: LspConfig) -> list[Projected]:
    """Return every matrix of layers and tables with a side longer than the subspace; none with
    `project: false`."""
    if not config.project:
        return []
    layers = Counter(linear.target for linear in dims.linear_list)
    shapes: list[tuple[Kind, int, int, int, int]] = [
        ("layer", *shape, layers[target], 1) for target, shape in dims.linear_shapes.items()
    ]
    for inputs, outputs, count in _of_all_tokens(dims):
        shapes.append(("layer", inputs, outputs, count, 1))
    stacks = Counter((one.inputs, one.outputs, one.experts) for one in dims.expert_list)
    for (inputs, outputs, experts), count in stacks.items():
        shapes.append(("layer", inputs, outputs, count * experts, experts))
    if config.project_tables:
        shapes.append(("head", dims.vocab, dims.hidden, 1, 1))
    if config.project_tables and not dims.tied:
        shapes.append(("embedding", dims.vocab, dims.hidden, 1, 1))
    s = config.subspace
    return [
        Projected(kind, rows, columns, min(rows, s), min(columns, s), count, each)
        for kind, rows, columns, count, each in shapes
        if max(rows, columns) > s
    ]


def _of_all_tokens(dims: ModelDims) -> list[tuple[int, int, int]]:
    """Return inputs, outputs and number of a mixture's linear layers that carry no adapters: of the
    expert of all tokens, with its gate, and of blocks without experts."""
    if not isinstance(dims, MoeDims):
        return []
    dense = len(dims.dense_layers)
    found = []
    for width, count in (
        (dims.shared_intermediate, dims.layers - dense),
        (dims.dense_intermediate, dense),
    ):
        if width and count:
            found += [(dims.hidden, width, count)] * 2 + [(width, dims.hidden, count)]
    if dims.shared_intermediate:
        found.append((dims.hidden, 1, dims.layers - dense))
    return found


def narrow(dims: ModelDims, config: LspConfig) -> int:
    """Return numbers of all subspaces together: a step sends so many, and the host updates them."""
    return sum(shape.count * shape.numel for shape in projected(dims, config))


def wire(dims: ModelDims, config: LspConfig) -> int:
    """Return numbers of a layer that cross the bus in each direction; the mean if layers differ."""
    outside = dims.vocab * dims.hidden * (2 - dims.tied) + dims.layer_inputs + dims.hidden
    saved = sum(
        shape.count * (shape.rows * shape.columns - shape.numel)
        for shape in projected(dims, config)
        if shape.kind == "layer"
    )
    blocks = min(dims.layers * dims.block_parameters, dims.parameters - outside)
    return (blocks - saved) // dims.layers


@dataclass(frozen=True)
class Wires:
    """What crosses the bus in each direction.

    Attributes:
        shapes: that are projected; `tables` those of embedding and head.
        layer: numbers of a layer; the mean if layers differ.
        widest: numbers of the largest unit.
        every: numbers of all units together.
    """

    shapes: list[Projected]
    layer: int
    every: int

    @property
    def tables(self) -> list[Projected]:
        return [shape for shape in self.shapes if shape.kind != "layer"]

    @property
    def widest(self) -> int:
        return max([self.layer, *(shape.numel for shape in self.tables)])


def wires(dims: ModelDims, config: LspConfig) -> Wires:
    """Return the sizes of what crosses the bus."""
    every = narrow(dims, config) + exact(dims, config)
    return Wires(projected(dims, config), wire(dims, config), every)


def exact(dims: ModelDims, config: LspConfig) -> int:
    """Return parameters that are trained as they are."""
    return dims.parameters - sum(
        shape.count * shape.rows * shape.columns for shape in projected(dims, config)
    )


def bus_bytes(
    dims: ModelDims, config: LspConfig, batch_size: int, length_tokens: int, item: int
) -> tuple[int, int]:
    """Return bytes of a step to the host and to the accelerator: gradients and updates, and weights
    and saved inputs that are on the host."""
    rows = 0
    if not any(shape.kind != "layer" for shape in projected(dims, config)):
        # The embedding is not projected: only the batch's rows of it are read and have gradients.
        rows = min(batch_size * length_tokens, dims.vocab) - dims.vocab * (not dims.tied)
    moved = (narrow(dims, config) + exact(dims, config) + rows * dims.hidden) * item
    kept = (
        dims.layers
        * batch_size
        * length_tokens
        * dims.hidden
        * item
        * (config.activations == "host")
    )
    fetches = 2 * dims.layers - min(
        config.window, dims.layers
    )  # up and down; the uppermost are there when it turns
    sliding = fetches * dims.block_parameters * item * slides(dims, config)
    return moved - _saved(dims, config, item) + kept, moved + kept + sliding


def _saved(dims: ModelDims, config: LspConfig, item: int) -> int:
    """Return the bytes that gradients in 4 bits save of a step's."""
    if not config.coded:
        return 0
    tables = sum(shape.numel for shape in projected(dims, config) if shape.kind != "layer")
    numbers = dims.layers * wire(dims, config) + tables
    return numbers * item - int(numbers * CODED_BYTES)


def slides(dims: ModelDims, config: LspConfig) -> bool:
    """Return True if the layers' weights are on the host and something is projected."""
    return config.weight_placement == "host" and bool(projected(dims, config))


@dataclass(frozen=True)
class Extra:
    """Multiplications of a step that training without projection does not have, and those of it
    that are not done.

    Attributes:
        making: of the effective weights, in both passes; of the window's layers once.
        collecting: of the gradients in the subspace.
        saved: of the layers' weight gradients, which are not made.
    """

    making: int
    collecting: int
    saved: int

    @property
    def flops(self) -> float:
        """Floating-point operations in addition to training's own; negative if fewer."""
        return 2.0 * (self.making + self.collecting - self.saved)


def extra(dims: ModelDims, config: LspConfig, batch_size: int, length_tokens: int) -> Extra:
    """Count what a step of [batch_size, length_tokens] computes for the projection."""
    tokens = batch_size * length_tokens
    layer_builds = 2 * dims.layers - min(config.window, dims.layers)
    making = collecting = saved = 0
    for shape in projected(dims, config):
        if shape.kind == "layer":
            making += shape.count * layer_builds * shape.making() // dims.layers
            if shape.each > 1:  # autograd makes the gradients of experts
                collecting += shape.count * shape.narrowing()
                continue
            collecting += shape.count * shape.collecting(tokens)
            saved += shape.count * tokens * shape.rows * shape.columns
        elif shape.kind == "head":
            making += shape.making() * min(2, config.loss_tiles) + dims.tied * shape.making(tokens)
            collecting += shape.narrowing()
        else:
            making += shape.making(tokens)
            collecting += (
                tokens * shape.right * (shape.columns * (shape.right < shape.columns) + shape.left)
            )
    return Extra(making, collecting, saved)
