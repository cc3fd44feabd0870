"""The examples run as they stand."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.warm import Warm


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sdk_example_runs_and_replays(root: Path, tmp_path: Path, warm: Warm) -> None:
    done = subprocess.run(
        [str(warm.python), str(root / "examples/sdk.py"), str(tmp_path / "out")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "replayed from the log: the same bits" in done.stdout
    for name in (
        "artifact/manifest.json",
        "run/adapter/adapter_config.json",
        "fused/model.safetensors",
    ):
        assert (tmp_path / "out" / name).is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_mac_example_trains_and_finds_its_finished_run(
    root: Path, tmp_path: Path, warm: Warm
) -> None:
    """On the CPU, with a tiny model; the second call finds the run finished and only talks."""
    pytest.importorskip("mlx_lm")
    from ondevice.models import save_tiny

    model = save_tiny(tmp_path / "model", "qwen2")
    words = [
        "--model",
        str(model),
        "--steps",
        "3",
        "--max-length",
        "48",
        "--rank",
        "4",
        "--out",
        str(tmp_path / "out"),
    ]
    words += ["--prompt", "hello", "--max-new-tokens", "4"]
    environment = os.environ | {"ONDEVICE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        done = subprocess.run(
            [str(warm.python), str(root / "examples/mac_finetune.py"), *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        assert "adapter-mlx-lm" in done.stdout and "MLX's peak" in done.stdout
    for name in (
        "run/adapter/adapter_config.json",
        "adapter-mlx-lm/adapters.safetensors",
        "model/config.json",
    ):
        assert (tmp_path / "out" / name).is_file()
    assert (tmp_path / "cache/models/mlx").is_dir()
    done = subprocess.run(
        [str(warm.python), str(root / "examples/mac_finetune.py"), "--model", str(tmp_path / "nothing")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (
        done.returncode == 4 and "does not exist" in done.stderr and "Traceback" not in done.stderr
    )
