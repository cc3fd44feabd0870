"""Processes beside the daemon for what needs a framework: plans, previews, validation, answers of a model.

The daemon itself loads neither torch nor transformers. A helper starts when it is first asked, answers one call at
a time, and ends when nobody has asked for a while, so that its memory is there for training.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from ondevice import errors
from ondevice.errors import BusyError, OndeviceError, TrainingError
from ondevice.server.supervisor import worker_environment

_log = logging.getLogger(__name__)
IDLE_S = 120.0
TIMEOUT_S = 300.0
QUEUE_S = 60.0
MAX_ANSWER_BYTES = 64 << 20


class Helper:
    """One process that answers calls of `helper_process.CALLS`.

    Args:
        name: for the log.
        timeout_s: how long one call may take before the process is killed.
        idle_s: how long it waits for the next call before it is ended.
    """

    def __init__(self, name: str, timeout_s: float = TIMEOUT_S, idle_s: float = IDLE_S) -> None:
        self.name, self.timeout_s, self.idle_s = name, timeout_s, idle_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._used = time.monotonic()

    def __call__(self, call: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer.

        Raises:
            OndeviceError: what the call raised, as it was there.
            BusyError: earlier calls have not ended.
            TrainingError: the process died or took too long.
        """
        if not self._lock.acquire(timeout=QUEUE_S):
            raise BusyError(f"the {self.name} helper is busy", hint="try again in a minute")
        try:
            process = self._started()
            try:
                answer = self._exchange(process, {"call": call, "arguments": arguments})
            except (OSError, ValueError) as error:
                self._kill()
                raise TrainingError(
                    f"the {self.name} helper ended without an answer: {error}",
                    hint="it may have run out of memory; the daemon's log has more",
                ) from None
        finally:
            self._used = time.monotonic()
            self._lock.release()
        if "error" in answer:
            raise told(answer["error"])
        return answer["value"]

    def end_if_idle(self, idle_s: float | None = None) -> None:
        """Give the memory back when nobody has asked for `idle_s` seconds (None: its own); a call is not disturbed."""
        waited_s, least_s = time.monotonic() - self._used, self.idle_s if idle_s is None else idle_s
        if self._process is not None and waited_s > least_s and self._lock.acquire(False):
            try:
                self._kill()
            finally:
                self._lock.release()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ondevice.server.helper_process", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=worker_environment(),
            )
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], question: dict[str, Any]) -> dict[str, Any]:
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipe")
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        deadline, content, source = time.monotonic() + self.timeout_s, bytearray(), process.stdout.fileno()
        while not content.endswith(b"\n"):
            if len(content) > MAX_ANSWER_BYTES or (left := deadline - time.monotonic()) <= 0:
                raise OSError(f"no answer in {self.timeout_s:g} s")
            if select.select([source], [], [], min(left, 1.0))[0]:
                chunk = os.read(source, 1 << 20)
                if not chunk:
                    raise OSError(f"exit status {process.wait(10)}")
                content += chunk
        return json.loads(content)

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
        process.wait()


def told(values: dict[str, Any]) -> OndeviceError:
    """An error of another process, of the class it had there."""
    kind = getattr(errors, str(values.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, OndeviceError)):
        kind = OndeviceError
    return kind(
        str(values.get("message", "")), expected=values.get("expected"), received=values.get("received"),
        hint=values.get("try"),
    )  # fmt: skip
