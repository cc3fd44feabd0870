"""How long the engine's threads wait for each other, and what they say when it is too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from ondevice.core.errors import StorageError, TrainingError
from ondevice.offload.worker import Watch, Worker


def test_a_wait_goes_on_for_as_long_as_other_work_of_the_engine_ends() -> None:
    watch = Watch(0.6)
    worker = Worker("update", watch)
    try:
        for number in range(8):
            worker.submit(f"layer {number}", lambda: time.sleep(0.2))
        last = worker.submit("layer 8", lambda: "done")
        assert last.wait() == "done"
    finally:
        worker.close()


def test_a_wait_times_out_if_the_engine_makes_no_progress() -> None:
    watch, released = Watch(0.5), threading.Event()
    worker = Worker("update", watch)
    try:
        worker.submit("layer 0", released.wait)
        with pytest.raises(TrainingError) as caught:
            worker.submit("layer 1", lambda: None).wait()
        assert caught.value.message.startswith("update of layer 1 ")
        assert "update of layer 0 running for" in str(caught.value.received)
    finally:
        released.set()
        worker.close()


def test_a_wait_without_a_running_thread_blames_the_engine() -> None:
    with pytest.raises(TrainingError) as caught:
        Watch(0.3).until(threading.Event().wait, "the update of layer 2")
    assert caught.value.message.startswith("the update of layer 2 ")
    assert caught.value.received == "no thread of the engine is at work"
    assert "report" in str(caught.value.hint)


def test_a_task_blocked_by_a_device_lane_is_named() -> None:
    watch, reached = Watch(0.5), threading.Event()

    def block() -> None:
        reached.wait()

    worker = Worker("update", watch)
    try:
        task = worker.submit("layer 1", lambda: None, ready=reached.is_set, block=block)
        with pytest.raises(TrainingError) as caught:
            task.wait()
        assert "update of layer 1 waiting for the device" in str(caught.value.received)
    finally:
        reached.set()
        assert worker.close()


def test_a_thread_retries_its_only_task_until_it_is_ready() -> None:
    looks: list[float] = []

    def ready() -> bool:
        looks.append(time.monotonic())
        return time.monotonic() - looks[0] > 1.0

    worker = Worker("offload", Watch(10.0))
    try:
        assert worker.submit("the end", lambda: "done", ready=ready).wait() == "done"
        assert len(looks) < 50
    finally:
        worker.close()


@pytest.mark.skipif(os.name != "posix", reason="stops a process")
def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    code = """
import time
from ondevice.offload.worker import Watch, Worker

def layer():
    print("begun", flush=True)
    for _ in range(10):
        time.sleep(0.1)
    return "done"

print(Worker("update", Watch(5.0)).submit("layer 0", layer).wait(), flush=True)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(7.0)
        os.kill(process.pid, signal.SIGCONT)
        out, errors = process.communicate(timeout=60)
    assert (out, process.returncode) == ("done\n", 0), errors


def test_a_transfer_that_never_ends_is_given_up_by_name() -> None:
    future: Future[None] = Future()
    with pytest.raises(TrainingError) as caught:
        Watch(0.3).result(future, "read of layer 3")
    assert caught.value.message.startswith("read of layer 3 ")
    failure = StorageError("the drive is on fire")
    future.set_exception(failure)
    with pytest.raises(StorageError) as raised:
        Watch(0.3).result(future, "read of layer 3")
    assert raised.value is failure


def test_nothing_runs_after_half_finished_work() -> None:
    watch = Watch(1.0)
    with pytest.raises(KeyboardInterrupt), watch.whole("a step"):
        raise KeyboardInterrupt
    with pytest.raises(TrainingError) as caught:
        watch.check()
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)
    assert "resume" in str(caught.value.hint)
