"""A run stays readable from end to end: so many files of ours, at most, have a function that it
calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.models import save_tiny
from tests.warm import Warm

COUNT = """
import json, sys, threading
from pathlib import Path
codes = set()
def called(frame, event, argument):  # a tracer hears of calls, a profiler also of returns and of C
    codes.add(frame.f_code)
threading.settrace(called)
sys.settrace(called)
try:
    {run}
except SystemExit as ended:
    assert not ended.code, ended.code
sys.settrace(None)
OPTIMIZED = 1  # a function's code; a module's and a class's, which run at import, lack the flag
files = {{Path(c.co_filename).resolve() for c in codes if c.co_flags & OPTIMIZED and c.co_name[0] != "<"}}
root = Path(sys.argv[1])
ours = [path.relative_to(root) for path in files if path.is_relative_to(root)]
print(json.dumps(sorted(str(p) for p in ours if p.parts[0] in ("ondevice", "exporters", "runtime_ops"))))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("executed")
    save_tiny(folder / "model", "qwen2")
    (folder / "rows.jsonl").write_text('{"text": "one two three"}\n{"text": "four five six"}\n')
    if os.environ.get(
        "ONDEVICE_TESTS_COLD"
    ):  # a machine's first run measures its processes as well
        measure = (
            "import torch; from ondevice.planning.runtime import runtime_of as f; f('slideformer')"
        )
        subprocess.run([sys.executable, "-c", measure], check=True)
    return folder


def executed(warm: Warm, root: Path, folder: Path, run: str) -> list[str]:
    """Return our files of which `run` calls a function, in a process of its own."""
    done = subprocess.run(
        [str(warm.python), "-c", COUNT.format(run=run), str(root)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("method", "backend", "most"),
    [
        ("mesp", "torch", 70),
        ("lora", "torch", 59),
        ("mesp", "mlx", 63),
        ("prge", "torch", 66),
        ("slideformer", "torch", 78),
    ],
)
def test_a_run_calls_few_files(
    method: str, backend: str, most: int, warm: Warm, root: Path, folder: Path
) -> None:
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    words = [*f"train --model model --method {method} --backend {backend}".split()]
    words += [*f"--data rows.jsonl --steps 2 --max-length 16 --out {method}-{backend}".split()]
    files = executed(warm, root, folder, f"from ondevice.cli.app import run; run({words!r})")
    assert f"ondevice/methods/{method}/__init__.py" in files and "ondevice/cli/app.py" in files
    assert len(files) <= most, "\n".join(files)


def test_the_worker_of_a_job_calls_few_files(warm: Warm, root: Path, folder: Path) -> None:
    """In its own process; the daemon's part of a job is before and after."""
    pytest.importorskip("mlx.core")
    (folder / "job").mkdir()
    config = {
        "model": {"source": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "max_length_tokens": 16},
        "method": {"name": "mesp"},
        "train": {"steps": 2, "out": str(folder / "job" / "run"), "backend": "mlx"},
    }
    job = {"config": config, "adapter": None, "attempt": 1, "artifact": None, "force": True}
    (folder / "job" / "job.json").write_text(json.dumps(job))
    run = "from pathlib import Path; from ondevice.server.worker import run; assert run(Path('job')) == 0"
    files = executed(warm, root, folder, run)
    assert "ondevice/server/worker.py" in files and "ondevice/training/loop.py" in files
    assert len(files) <= 59, "\n".join(files)
