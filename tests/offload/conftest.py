"""Tiny models run fastest on one thread, and so do not wait for whatever else the machine does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.methods.slideformer.conftest import engine  # noqa: F401


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
