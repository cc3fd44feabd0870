"""The road from `api.train` to a training step is short, and few functions take the entire run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

pytest.importorskip("torch")

import ondevice
from ondevice.api.runfile import RunConfig
from ondevice.api.train import train
from ondevice.core.session import Session
from ondevice.models import save_tiny

PACKAGE = str(Path(ondevice.__file__).parent)


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(PACKAGE)


class Road:
    """Watches calls until the first step: `depth` are its callers, `takers` got a `RunConfig`."""

    def __init__(self) -> None:
        self.depth: list[str] = []
        self.takers: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self.depth or not is_ours(frame):
            return
        code = frame.f_code
        values = frame.f_locals
        if code.co_name == "step" and isinstance(values.get("self"), Session):
            caller = frame.f_back
            while caller is not None:
                if is_ours(caller):
                    self.depth.append(caller.f_code.co_name)
                caller = caller.f_back
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if "self" not in arguments and any(
            isinstance(values.get(name), RunConfig) for name in arguments
        ):
            self.takers.add(f"{code.co_filename}:{code.co_name}")


def test_the_run_is_handed_on_at_most_eight_times_before_the_first_step(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "qwen2")
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n{"text": "four five"}\n')
    values: dict[str, Any] = {
        "model.source": str(tmp_path / "model"),
        "data.path": tmp_path / "rows.jsonl",
        "method": "mesp",
        "train.backend": "torch",
        "train.steps": 1,
        "train.out": tmp_path / "run",
    }
    config = RunConfig.load(None, values)
    road = Road()
    sys.setprofile(road)
    try:
        train(config)
    finally:
        sys.setprofile(None)
    assert road.depth[-1] == "train" and len(road.depth) <= 7, road.depth
    # `train` itself, and eight that it hands on to
    assert 1 < len(road.takers) <= 9, road.takers
