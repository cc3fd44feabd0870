"""An engine over a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def engine() -> Iterator[Callable[..., Any]]:
    """`engine(config, family, **sizes)` opens an engine over a tiny model on the CPU; all are closed at the end."""
    from tests.methods.slideformer.reference import open_engine

    collected = []

    def make(config: dict[str, Any] | None = None, family: str = "llama", **sizes: Any) -> Any:
        collected.append(open_engine(config or {}, family, **sizes))
        return collected[-1]

    yield make
    for one in collected:
        one.close()
