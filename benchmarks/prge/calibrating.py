"""Subspaces of a group of runs of `benchmarks.prge.race`: exact gradients, and what is taken from
them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.prge.racing_model import TARGETS

Group = Any
"""`racing.Group`, which calls this."""
GRADIENT_TOKENS = 12_000
"""Tokens whose activations an exact gradient keeps at once."""


def refresh(group: Group, runs: list[int], step: int) -> None:
    """Fold what these runs have learned into their dense change, take a new subspace from an exact
    gradient, and begin with a step along it if a variant says so."""
    sizes = group.table.lengths
    if step:
        fold(group, runs)
    rows = [
        group.calibration[n].permutation(len(sizes))[: group.members[n][0].calibration]
        for n in runs
    ]
    if not step:  # all runs of a seed and of so many rows are the same model yet
        keys = [(group.members[n][2], group.members[n][0].calibration) for n in runs]
        alike = {key: i for i, key in enumerate(keys)}
        found = dict(zip(alike, gradients_of(group, list(alike.values()), rows, runs), strict=True))
        gradients = [found[key] for key in keys]
    else:
        gradients = gradients_of(group, list(range(len(runs))), rows, runs)
    take(group, runs, gradients)
    for run, gradient in zip(runs, gradients, strict=True):
        if group.members[run][0].exact:
            exact_step(group, run, gradient, step)


@torch.no_grad()
def exact_step(group: Group, run: int, gradient: list[dict[str, Any]], step: int) -> None:
    """Move this run's R against the exact gradient, by the rate of `exact` steps in root mean
    square."""
    variant, rate, _ = group.members[run]
    parts = []
    for layer, target, _, _ in group.layout:
        square = (
            group.a[layer][target][run].mT
            @ gradient[layer][target]
            @ group.c[layer][target][run].mT
        )
        parts.append(square.diagonal() if variant.space == "diag" else square.flatten())
    slope = torch.cat(parts)
    size = variant.exact * rate * (1 - step / variant.steps)
    group.state[run] -= size * slope / slope.square().mean().sqrt().clamp(min=1e-30)


@torch.no_grad()
def fold(group: Group, runs: list[int]) -> None:
    if group.delta is None:
        shapes = [
            (layer, target, group.model.dims.linear_shape(target))
            for layer, target, _, _ in group.layout
        ]
        group.delta = [{} for _ in group.a]
        for layer, target, (inputs, outputs) in shapes:
            group.delta[layer][target] = torch.zeros(
                len(group.members), inputs, outputs, device=group.device
            )
    index = torch.tensor(runs, device=group.device)
    for layer, target, offset, width in group.layout:
        part = group.state[index, offset : offset + group.shape.rank * width].view(
            -1, group.shape.rank, width
        )
        if group.shape.small:
            part = group.spread_out(part, group.c[layer][target][index])
        group.delta[layer][target].index_add_(
            0, index, torch.bmm(group.a[layer][target][index], part)
        )
    for value in (group.state, group.average, group.mean, group.square):
        value[index] = 0
    group.age[index], group.spread[index] = 0, 0


def gradients_of(
    group: Group, places: list[int], rows: list[np.ndarray], runs: list[int]
) -> list[list[dict[str, Any]]]:
    """Exact gradients of the loss by the weights, and second moments of the layers' inputs, of
    `runs[place]`."""
    found = []
    model, lengths = group.model, group.table.lengths
    for place in places:
        only, total = slice(runs[place], runs[place] + 1), None
        zeros = [
            {
                t: torch.zeros(
                    1, *model.dims.linear_shape(t), device=group.device, requires_grad=True
                )
                for t in TARGETS
            }
            for _ in range(model.dims.layers)
        ]
        leaves = [d[t] for d in zeros for t in TARGETS]
        covariance = [
            torch.zeros(1, model.inputs, model.inputs, device=group.device) for _ in zeros
        ]
        order = rows[place]
        parts = max(1, -(-int(lengths[order].sum()) // GRADIENT_TOKENS))
        for part in np.array_split(order, parts):
            packed, rows_SB = group.table.pack(part[None])
            used = int(lengths[part].sum())
            with torch.enable_grad(), group.fitted(None, only):
                if model.delta is not None:
                    with_base = [
                        {t: z[t] + d[t] for t in TARGETS}
                        for z, d in zip(zeros, model.delta, strict=True)
                    ]
                    model.delta = with_base
                else:
                    model.delta = zeros
                model.covariance = covariance
                model.weight = (
                    torch.arange(packed.ids.shape[1], device=group.device) < used
                ).float()[None, :, None]
                logits = model.logits(
                    group.table, packed, rows_SB, 1, group.shape.loss == "answers"
                )
                got = torch.autograd.grad(group.losses(logits, rows_SB).sum(), leaves)
            total = got if total is None else [x + y for x, y in zip(total, got, strict=True)]
        assert total is not None
        named = iter(total)
        found.append([{t: next(named)[0] for t in TARGETS} | {"moment": c[0]} for c in covariance])
    return found


@torch.no_grad()
def take(group: Group, runs: list[int], gradients: list[list[dict[str, Any]]]) -> None:
    """Set A (and C) of these runs: columns that let as much through as a random A does."""
    rank, index = group.shape.rank, torch.tensor(runs, device=group.device)
    layers = range(len(group.a))
    for target in TARGETS:
        unique: dict[int, int] = {}
        for gradient in gradients:
            unique.setdefault(id(gradient), len(unique))
        first = {number: gradient for gradient in gradients for number in [unique[id(gradient)]]}
        stack = torch.stack(
            [first[n][layer][target].mT for n in range(len(first)) for layer in layers]
        )
        u, s, v = (
            z.view(len(first), len(group.a), *z.shape[1:]) for z in top_subspace(stack, rank)
        )
        pick = torch.tensor([unique[id(gradient)] for gradient in gradients], device=group.device)
        strength = s / s.square().mean((1, 2), keepdim=True).sqrt().clamp(min=1e-30)
        power = torch.tensor(
            [group.members[n][0].power for n in runs], device=group.device, dtype=s.dtype
        )
        weight = strength[pick].clamp(min=1e-4) ** power[:, None, None]
        weight = weight / weight.square().mean((1, 2), keepdim=True).sqrt()
        for layer in layers:
            moment = torch.stack([gradient[layer]["moment"].diagonal() for gradient in gradients])
            a = v[pick, layer].float()
            acts = [i for i, n in enumerate(runs) if group.members[n][0].space == "act"]
            for i in acts:
                _, vectors = torch.linalg.eigh(gradients[i][layer]["moment"].double())
                a[i] = vectors[:, -rank:].float()
            passed = (a.square() * moment[..., None]).sum((1, 2))
            scale = (rank * moment.mean(1) / passed.clamp(min=1e-30)).sqrt()
            columns = (
                weight[:, layer].float()
                if group.shape.small
                else torch.ones_like(weight[:, layer].float())
            )
            group.a[layer][target][index] = a * scale[:, None, None] * columns[:, None]
            if group.shape.small:
                outputs = u.shape[2]
                group.c[layer][target][index] = u[pick, layer].mT.float() * (outputs / rank) ** 0.5


def top_subspace(matrix_NOI: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return U [N, out, rank], s [N, rank] and V [N, in, rank] of the largest singular values, by
    subspace iteration in float64 (three powers, eight columns more than asked for)."""
    matrix = matrix_NOI.double()
    wide = min(rank + 8, *matrix.shape[1:])
    generator = torch.Generator(matrix.device).manual_seed(0)
    y = matrix @ torch.randn(
        matrix.shape[2], wide, device=matrix.device, generator=generator, dtype=matrix.dtype
    )
    for _ in range(3):
        y = matrix @ (matrix.mT @ _orthonormal(y))
    q = _orthonormal(y)
    small = q.mT @ matrix
    values, vectors = torch.linalg.eigh((small @ small.mT).cpu())
    order = values.argsort(1, descending=True)[:, :rank]
    s = values.gather(1, order).clamp(min=0).sqrt().to(matrix.device)
    left = vectors.gather(2, order[:, None].expand(-1, wide, -1)).to(matrix.device)
    v = (small.mT @ left) / s.clamp(min=1e-30)[:, None]
    return q @ left, s, v


def _orthonormal(y: Tensor) -> Tensor:
    for _ in range(2):  # twice, since once leaves the square of the condition
        y = y / y.norm(dim=1, keepdim=True).clamp(min=1e-30)
        gram = y.mT @ y + 1e-14 * torch.eye(y.shape[2], device=y.device, dtype=y.dtype)
        y = torch.linalg.solve_triangular(torch.linalg.cholesky(gram).mT, y, upper=True, left=False)
    return y
