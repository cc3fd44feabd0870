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
LEAST_TOP = 2.0**-16
"""Of a row's largest scale, so that a 255th of it is above zero in float16."""
ROWS_AT_ONCE = 16
"""Of the calibration rows, so that few activations exist."""


@dataclass(frozen=True)
class Grid:
    """Scale and minimum of each group, float16 [outputs, groups].

    Attributes:
        tops: of each row, if its scales and minima are integers of 8 bits times a unit: see
            `tops_of`. None: they are any float16.
    """

    scales: Tensor
    mins: Tensor
    tops: Tensor | None = None

    def levels(self, weight: Tensor) -> Tensor:
        """Return the nearest levels, uint8 [outputs, inputs]."""
        groups = self._groups(weight).float() - self.mins.float()[..., None]
        levels = (groups / self.scales.float()[..., None]).round().clamp(0, LEVELS)
        return levels.flatten(1).to(torch.uint8)

    def dense(self, levels: Tensor) -> Tensor:
        """Return the weights of levels, float32 [outputs, inputs]."""
        groups = self._groups(levels).float()
        dense = groups * self.scales.float()[..., None] + self.mins.float()[..., None]
        return dense.flatten(1)

    def _groups(self, matrix: Tensor) -> Tensor:
        return matrix.unflatten(1, (self.scales.shape[1], -1))


def nearest_grid(weight: Tensor, scale_bits: int = 16, group: int = GROUP) -> Grid:
    """Span each group from its smallest to its largest weight.

    A weight that is on a grid with float16 scales and minima already (Q4_1) is on this one if its
    group uses the first and the last level, and `scale_bits` is 16.
    """
    groups = weight.detach().float().unflatten(1, (-1, group))
    low = groups.amin(-1)
    scales = (groups.amax(-1) - low) / LEVELS
    tops = tops_of(weight, group) if scale_bits == 8 else None
    return Grid(*stored(scales, low, tops), tops)


def tops_of(weight: Tensor, group: int = GROUP) -> Tensor:
    """Return the scale and the minimum that the integers 255 and 127 stand for in each row.

    Args:
        weight: float [outputs, inputs].
        group: inputs that share a scale and a minimum.

    Returns:
        float16 [outputs, 2]: the largest scale and the largest size of a minimum.
    """
    groups = weight.detach().float().unflatten(1, (-1, group))
    low = groups.amin(-1)
    scales = (groups.amax(-1) - low) / LEVELS
    tops = torch.stack((scales.amax(-1), low.abs().amax(-1)), -1)
    return tops.clamp(min=LEAST_TOP).half()


def in_integers(scales: Tensor, mins: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest integers: scales as uint8 in 1..255 and minima as int8 in -127..127, in
    the shape of `scales`, [outputs, groups]."""
    top, low = tops.float()[..., None].unbind(1)
    return (
        (scales.float() * 255.0 / top).round().clamp(1, 255).to(torch.uint8),
        (mins.float() * 127.0 / low).round().clamp(-127, 127).to(torch.int8),
    )


def of_integers(scales: Tensor, mins: Tensor, tops: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float16 scales and minima that such integers stand for.

    Block programs do this in their graph, so that their kernels read float16.
    """
    units = tops.to(torch.float32)
    return (
        (scales.to(torch.float32) * (units[:, :1] / 255.0)).to(torch.float16),
        (mins.to(torch.float32) * (units[:, 1:] / 127.0)).to(torch.float16),
    )


def stored(scales: Tensor, mins: Tensor, tops: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the nearest scales and minima that a file has, float16 [outputs, groups]."""
    if tops is not None:
        return of_integers(*in_integers(scales, mins, tops), tops)
    scales = scales.half()
    # Of equal weights the minimum is all there is.
    return scales.where(scales > 0, 1.0), mins.half()


def round_model(
    family: Any, rows: Sequence[Sequence[int]], scale_bits: int = 16, group: int = GROUP
) -> dict[str, Grid]:
    """Move the matrices of every block to 4-bit grids, block after block, in place.

    A block's inputs come from the blocks before it as they are rounded.

    Args:
        family: of a float32 model on the CPU.
        rows: token ids of each calibration row.
        scale_bits: of each scale and minimum, 16 or 8.
        group: inputs that share a scale and a minimum.

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
                whole = torch.cat([one.data for one in weights])
                grid, dense = round_matrix(whole, hessian, scale_bits, group)
                start = 0
                for target, weight in zip(targets, weights):
                    end = start + len(weight)
                    weight.data = dense[start:end].clone()
                    name = f"{family.weight_path(layer, target)}.weight"
                    tops = None if grid.tops is None else grid.tops[start:end]
                    grids[name] = Grid(grid.scales[start:end], grid.mins[start:end], tops)
                    start = end
            parts = [(_block(family, layer, hidden), used) for hidden, used in parts]
    return grids


def round_matrix(
    weight: Tensor, hessian: Tensor, scale_bits: int = 16, group: int = GROUP
) -> tuple[Grid, Tensor]:
    """Choose scales, minima and levels with the least tr(D H D^T) that is found.

    Args:
        weight: float32 [outputs, inputs].
        hessian: sum of x x^T over inputs, [inputs, inputs]; of any rank.
        scale_bits: of each scale and minimum, 16 or 8.
        group: inputs that share a scale and a minimum.

    Returns:
        the grid, and the weights on it, float32 [outputs, inputs].
    """
    damped = hessian.double()
    mean = float(damped.diagonal().mean())
    # Without any input the matrix is rounded to the nearest.
    damped = damped + torch.eye(len(damped), dtype=torch.float64) * (DAMPING * mean or 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    tops = tops_of(weight, group) if scale_bits == 8 else None
    grid, levels = _compensated(weight.float(), upper, tops, group)
    damped = damped.float()
    grid = _fitted(weight.float(), levels, grid, damped)
    levels = _improved(weight.float(), levels, grid, damped)
    return grid, grid.dense(levels)


def _compensated(
    weight: Tensor, upper: Tensor, tops: Tensor | None, group: int
) -> tuple[Grid, Tensor]:
    """Round column after column; `upper` is the Cholesky factor of the inverse of H.

    Returns the grid and float32 levels [outputs, inputs].
    """
    left = weight.clone()
    levels = torch.zeros_like(left)
    scales = []
    mins = []
    for start in range(0, weight.shape[1], group):
        end = start + group
        part = left[:, start:end].clone()
        factor = upper[start:end, start:end]
        errors = torch.zeros_like(part)
        scale, minimum = _spanned(part, factor.diagonal().square().reciprocal(), tops)
        scales.append(scale)
        mins.append(minimum)
        for column in range(group):
            value = part[:, column].clone()
            level = ((value - minimum) / scale).round().clamp(0, LEVELS)
            levels[:, start + column] = level
            error = (value - level * scale - minimum) / factor[column, column]
            part[:, column:] -= error[:, None] * factor[column, column:]
            errors[:, column] = error
        left[:, end:] -= errors @ upper[start:end, end:]
    return Grid(torch.stack(scales, 1).half(), torch.stack(mins, 1).half(), tops), levels


def _spanned(
    weight: Tensor, importance: Tensor, tops: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return scale and minimum of a group's rows, float32 [outputs] that a file has exactly.

    Args:
        weight: float32 [outputs, group].
        importance: of each input's squared error, float32 [group].
        tops: see `Grid`.
    """
    low = weight.amin(-1)
    high = weight.amax(-1)
    middle = (low + high) / 2
    least = torch.full_like(low, torch.inf)
    scale = torch.ones_like(low)
    minimum = low.half().float()
    for share in RANGES:
        span = ((high - low) * share / LEVELS)[:, None]
        start = (middle + (low - middle) * share)[:, None]
        tried, tried_minimum = (part[:, 0].float() for part in stored(span, start, tops))
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

    A row whose error rounding them makes larger keeps its own.
    """
    groups = grid.scales.shape[1]
    by_group = hessian.unflatten(1, (groups, -1)).unflatten(0, (groups, -1))
    both_sums = by_group.sum((1, 3))
    scales = grid.scales.float()
    mins = grid.mins.float()
    dense = grid.dense(levels)
    gradient = ((weight - dense) @ hessian).unflatten(1, (groups, -1))
    solved = []
    for some, pull in zip(levels.unflatten(1, (groups, -1)).split(64), gradient.split(64)):
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
    solution = scales + change[:, :groups], mins + change[:, groups:]
    fitted = Grid(*stored(*solution, grid.tops), grid.tops)
    better = _row_errors(weight - fitted.dense(levels), hessian) < _row_errors(
        weight - dense, hessian
    )
    better &= (fitted.scales > 0).all(-1)  # NaN is not better
    return Grid(
        fitted.scales.where(better[:, None], grid.scales),
        fitted.mins.where(better[:, None], grid.mins),
        grid.tops,
    )


def _row_errors(change: Tensor, hessian: Tensor) -> Tensor:
    """Return d H d^T of each row, [outputs]."""
    return ((change @ hessian) * change).sum(-1)


def _improved(weight: Tensor, levels: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
    """Choose each column's levels once more, the others being as they are."""
    levels = levels.clone()
    pull = (weight - grid.dense(levels)) @ hessian
    group = weight.shape[1] // grid.scales.shape[1]
    for start in range(0, weight.shape[1], group):
        end = start + group
        scale = grid.scales[:, start // group].float()
        block = hessian[start:end, start:end]
        near = pull[:, start:end].clone()
        changes = torch.zeros_like(near)
        for column in range(group):
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
