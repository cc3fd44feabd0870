"""A session over half the squared distance to a target: zeroth-order numbers without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ondevice.core.session import Session, StepResult
from ondevice.data.examples import Dataset, Example, Item
from ondevice.runtime_ops import generator

EPSILON = 1e-2


class Quadratic(Session):
    """Trains `size` numbers towards `target`; every batch is the same."""

    backend = "numpy"

    def __init__(self, size: int, seed: int, queries: int) -> None:
        self.seed, self.queries = seed, queries
        self.target = np.random.default_rng(1).normal(0, 1, size).astype(np.float32)
        self.vector = np.zeros(size, dtype=np.float32)
        self.source, self.sha256 = "quadratic", "0" * 64

    def _loss(self, vector: np.ndarray) -> float:
        return float(0.5 * ((vector.astype(np.float64) - self.target) ** 2).sum())

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        noise = generator.rademacher(self.seed, step, 0, self.queries, 0, len(self.vector))
        losses = [self._loss(self.vector + sign * EPSILON * z) for sign in (1, -1) for z in noise]
        numbers = [
            (losses[q] - losses[q + self.queries]) / (2 * EPSILON) for q in range(self.queries)
        ]
        self.apply_update(tuple(numbers), step, learning_rate)
        return StepResult(sum(losses) / len(losses), tuple(losses), tuple(numbers))

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        noise = generator.rademacher(self.seed, step, 0, self.queries, 0, len(self.vector))
        rate = learning_rate / self.queries
        self.vector = self.vector - (rate * np.array(projected_gradients) @ noise).astype(
            np.float32
        )

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        loss = np.full(len(ids), self._loss(self.vector), dtype=np.float32)
        return loss, np.ones(len(ids), dtype=np.int64)

    def state(self) -> dict[str, np.ndarray]:
        return {"adapter": self.vector.copy(), "seed": np.array([self.seed])}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        self.vector = state["adapter"].copy()


def QuadraticRows(count: int) -> Any:
    """Rows that say nothing."""
    return SimpleNamespace(
        train=Dataset(items=[Item(Example((1, 2), (-100, 2)), line=line) for line in range(count)]),
        evaluation=None,
        pad=0,
    )
