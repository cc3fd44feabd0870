"""Tiny models run fastest on one thread, and so do not wait for whatever else the machine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """`engine(config, family, **sizes)` opens an engine over a tiny model on the CPU; all are closed at the end."""
    from tests.offload.reference import open_engine

    made = []

    def make(config: dict[str, Any] | None = None, family: str = "llama", **sizes: Any) -> Any:
        made.append(open_engine(config or {}, family, **sizes))
        return made[-1]

    yield make
    for one in made:
        one.close()
