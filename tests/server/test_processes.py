"""What becomes of a job's process and of the helper."""

from __future__ import annotations

import subprocess
import threading
import time

import pytest

from ondevice.core.errors import (
    DoesNotFitError,
    TrainingError,
)
from ondevice.server.helper import Helper
from ondevice.server.worker_process import Running, judge, over_memory


@pytest.mark.parametrize(
    ("code", "asked", "told", "outcome"),
    [
        (0, "", None, "finished"),
        (130, "", None, "interrupted"),
        (-15, "paused", None, "interrupted"),
        (-9, "paused", None, "interrupted"),
        (-9, "", None, "crashed"),
        (-11, "", None, "crashed"),
        (1, "", None, "crashed"),
        (2, "", {"error": "ConfigError", "exit_code": 2}, "refused"),
        (9, "", {"error": "TrainingError", "exit_code": 9}, "refused"),
        (7, "", {"error": "BusyError", "exit_code": 7}, "crashed"),
        (11, "", {"error": "StorageError", "exit_code": 11}, "crashed"),
        (8, "", {"error": "DoesNotFitError", "exit_code": 8}, "refused"),
        (8, "", {"error": "DoesNotFitError", "exit_code": 8, "again": True}, "crashed"),
        (1, "", {"error": "ConfigError", "exit_code": 2}, "crashed"),
    ],
)
def test_what_an_exit_status_means(code: int, asked: str, told, outcome: str) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    running = Running("job-1", process, {}, asked=asked)
    actual, error = judge(code, running, told)
    assert actual == outcome and (error is None) == (outcome in ("finished", "interrupted"))
    running.over = over_memory(1 << 30, None)
    actual, error = judge(code, running, told)
    if code == 0:  # all steps are done
        assert (actual, error) == ("finished", None)
    else:
        assert (
            actual == "refused" and error is not None and error["error"] == DoesNotFitError.__name__
        )


def test_a_helper_imports_nothing_from_the_folder_it_is_started_in(tmp_path, monkeypatch) -> None:
    """What lies where the daemon was started, uploads perhaps, must not run as its code."""
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    for name in ("json", "pydantic", "yaml"):
        (tmp_path / f"{name}.py").write_text("open(__file__ + ' ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    helper = Helper("test", timeout_s=120)
    try:
        assert helper("validate", file=str(tmp_path / "rows.jsonl"), task=None)["rows"] == 1
    finally:
        helper.close()
    assert not [*tmp_path.glob("* ran")]


def test_a_helper_that_dies_or_hangs_is_replaced(tmp_path) -> None:
    helper = Helper("test", timeout_s=120, idle_s=0.0)
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    try:
        asked = {"file": str(tmp_path / "rows.jsonl"), "task": None}
        assert helper("validate", **asked)["rows"] == 1
        process = helper._process
        assert process is not None
        answers: list[int] = []
        for _ in range(2):  # the thread that starts it may end, as those of a web server do
            thread = threading.Thread(
                target=lambda: answers.append(helper("validate", **asked)["rows"])
            )
            thread.start()
            thread.join()
            time.sleep(0.2)
            if len(answers) == 1:
                process.kill()
                process.wait()
        assert answers == [1, 1] and helper._process is not None and helper._process.poll() is None
        process = helper._process
        process.kill()
        process.wait()
        assert helper("validate", **asked)["rows"] == 1
        helper.timeout_s = 0.0
        with pytest.raises(TrainingError):
            helper("validate", **asked)
        helper.timeout_s = 120
        assert helper("validate", **asked)["rows"] == 1
        time.sleep(0.01)
        helper.end_if_idle()
        assert helper._process is None
    finally:
        helper.close()
