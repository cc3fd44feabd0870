"""A charter that needs no model, and answers to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core.errors import FleetError
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.charter import Charter
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.messages import Task, TaskReply
from ondevice.fleet.numbers import pack


def charter(
    *, size: int = 130, noise: str = "rademacher", rate: float = 1e-2, **agreement: Any
) -> Charter:
    """A fleet of two queries a step; `size` is no multiple of a word's 64 signs."""
    return Charter(
        model_source="tiny:llama",
        model_sha256="0" * 64,
        method={"name": "prge"},
        data={"task": "sst2"},
        seed=7,
        size=size,
        noise=noise,  # type: ignore[arg-type]
        queries=2,
        learning_rate=rate,
        fleet=Agreement(**agreement),
    )


def answer(task: Task, device: int, values: list[float], rows: int = 4) -> TaskReply:
    """What a device that measured `values` says."""
    return TaskReply(task.fleet, task.round, task.begin, device, rows, 0.5, pack(values))


def drawn(count: int, seed: int = 0) -> list[float]:
    """Numbers as projected gradients are."""
    return np.random.default_rng(seed).normal(0, 3, count).tolist()


def open_to_others(folder: Path) -> list[str]:
    """The files and folders, this one too, that somebody else than their owner could read or write."""
    found = [folder, *folder.rglob("*")]
    assert len(found) > 1
    return [str(path) for path in found if path.lstat().st_mode & 0o077]


def refused(code: Code) -> Any:
    """Expect a refusal with this code."""
    return pytest.raises(Refusal, check=lambda error: error.code == code)


def fails(expected: Any) -> Any:
    """Expect a fleet's error that names what was expected."""
    return pytest.raises(FleetError, check=lambda error: error.expected == expected)
