"""Prompts with continuations, as an engine evaluates them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ondevice.data import Example
from ondevice.data.prompt_tree import pad_trees, prompt_tree


def evaluated_trees(engine: Any) -> torch.Tensor:
    """Return the losses of three prompts' continuations; none if the model's rows cannot branch."""
    if not engine.passes.family.takes_branches(24):
        return torch.zeros(0)
    random = np.random.default_rng(3)
    trees = []
    for length in (9, 4, 7):
        prompt = random.integers(1, 60, length).tolist()
        answers = [[first, *random.integers(1, 60, first % 3)] for first in (5, 8, 12)]
        rows = [(*prompt, *map(int, answer)) for answer in answers]
        trees.append(prompt_tree([Example(row, (*[-100] * length, *row[length:])) for row in rows]))
    return torch.from_numpy(engine.evaluate_branches(*pad_trees(trees, 0)[:-1]))
