"""4-bit levels that keep a layer's outputs on rows of the task, instead of the nearest levels.

Rounding changes a matrix W by D. If H is the sum of x x^T over the inputs, the squared error of the
outputs is tr(D H D^T). Columns are rounded one after the other, and later columns make up for the
error so far (GPTQ, arXiv 2210.17323). Then scales and minima are fitted to the levels, and each
level is chosen once more. The format is `q4`'s own: kernels and hosts see other numbers, nothing else.

Only the forward pass gains. The weights move further than to their nearest levels, which makes the
backward pass, g W, less exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ondevice.nn.quantized import GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

LEVELS = 15
"""Of 4 bits, less one."""
DAMPING = 0.1
"""Of the mean of H's diagonal, added to it; see the module."""
RANGES = tuple(1.0 - 0.05 * step for step in range(8))
"""Shares of a group's range that its grid may span."""
ROWS_AT_ONCE = 16
"""Of the calibration rows, so that few activations exist."""


@dataclass(frozen=True)
class Grid:
    """Scale and minimum of each group, float16 [outputs, inputs / GROUP]."""

    scales: Tensor
    mins: Tensor

    def levels(self, weight: Tensor) -> Tensor:
        """Return the nearest levels, uint8 [outputs, inputs]."""
        groups = weight.float().unflatten(1, (-1, GROUP)) - self.mins.float()[..., None]
        levels = (groups / self.scales.float()[..., None]).round().clamp(0, LEVELS)
        return levels.flatten(1).to(torch.uint8)

    def dense(self, levels: Tensor) -> Tensor:
        """Return the weights of levels, float32 [outputs, inputs]."""
        groups = levels.unflatten(1, (-1, GROUP)).float()
        dense = groups * self.scales.float()[..., None] + self.mins.float()[..., None]
        return dense.flatten(1)


def nearest_grid(weight: Tensor) -> Grid:
    """Span each group from its smallest to its largest weight.

    A weight that is on a grid with float16 scales and minima already (Q4_1) is on this one if its
    group uses the first and the last level.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low = groups.amin(-1)
    scales = ((groups.amax(-1) - low) / LEVELS).half()
    scales[scales == 0] = 1.0  # of equal weights the minimum is all there is
    return Grid(scales, low.half())


def round_model(family: Any, rows: Sequence[Sequence[int]]) -> dict[str, Grid]:
    """Move the matrices of every block to 4-bit grids, block after block, in place.

    A block's inputs come from the blocks before it as they are rounded.

    Args:
        family: of a float32 model on the CPU.
        rows: token ids of each calibration row.

    Returns:
        The grid of each matrix by its parameter's name.
    """
    grids = {}
    parts = [
        _embedded(family, rows[at : at + ROWS_AT_ONCE]) for at in range(0, len(rows), ROWS_AT_ONCE)
    ]
    with torch.no_grad():
        for layer in range(family.dims.layers):
            for targets, hessian in _input_moments(family, layer, parts):
                weights = [family.linear(layer, target).weight for target in targets]
                # Layers of the same inputs are one matrix.
                grid, dense = round_matrix(torch.cat([one.data for one in weights]), hessian)
                start = 0
                for target, weight in zip(targets, weights):
                    end = start + len(weight)
                    weight.data = dense[start:end].clone()
                    name = f"{family.linear_name(layer, target)}.weight"
                    grids[name] = Grid(grid.scales[start:end], grid.mins[start:end])
                    start = end
            parts = [(_block(family, layer, hidden), used) for hidden, used in parts]
    return grids


def round_matrix(weight: Tensor, hessian: Tensor) -> tuple[Grid, Tensor]:
    """Choose scales, minima and levels with the least tr(D H D^T) that is found.

    Args:
        weight: float32 [outputs, inputs].
        hessian: sum of x x^T over inputs, [inputs, inputs]; of any rank.

    Returns:
        the grid, and the weights on it, float32 [outputs, inputs].
    """
    damped = hessian.double()
    mean = float(damped.diagonal().mean())
    # Without any input the matrix is rounded to the nearest.
    damped = damped + torch.eye(len(damped), dtype=torch.float64) * (DAMPING * mean or 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    grid, levels = _compensated(weight.float(), upper)
    damped = damped.float()
    grid = _fitted(weight.float(), levels, grid, damped)
    levels = _improved(weight.float(), levels, grid, damped)
    return grid, grid.dense(levels)


def _compensated(weight: Tensor, upper: Tensor) -> tuple[Grid, Tensor]:
    """Round column after column; `upper` is the Cholesky factor of the inverse of H.

    Returns the grid and float32 levels [outputs, inputs].
    """
    left = weight.clone()
    levels = torch.zeros_like(left)
    scales = []
    mins = []
    for start in range(0, weight.shape[1], GROUP):
        end = start + GROUP
        part = left[:, start:end].clone()
        factor = upper[start:end, start:end]
        errors = torch.zeros_like(part)
        scale, minimum = _spanned(part, factor.diagonal().square().reciprocal())
        scales.append(scale)
        mins.append(minimum)
        for column in range(GROUP):
            value = part[:, column].clone()
            level = ((value - minimum) / scale).round().clamp(0, LEVELS)
            levels[:, start + column] = level
            error = (value - level * scale - minimum) / factor[column, column]
            part[:, column:] -= error[:, None] * factor[column, column:]
            errors[:, column] = error
        left[:, end:] -= errors @ upper[start:end, end:]
    return Grid(torch.stack(scales, 1).half(), torch.stack(mins, 1).half()), levels


def _spanned(weight: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of a group's rows, float32 [outputs] that float16 has exactly.

    Args:
        weight: float32 [outputs, GROUP].
        importance: of each input's squared error, float32 [GROUP].
    """
    low = weight.amin(-1)
    high = weight.amax(-1)
    middle = (low + high) / 2
    least = torch.full_like(low, torch.inf)
    scale = torch.ones_like(low)
    minimum = low.half().float()
    for share in RANGES:
        tried_minimum = (middle + (low - middle) * share).half().float()
        tried = ((high - low) * share / LEVELS).half().float()
        tried = tried.where(tried > 0, 1.0)
        levels = ((weight - tried_minimum[:, None]) / tried[:, None]).round().clamp(0, LEVELS)
        error = weight - levels * tried[:, None] - tried_minimum[:, None]
        total = (error.square() * importance).sum(-1)
        better = total < least
        least = least.where(~better, total)
        scale = scale.where(~better, tried)
        minimum = minimum.where(~better, tried_minimum)
    return scale, minimum


def _fitted(weight: Tensor, levels: Tensor, grid: Grid, hessian: Tensor) -> Grid:
    """Solve for the scales and minima of each row with the least error, the levels being fixed.

    A row whose error rounding to float16 makes larger keeps its own.
    """
    groups = weight.shape[1] // GROUP
    by_group = hessian.view(groups, GROUP, groups, GROUP)
    both_sums = by_group.sum((1, 3))
    scales = grid.scales.float()
    mins = grid.mins.float()
    dense = grid.dense(levels)
    gradient = ((weight - dense) @ hessian).unflatten(1, (-1, GROUP))
    solved = []
    for some, pull in zip(levels.unflatten(1, (-1, GROUP)).split(64), gradient.split(64)):
        scaled = torch.einsum("rga,gahb->rghb", some, by_group)
        mixed = scaled.sum(-1)
        top = torch.cat([torch.einsum("rghb,rhb->rgh", scaled, some), mixed], 2)
        bottom = torch.cat([mixed.transpose(1, 2), both_sums.expand(len(some), -1, -1)], 2)
        normal = torch.cat([top, bottom], 1).double()
        # A group of equal levels has one unknown too many.
        diagonal = normal.diagonal(dim1=1, dim2=2)
        diagonal += 1e-6 * diagonal.mean(-1, keepdim=True)
        right = torch.cat([(pull * some).sum(-1), pull.sum(-1)], 1).double()
        solved.append(torch.linalg.solve(normal, right[..., None])[..., 0].float())
    change = torch.cat(solved)
    fitted = Grid((scales + change[:, :groups]).half(), (mins + change[:, groups:]).half())
    better = _row_errors(weight - fitted.dense(levels), hessian) < _row_errors(
        weight - dense, hessian
    )
    better &= (fitted.scales > 0).all(-1)  # NaN is not better
    return Grid(
        fitted.scales.where(better[:, None], grid.scales),
        fitted.mins.where(better[:, None], grid.mins),
    )


def _row_errors(change: Tensor, hessian: Tensor) -> Tensor:
    """Return d H d^T of each row, [outputs]."""
    return ((change @ hessian) * change).sum(-1)


def _improved(weight: Tensor, levels: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """Choose each column's levels once more, the others being as they are."""
    levels = levels.clone()
    pull = (weight - grid.dense(levels)) @ hessian
    for start in range(0, weight.shape[1], GROUP):
        end = start + GROUP
        scale = grid.scales[:, start // GROUP].float()
        block = hessian[start:end, start:end]
        near = pull[:, start:end].clone()
        changes = torch.zeros_like(near)
        for column in range(GROUP):
            wanted = near[:, column] / (block[column, column] * scale)
            level = (levels[:, start + column] + wanted).round().clamp(0, LEVELS)
            change = (levels[:, start + column] - level) * scale
            levels[:, start + column] = level
            near += change[:, None] * block[column]
            changes[:, column] = change
        pull += changes @ hessian[start:end]
    return levels


def _embedded(family: Any, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return hidden states [rows, tokens, hidden], and where rows have tokens, bool."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    used = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(list(row))
        used[number, : len(row)] = True
    with torch.no_grad():
        return family.embed(ids), used


def _block(family: Any, layer: int, hidden: Tensor) -> Tensor:
    tables = family.positions(hidden.shape[1], "cpu", torch.float32)
    # The causal mask hides the padding, which is behind the tokens.
    return family.block(layer, hidden, tables)


def _input_moments(
    family: Any, layer: int, parts: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[list[str], Tensor]]:
    """Return the linear layers of a block that have the same inputs, and the sum of x x^T."""
    shared: dict[str, list[str]] = {}
    moments: dict[str, Tensor] = {}
    for hidden, used in parts:
        inputs: dict[str, Tensor] = {}
        hooks = [
            family.linear(layer, target).register_forward_pre_hook(partial(_keep, inputs, target))
            for target in family.targets(layer)
        ]
        _block(family, layer, hidden)
        for hook in hooks:
            hook.remove()
        shared = {}
        for target, x in inputs.items():
            first = next(name for name, other in inputs.items() if other is x)
            shared.setdefault(first, []).append(target)
        for first in shared:
            rows = inputs[first].reshape(*used.shape, -1)[used]
            product = rows.t() @ rows
            moments[first] = moments[first] + product if first in moments else product
    return [(targets, moments[first]) for first, targets in shared.items()]


def _keep(
    inputs: dict[str, Tensor], target: str, _module: object, given: tuple[Tensor, ...]
) -> None:
    inputs[target] = given[0]
