"""Helper processes of the daemon for what needs a framework: plans, previews, conversions. The
engine has its own.

The daemon itself loads neither torch nor transformers. A helper process starts at its first call,
runs one call at a time, and ends when it has been idle for a while, so that training gets its
memory. The process is `python -m ondevice.server.helper_process DAEMON_PID`, with one JSON object
per line in each direction.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Generator
from typing import Any

from ondevice.core import errors
from ondevice.core.errors import BusyError, OndeviceError, TrainingError
from ondevice.core.process import python_command
from ondevice.server.worker import child_environment

_log = logging.getLogger(__name__)
IDLE_S = 120.0
TIMEOUT_S = 300.0
QUEUE_S = 60.0
MAX_ANSWER_BYTES = 64 << 20


class Helper:
    """One helper process, which runs the `CALLS` of `helper_process`.

    Args:
        name: for the log.
        timeout_s: seconds without a sign of life after which the process is killed.
        idle_s: idle seconds after which the process is ended.
    """

    def __init__(self, name: str, timeout_s: float = TIMEOUT_S, idle_s: float = IDLE_S) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self.idle_s = idle_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._used = time.monotonic()
        self._ahead = b""
        self._closed = False

    def __call__(self, call: str, **arguments: Any) -> Any:
        """Run a call, and wait for its value. Each sign of life of a long call restarts the
        timeout.

        Raises:
            OndeviceError: the call raised it.
            BusyError: earlier calls have not ended.
            TrainingError: the process died or took too long.
        """
        if not self._lock.acquire(timeout=QUEUE_S):
            raise BusyError(f"the {self.name} helper is busy", hint="try again in a minute")
        try:
            process = self._started()
            try:
                self._write(process, {"call": call, "arguments": arguments})
                while "part" in (reply := self._read(process)):
                    pass
            except (OSError, ValueError) as error:
                self._kill()
                raise self._died(error) from None
            if reply.get("ends"):
                self._kill()
        finally:
            self._used = time.monotonic()
            self._lock.release()
        return self._value(reply)

    def stream(self, call: str, **arguments: Any) -> Generator[Any, None, Any]:
        """Run a call that yields parts; yield each, and return its value. The helper is busy until
        then, and a reader that stops early (`close`) ends the process.

        Raises:
            OndeviceError, BusyError, TrainingError: as `__call__`, before the first part or after
                any.
        """
        if not self._lock.acquire(timeout=QUEUE_S):
            raise BusyError(f"the {self.name} helper is busy", hint="try again in a minute")
        ended = False
        try:
            process = self._started()
            try:
                self._write(process, {"call": call, "arguments": arguments})
                while "part" in (reply := self._read(process)):
                    yield reply["part"]
                ended = True
            except (OSError, ValueError) as error:
                raise self._died(error) from None
        finally:
            if not ended:
                self._kill()
            self._used = time.monotonic()
            self._lock.release()
        return self._value(reply)

    def _value(self, reply: dict[str, Any]) -> Any:
        if "error" in reply:
            raise rebuild_error(reply["error"])
        return reply["value"]

    def end_if_idle(self, idle_s: float | None = None) -> None:
        """End the process if it has been idle for `idle_s` seconds (None: its own limit)."""
        waited_s = time.monotonic() - self._used
        least_s = self.idle_s if idle_s is None else idle_s
        if self._process is not None and waited_s > least_s and self._lock.acquire(False):
            try:
                self._kill()
            finally:
                self._lock.release()

    def interrupt(self) -> None:
        """Kill the process during a call, which then raises TrainingError and closes the pipes."""
        process = self._process
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """End the process at once; waiting callers do not start another."""
        self._closed = True
        self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise BusyError("the daemon stops", hint="try again once it is back")
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                python_command("-m", "ondevice.server.helper_process", str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=child_environment(),
            )
        return self._process

    def _died(self, error: Exception) -> TrainingError:
        return TrainingError(
            f"the {self.name} helper process ended without a reply: {error}",
            hint="it may have run out of memory; the daemon's log has more",
        )

    def _write(self, process: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
        if process.stdin is None:
            raise OSError("no pipe")
        self._ahead = b""
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Return the next line; bytes after it are kept for the next read."""
        if process.stdout is None:
            raise OSError("no pipe")
        deadline = time.monotonic() + self.timeout_s
        content = bytearray(self._ahead)
        source = process.stdout.fileno()
        waiting = select.poll()
        while (end := content.find(b"\n")) < 0:
            if len(content) > MAX_ANSWER_BYTES or (left := deadline - time.monotonic()) <= 0:
                raise OSError(f"no reply within {self.timeout_s:g} s")
            # Not `select`, which refuses file numbers above 1023.
            waiting.register(source, select.POLLIN)
            if waiting.poll(min(left, 1.0) * 1000):
                chunk = os.read(source, 1 << 20)
                if not chunk:
                    raise OSError(f"exit status {process.wait(10)}")
                content += chunk
        self._ahead = bytes(content[end + 1 :])
        return json.loads(content[:end])

    def _kill(self) -> None:
        process = self._process
        self._process = None
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


def rebuild_error(values: dict[str, Any]) -> OndeviceError:
    """Rebuild an error of another process, with its class."""
    kind = getattr(errors, str(values.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, OndeviceError)):
        kind = OndeviceError
    return kind(
        str(values.get("message", "")), expected=values.get("expected"), received=values.get("received"),
        hint=values.get("try"),
    )  # fmt: skip
