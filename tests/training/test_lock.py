"""Two runs in one folder."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ondevice.core.errors import BusyError
from ondevice.training.checkpoint import FILE_NAME, RunLock

HOLD = """
import sys, pathlib
from ondevice.training.checkpoint import RunLock
with RunLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_told_who_holds_the_folder_and_a_dead_one_holds_nothing(tmp_path) -> None:
    folder = tmp_path / "new" / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdin is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BusyError) as caught:
            with RunLock(folder):
                pytest.fail("two runs in one folder")
        assert f"kill {holder.pid}`" in (caught.value.hint or "")
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    assert (folder / FILE_NAME).read_text() == f"{holder.pid}\n"  # stale: nobody took it away
    with RunLock(folder):
        assert (folder / FILE_NAME).read_text() == f"{os.getpid()}\n"


def test_one_process_cannot_take_a_folder_twice_and_can_take_it_again(tmp_path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(BusyError) as caught:
            with RunLock(tmp_path):
                pytest.fail("taken twice")
        assert f"kill {os.getpid()}`" in (caught.value.hint or "")
    with RunLock(tmp_path):
        pass


def test_a_process_that_is_just_being_forked_holds_nothing(tmp_path) -> None:
    """Between fork and exec a child has every open file; Ray starts processes while a fleet's folder is let go."""
    with RunLock(tmp_path) as lock:
        kept = os.dup(lock._file)  # what a fork does: the same open file once more
    try:
        with RunLock(tmp_path):
            pass
    finally:
        os.close(kept)
