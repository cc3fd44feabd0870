"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sdk(root: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "examples/sdk.py"), str(tmp_path / "out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "replayed from the log: the same bits" in done.stdout
    for name in ("artifact/manifest.json", "run/adapter/adapter_config.json", "fused/model.safetensors"):
        assert (tmp_path / "out" / name).is_file()
