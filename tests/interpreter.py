"""Triton's interpreter, which runs kernels on the CPU, as the tests can use it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import version

import pytest
from packaging.version import Version


def _missing() -> str:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    triton, numpy = Version(version("triton")), Version(version("numpy"))
    if triton < Version("3.7") and numpy >= Version("2.4"):
        # It makes Python scalars of arrays of one value, which NumPy 2.4 refuses.
        return f"the interpreter of Triton {triton} fails with NumPy {numpy}; try: triton>=3.7"
    return ""


needs_interpreter = pytest.mark.skipif(bool(_missing()), reason=_missing() or "it is installed")
