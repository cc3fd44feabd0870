"""The native host (`runtime_ops/host`) as tests use it: built once, called with --json."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ondevice.runtime_ops import build
from tests.runtime_ops.test_cmake import need, run
from tests.shared import cached

HOST = build.SOURCES.resolve().parent / "host"
ROOT = HOST.parents[1]
FETCH = "bash .ci/native-runtime"
REQUIRED = "ONDEVICE_REQUIRE_HOST"


def runtime(machine: str = "x86_64") -> Path:
    """The folder of ExecuTorch's libraries: the installed ones, or for another processor those that
    FETCH unpacks; skips by name without them."""
    place = build.runtime_libraries()[0].parents[1]
    if machine != platform.machine():
        place = ROOT / "build" / "native-runtime" / machine / "executorch"
    if (place / "lib" / "libexecutorch.so").is_file():
        return place
    message = f"no ExecuTorch runtime with lib/libexecutorch.so for {machine}; try: {FETCH}"
    (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(message)
    raise AssertionError


def built(machine: str, *options: str) -> Path:
    """The host, compiled once for each content of its sources."""
    need("cmake")
    place = runtime(machine)
    sources = [*HOST.glob("*"), *build.SOURCES.resolve().glob("*.[ch]*")]
    content = [(path.name, path.read_bytes().hex()) for path in sorted(sources)]

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        run("cmake", "-S", HOST, "-B", folder, f"-DEXECUTORCH_ROOT={place}", *options)
        run("cmake", "--build", folder, "--parallel", "2")
        return folder / "ondevice-host"

    settings = json.dumps([str(place), options, content])
    return cached(f"host for {machine}", settings, make)


def call(host: Path, *words: str | Path, status: int = 0) -> dict[str, Any]:
    """What the host prints with --json."""
    done = subprocess.run(
        [host, *words, "--json"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


def losses(out: Path) -> list[float]:
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["event"] == "step"]
