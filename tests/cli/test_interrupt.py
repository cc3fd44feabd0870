"""Ctrl-C and a second run, with the installed command in processes of their own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ondevice.training import events
from ondevice.training.events import read_log
from tests.cli.command import classes, tiny
from tests.cli.test_training import bits

CODE = "from ondevice.cli.app import run; run()"


def start(
    *arguments: object, cwd: Path, python: Path | str = sys.executable
) -> subprocess.Popen[str]:
    """Start `ondevice ARGUMENTS`; with `python` of `tests.warm` where it is not killed, and its id is not looked at."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [str(python), "-c", CODE, *map(str, arguments)], cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip


def steps_of(out: Path) -> int:
    return sum(
        isinstance(entry.event, events.Step) for entry in read_log(out / "events.jsonl").entries
    )


def wait_for_steps(process: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (out / "events.jsonl").is_file() and steps_of(out) >= count:
            return
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()[1]}")
        time.sleep(0.05)
    process.kill()
    pytest.fail("the run did not start")


def test_ctrl_c_saves_and_a_resume_ends_with_the_same_bits(ondevice, tmp_path) -> None:
    data, out, straight = (
        classes(tmp_path / "rows.jsonl"),
        tmp_path / "le résultat",
        tmp_path / "straight",
    )
    train = ("train", *tiny("prge", "--lr", "0.1", "--schedule", "constant"), "--data", data)
    process = start(*train, "--steps", 100_000, "--out", out, "--json", cwd=tmp_path)
    try:
        wait_for_steps(process, out, 5)
        second = ondevice(*train, "--steps", 1, "--out", out)  # while it runs
        assert second.code == 7 and f"process {process.pid}" in second.err
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    figures = json.loads(printed.splitlines()[-1])
    assert figures["interrupted"] is True and figures["steps"] == steps_of(out) >= 5
    assert "everything is saved" in errors and "Traceback" not in errors
    pasted = shlex.split(
        errors.split("To go on: ")[1].splitlines()[0]
    )  # the whole command, whatever is in its paths
    assert pasted == [
        "ondevice",
        *map(str, train),
        "--steps",
        "100000",
        "--out",
        str(out),
        "--json",
        "--resume",
    ]
    done = figures["steps"]
    assert (out / f"checkpoint-{done:08d}").is_dir() and bits(out / "adapter")
    assert (
        ondevice(*train, "--steps", done + 4, "--out", out, "--resume", "--json").json["steps"]
        == done + 4
    )
    assert ondevice(*train, "--steps", done + 4, "--out", straight, "--quiet").code == 0
    assert bits(out / "adapter") == bits(straight / "adapter")
    assert ondevice("replay", out, "--out", tmp_path / "again", "--json").json["warnings"] == []
    assert bits(tmp_path / "again") == bits(straight / "adapter")


def test_ctrl_c_before_the_first_step_ends_quietly(tmp_path) -> None:
    data = tmp_path / "rows.jsonl"
    os.mkfifo(data)
    process = start("train", *tiny(), "--data", data, "--steps", 9, cwd=tmp_path)
    with data.open("w"):  # open once the run reads its rows; they never come
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert not list(tmp_path.glob("runs/**/adapter"))


def test_the_installed_command_runs_from_any_folder(tmp_path) -> None:
    script = Path(sys.executable).with_name("ondevice")
    if not script.is_file():
        pytest.skip("the console script is not installed beside this interpreter")
    done = subprocess.run(
        [script, "--version"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    listed = subprocess.run(
        [script, "--help"], capture_output=True, text=True, cwd=tmp_path, check=False
    ).stdout
    verbs = (
        "train",
        "run",
        "replay",
        "eval",
        "export",
        "verify",
        "fuse",
        "chat",
        "data",
        "plan",
        "doctor",
        "config",
    )
    assert [verb for verb in verbs if verb not in listed] == []
    wrong = subprocess.run(
        [script, "trian"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert wrong.returncode == 2 and "trian" in wrong.stderr and "Traceback" not in wrong.stderr
