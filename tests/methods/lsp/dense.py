"""Projectors and what is made of them, written once more: dense matrices in float64, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ondevice.methods.lsp.projector import Projector, draw


def table(side: Projector) -> torch.Tensor:
    """float64 [rows, size]."""
    if side.values is None:
        return torch.eye(side.rows, dtype=torch.float64)
    if side.positions is None:
        return side.values.double()
    built = np.zeros((side.rows, side.size))
    for row, (positions, values) in enumerate(
        zip(side.positions.tolist(), side.values.tolist(), strict=True)
    ):
        for position, value in zip(positions, values, strict=True):
            built[row, position] += value
    return torch.from_numpy(built)


def estimate(p: torch.Tensor, q: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """P P^T G Q Q^T."""
    return p @ (p.T @ gradient @ q) @ q.T


def off(p: torch.Tensor, q: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """||P P^T G Q Q^T - G||^2 / ||G||^2."""
    return (estimate(p, q, gradient) - gradient).square().sum() / gradient.square().sum()


def objective(
    p: torch.Tensor, q: torch.Tensor, gradient: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Compute the objective that is minimised, by the formula of fit.py."""
    return off(p, q, gradient) + gamma * (p.square().sum() / len(p) + q.square().sum() / len(q))


def scaled(p: torch.Tensor, q: torch.Tensor, gradient: torch.Tensor) -> float:
    """The factor that brings the estimate nearest to the gradient."""
    actual = estimate(p, q, gradient)
    return float((actual * gradient).sum() / actual.square().sum())


def pair(
    m: int, n: int, size: int, nonzeros: int, seed: int = 0, signs: bool = False
) -> tuple[Projector, Projector]:
    """Drawn."""
    left, right = (
        draw(side, size, nonzeros, seed, 0, i, signs=signs) for i, side in enumerate((m, n))
    )
    return left, right


def normal(*sizes: int, seed: int = 0) -> torch.Tensor:
    """float32."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def low_rank(m: int, n: int, rank: int, seed: int = 0) -> torch.Tensor:
    """float32, of unit variance."""
    return normal(m, rank, seed=2 * seed) @ normal(rank, n, seed=2 * seed + 1) / rank**0.5


def near(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 3e-6) -> None:
    """In norm; shapes are the same."""
    assert actual.shape == wanted.shape
    assert float((actual.double() - wanted.double()).norm()) <= tolerance * float(
        wanted.double().norm()
    )


def sides(left: Projector, right: Projector) -> tuple[Any, Any]:
    """Both tables."""
    return table(left), table(right)
