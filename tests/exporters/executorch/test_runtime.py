"""The runtime is loaded without ExecuTorch's compiler, which is there for whoever asks for it
afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.programs import program
from tests.warm import Warm

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


STEPS = """
import hashlib, sys
import numpy as np
from ondevice.api.open import open_artifact
from ondevice.exporters.executorch.session import load_runtime
load_runtime()
from executorch.extension.pybindings import portable_lib
portable_lib._unsafe_reset_threadpool(int(sys.argv[2]))
assert portable_lib._threadpool_get_thread_count() == int(sys.argv[2])
session = open_artifact(sys.argv[1])
ids = np.arange(session.batch_size * 16).reshape(session.batch_size, 16) % 200
for step in range(3):
    session.step(ids, ids, step, 1e-2)
print(hashlib.sha256(session.state()["adapter"].tobytes()).hexdigest())
"""


@pytest.mark.parametrize("name", ["blocks", "functional"])
def test_no_bit_depends_on_the_threads(name: str, warm: Warm) -> None:
    """A run goes on to the bit on a machine with other cores."""
    found = set()
    for number in ("1", "2"):
        done = subprocess.run(
            [str(warm.python), "-c", STEPS, str(program(name)), number],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.add(done.stdout.split()[-1])
    assert len(found) == 1
