"""Costs of a subspace, from dimensions only: numbers over the bus, and additional
multiplications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

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
        count: how many of them a model has.
    """

    kind: Kind
    rows: int
    columns: int
    left: int
    right: int
    count: int = 1

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
    shapes: list[tuple[Kind, int, int, int]] = [
        ("layer", *shape, dims.layers) for shape in dims.linear_shapes.values()
    ]
    shapes.append(("head", dims.vocab, dims.hidden, 1))
    if not dims.tied:
        shapes.append(("embedding", dims.vocab, dims.hidden, 1))
    s = config.subspace
    return [
        Projected(kind, rows, columns, min(rows, s), min(columns, s), count)
        for kind, rows, columns, count in shapes
        if max(rows, columns) > s
    ]


def narrow(dims: ModelDims, config: LspConfig) -> int:
    """Return numbers of all subspaces together: a step sends so many, and the host updates them."""
    return sum(shape.count * shape.numel for shape in projected(dims, config))


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
    moved = (narrow(dims, config) + exact(dims, config)) * item
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
    return moved + kept, moved + kept + sliding


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
            collecting += shape.count * shape.collecting(tokens)
            saved += shape.count * tokens * shape.rows * shape.columns
        elif shape.kind == "head":
            making += shape.making() + dims.tied * shape.making(tokens)
            collecting += shape.narrowing()
        else:
            making += shape.making(tokens)
            collecting += (
                tokens * shape.right * (shape.columns * (shape.right < shape.columns) + shape.left)
            )
    return Extra(making, collecting, saved)
