"""What the benchmark on ARM reads from an emulator's log and from two runs; the runs are
tests/exporters/executorch."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.common import machine_info
from benchmarks.mesp import arm
from benchmarks.mesp.arm import difference, instructions
from benchmarks.mesp.arm_userland import Userland
from ondevice.core.errors import MissingPackageError

ENTRY: Any = SimpleNamespace(linear="q", rank=2, a_offset=0, inputs=3, offset=6, outputs=2)
SPEC: Any = SimpleNamespace(layout=(ENTRY,))


def test_only_instructions_of_the_library_are_counted(tmp_path: Path) -> None:
    """The words are those of a real log, in which the disassembler did not know dot products."""
    lines = [
        "0x5500:  4fab1940  fmla     v0.4s, v10.4s, v11.s[3]",
        "----------------",
        "IN: ",
        "0x55b86e4bb4:  4fab1940  fmla     v0.4s, v10.4s, v11.s[3]",
        "0x55b86e4bb8:  d503201f  nop      ",
        "0x55b8c1b9d4:  4fb0ea3c  .byte    0x3c, 0xea, 0xb0, 0x4f",
        "0x55b8c1b9d8:  4e96a700  .byte    0x00, 0xa7, 0x96, 0x4e",
        "0x55b9000000:  4fb0ea3c  .byte    0x3c, 0xea, 0xb0, 0x4f",
    ]
    (tmp_path / "log").write_text("\n".join(lines))
    found = instructions(tmp_path / "log", 0x55B8000000, 0x55B9000000)
    assert found == {"fmla": 1, "smlal": 0, "sdot": 1, "smmla": 1}


def write(folder: Path, gradients: list[list[float]], losses: list[list[float]]) -> Path:
    folder.mkdir()
    values = {
        "gradient": np.array(gradients),
        "losses": np.array(losses),
        "adapter": np.ones((len(losses), 4)),
    }
    np.savez(folder / "job.npz", allow_pickle=False, **values)
    return folder


def test_differences_are_relative_and_name_the_nearest_run(tmp_path: Path) -> None:
    ours = [3.0, 0, 0, 0, 0, 0, 4.0, 0, 0, 0]
    moved = [3.0, 0, 0, 0, 0, 0, 4.5, 0, 0, 0]
    here = write(tmp_path / "here", [ours, moved], [[2.0, 1.0], [2.0, 1.0]])
    there = write(tmp_path / "there", [moved], [[2.0, 1.1]])
    found = difference("job", here, there, SPEC)
    assert found["gradient"] == found["own_gradient"] == pytest.approx(0.5 / 5)
    assert found["worst_gradient"] == pytest.approx(0.5 / 4)
    assert found["loss"] == pytest.approx(0.1) and found["own_loss"] == 0
    assert found["nearest_gradient"] == found["adapter"] == 0


def test_numbers_that_are_not_finite_do_not_count_as_agreement(tmp_path: Path) -> None:
    here = write(tmp_path / "here", [[1.0] * 10], [[2.0]])
    there = write(tmp_path / "there", [[1.0] * 10], [[float("nan")]])
    with pytest.raises(AssertionError) as failed:
        difference("job", here, there, SPEC)
    assert str(failed.value).startswith("job: ")


def test_a_folder_without_a_userland_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MissingPackageError) as missing:
        Userland(tmp_path)
    assert "python -m benchmarks.mesp.arm_userland" in str(missing.value)


def test_rows_that_are_not_measured_again_keep_their_commit(tmp_path: Path, monkeypatch) -> None:
    row = {"model": "llama", "form": "none", "loss": 1.0}
    recorded = {
        "date": "2026-11-23",
        "versions": {"commit": "abc"},
        "rows": [row, row | {"model": "qwen2"}],
    }
    recorded["notes"] = ["ARM: QEMU 7", "Instructions met: sdot 480."]
    monkeypatch.setattr(arm, "RESULTS", tmp_path)
    file = tmp_path / arm.NAME / f"{machine_info()['name']}.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(recorded))
    rows, notes = arm.with_earlier([row | {"loss": 2.0}, row | {"form": "int8"}])
    assert [(one["model"], one["form"], one["loss"]) for one in rows] == [
        ("llama", "none", 2.0), ("llama", "int8", 1.0), ("qwen2", "none", 1.0),
    ]  # fmt: skip
    assert notes == ["Of 2026-11-23, commit abc: qwen2 none.", "Then: Instructions met: sdot 480."]
    file.write_text(
        json.dumps(
            recorded
            | {"date": "later", "rows": rows, "notes": ["Instructions met: fmla 1.", *notes]}
        )
    )
    assert arm.with_earlier(rows[:2])[1] == notes, "a row keeps its own date"
