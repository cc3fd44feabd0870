"""A run in MLX on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

mx = pytest.importorskip("mlx.core")

from ondevice.artifact.adapter import load_adapter  # noqa: E402
from ondevice.models import save_tiny  # noqa: E402
from tests.cli.command import CommandLine, classes  # noqa: E402


def test_train_resumes_with_the_same_bits(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    ondevice, data = CommandLine(capsys), classes(tmp_path / "rows.jsonl")
    model = save_tiny(tmp_path / "model", "qwen2", 1)

    def train(out: str, steps: int, *more: object) -> Path:
        options = [
            "--method",
            "mesp",
            "--backend",
            "mlx",
            "--model",
            model,
            "--data",
            data,
            "--out",
            tmp_path / out,
        ]
        options += [
            "--set",
            "method.bits=4",
            "--set",
            "method.weight_placement=streamed",
            "--set",
            "train.checkpoint_every=2",
        ]
        done = ondevice("train", *options, "--batch-size", 2, "--steps", steps, "--json", *more)
        assert done.code == 0, done.err
        assert done.json["steps"] == steps and done.json["final_loss"] > 0
        return Path(done.json["adapter"])

    straight = load_adapter(train("straight", 4)).tensors
    train("stopped", 2)
    resumed = load_adapter(train("stopped", 4, "--resume")).tensors
    assert straight.keys() == resumed.keys() and len(straight) == 2 * 2 * 7
    assert all(straight[name].tobytes() == resumed[name].tobytes() for name in straight)
