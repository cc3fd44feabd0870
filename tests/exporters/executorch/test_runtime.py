"""The runtime is loaded without ExecuTorch's compiler, which is there for whoever asks for it
afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("executorch")

RUNTIME_THEN_COMPILER = """
import sys
from ondevice.exporters.executorch.session import load_runtime
runtime = load_runtime()
assert runtime is load_runtime() and len(runtime.operator_registry.operator_names) > 100
compiler = [name for name in sys.modules if name.startswith("executorch.exir")]
assert compiler == [], compiler
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
import executorch.exir
from executorch.exir import to_edge_transform_and_lower
assert executorch.exir.__file__ and sys.modules["executorch.exir"] is executorch.exir
assert executorch.exir._warnings is sys.modules["executorch.exir._warnings"]
"""
COMPILER_THEN_RUNTIME = """
import sys
import executorch.exir
from ondevice.exporters.executorch.session import load_runtime
load_runtime()
assert sys.modules["executorch.exir"] is executorch.exir and executorch.exir.to_edge_transform_and_lower
"""


@pytest.mark.parametrize(
    "program",
    [RUNTIME_THEN_COMPILER, COMPILER_THEN_RUNTIME],
    ids=["runtime first", "compiler first"],
)
def test_the_runtime_needs_no_compiler(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
