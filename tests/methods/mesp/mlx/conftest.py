"""MLX runs one task after the other here, so that peaks and bits repeat."""

from __future__ import annotations

import pytest

mx = pytest.importorskip("mlx.core")


@pytest.fixture(autouse=True)
def one_task():
    before = mx.set_memory_limit(1)
    yield
    mx.set_memory_limit(before)
