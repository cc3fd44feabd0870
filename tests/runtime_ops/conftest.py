"""What tests of several compiled ops share."""

from __future__ import annotations

import ctypes
import platform

import pytest

from ondevice.runtime_ops import build, native


@pytest.fixture(scope="session")
def processors() -> list[ctypes.CDLL]:
    """The AdamW step for this very processor, and for ones without AVX-512 and without AVX."""
    if not build.has_compiler() or platform.machine() != "x86_64":
        pytest.skip("no C++ compiler for x86-64")
    libraries = []
    for machine in ("native", "x86-64-v3", "x86-64"):
        name, flags = f"layer_adam_{machine}", ["-std=c++17", f"-march={machine}"]
        # In the cache, as each takes seconds and several files want them.
        path = build._build(name, ["layer_adam.cpp"], flags, [])  # of two -march the last counts
        libraries.append(ctypes.CDLL(str(path)))
    return libraries


@pytest.fixture(params=["compiled", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of an op on the CPU: compiled, and torch's if there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("no compiler")
