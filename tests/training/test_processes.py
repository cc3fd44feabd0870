"""Runs in processes of their own: stopped by signals, killed, two at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.core.errors import BusyError
from ondevice.training import events
from tests.training.bigram import STOPPING, BigramSession, logged, scalars, train

ROOT = Path(__file__).parents[2]


def start_process(out: Path, steps: int, last: int, *flags: str) -> subprocess.Popen:
    """One that waits behind step `last` until its standard input ends, as `communicate` lets it."""
    command = [
        sys.executable,
        "-m",
        "tests.training.bigram",
        str(out),
        str(steps),
        str(last),
        *flags,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def wait_for_step(process: subprocess.Popen, step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= step:
            return
    pytest.fail(process.communicate()[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_exits_with_130_and_the_resume_has_the_same_bits(
    tmp_path, whole, number
) -> None:
    process = start_process(tmp_path, 60, 4)
    wait_for_step(process, 4)
    process.send_signal(number)
    assert process.stdout is not None and process.stdout.readline() == f"{STOPPING}\n"
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130, errors
    last = logged(tmp_path)[-1]
    assert isinstance(last, events.Interrupt) and last.signal == signal.Signals(number).name
    assert last.step == 5 and (tmp_path / f"checkpoint-{last.step:08d}").is_dir()
    session = BigramSession()
    train(tmp_path, 60, session, resume=True)
    assert session.logits.tobytes() == whole[1].logits.tobytes() and scalars(tmp_path) == scalars(
        whole[0]
    )


def test_a_second_ctrl_c_stops_at_once(tmp_path) -> None:
    process = start_process(tmp_path, 60, 0)
    wait_for_step(process, 0)
    process.send_signal(signal.SIGINT)
    assert (
        process.stdout is not None and process.stdout.readline() == f"{STOPPING}\n"
    )  # two at once would be one
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0  # its step would go on for ever
    assert "KeyboardInterrupt" in process.communicate()[1]
    session = BigramSession()
    train(tmp_path, 5, session, resume=True)  # the folder is free, and the log is whole
    assert [event.step for event in logged(tmp_path, events.Step)] == [0, 1, 2, 3, 4]


def test_killed_at_any_moment_it_goes_on_with_the_same_bits(tmp_path, whole) -> None:
    for step in (3, 14, 33):
        process = start_process(tmp_path, 60, step, "resume")
        wait_for_step(process, step)
        process.kill()
        process.communicate()
        with (tmp_path / "events.jsonl").open("ab") as file:
            file.write(b'{"event":"step","time_s":17')  # what a power cut leaves of a line
        (tmp_path / f".checkpoint-{step:08d}.partial-0-1-deadbeef").mkdir()  # and of a checkpoint
    session = BigramSession()
    train(tmp_path, 60, session, resume=True)
    assert session.logits.tobytes() == whole[1].logits.tobytes() and scalars(tmp_path) == scalars(
        whole[0]
    )
    assert list(tmp_path.glob(".checkpoint-*")) == []


def test_two_runs_in_one_folder(tmp_path) -> None:
    process = start_process(tmp_path, 60, 0)
    try:
        wait_for_step(process, 0)
        size = (tmp_path / "events.jsonl").stat().st_size
        with pytest.raises(BusyError) as caught:
            train(tmp_path, 60, resume=True)
        assert f"kill {process.pid}" in (caught.value.hint or "")
        assert (tmp_path / "events.jsonl").stat().st_size >= size
    finally:
        process.kill()
        process.communicate()
