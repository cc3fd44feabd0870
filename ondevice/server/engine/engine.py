"""The engine: requests to the model wait in one queue, and those that wait together run together.

The model is in a process of its own, `server.engine.process`, which answers up to `ROWS` requests
at a time, token by token. A thread of the daemon starts requests in a fair order, and another one
reads what the process says; a route waits for an `Answer` in its event loop, and holds no thread.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

from ondevice.core.errors import BusyError, OndeviceError, TrainingError
from ondevice.core.process import python_command
from ondevice.server.engine.answer import Answer, Unread
from ondevice.server.engine.fair import FairQueue, QueueFullError
from ondevice.server.helper import IDLE_S, TIMEOUT_S, rebuild_error
from ondevice.server.worker import child_environment

_log = logging.getLogger(__name__)
ROWS = 16
"""Requests that run at once."""
ROWS_OF_ONE = 8
"""Requests of one client that run at once, so that another client's need not wait for an end."""
WAITING = 1000
WAITING_OF_ONE = 500
"""Requests that may wait, of all clients and of one."""
LONGEST_RETRY_S = 60
ENDING_S = 10.0
"""Seconds in which a process that has closed its pipe may end by itself."""


class Engine:
    """Answers requests with a model, one model at a time.

    Args:
        running_job: describes the job that runs now, for the check of memory; None without one.
        timeout_s: seconds without a sign of life after which the process is killed.
        idle_s: idle seconds after which the process is ended.
    """

    def __init__(
        self,
        running_job: Callable[[], dict[str, Any] | None] = lambda: None,
        timeout_s: float = TIMEOUT_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self.running_job = running_job
        self.timeout_s = timeout_s
        self.idle_s = idle_s
        self._changed = threading.Condition()
        self._waiting: FairQueue[Answer] = FairQueue(WAITING, WAITING_OF_ONE)
        self._active: dict[int, Answer] = {}
        self._left: deque[int] = deque()
        """Active requests that were cancelled; the process does not know it yet."""
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._heard = time.monotonic()
        self._ended = deque([time.monotonic()], maxlen=20)
        """Times at which the last requests ended."""
        self._closed = False

    def ask(self, client: str, call: str, requests: Iterable[dict[str, Any]]) -> list[Answer]:
        """Queue requests, all or none; call this in an event loop.

        Args:
            client: whose they are; clients take turns.
            call: `complete` or `predict`.
            requests: arguments of `Completion` or of `Work._take_rows`, with `model`, `artifact` and `adapter`.

        Raises:
            QueueFullError: there is no room for them.
            BusyError: the daemon stops.
        """
        unread = Unread()
        answers = [Answer(client, call, one, self._leave, unread) for one in requests]
        with self._changed:
            if self._closed:
                raise _stops()
            try:
                self._waiting.check_room(client, len(answers))
            except QueueFullError as error:
                error.retry_after_s = self._retry_after_s()
                raise
            for answer in answers:
                self._number += 1
                answer.number = self._number
                self._waiting.add(client, answer)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return answers

    def figures(self) -> dict[str, int]:
        """Return how many requests wait and run."""
        with self._changed:
            return {"waiting": len(self._waiting), "running": len(self._active)}

    def tidy(self) -> None:
        """End the process if it has been idle for long, or gives no sign of life."""
        self.end_if_idle(self.idle_s)
        with self._changed:
            is_hung = self._active and time.monotonic() - self._heard > self.timeout_s
        if is_hung:
            _log.error("the model's process gave no sign of life for %g s", self.timeout_s)
            _kill(self._process)

    def end_if_idle(self, idle_s: float = 0.0) -> None:
        """End the process if it has been idle for `idle_s` seconds."""
        with self._changed:
            is_busy = self._active or len(self._waiting) > 0
            if is_busy or time.monotonic() - self._heard < idle_s:
                return
            process = self._process
            self._process = None
        _end(process)

    def close(self) -> None:
        """End the process and all requests."""
        with self._changed:
            self._closed = True
            process = self._process
            self._process = None
            for answer in [*self._waiting, *self._active.values()]:
                answer.put(_stops())
            self._active.clear()
            self._changed.notify_all()
        _end(process)

    def _leave(self, answer: Answer) -> None:
        """Forget a request, or end it at its next token if it runs."""
        with self._changed:
            if not self._waiting.remove(answer.client, answer) and answer.number in self._active:
                self._left.append(answer.number)
            self._changed.notify_all()

    def _retry_after_s(self) -> int:
        """Return seconds until a place in the queue is likely to be free, by the last answers."""
        each_s = (time.monotonic() - self._ended[0]) / len(self._ended)
        return max(1, min(LONGEST_RETRY_S, round(each_s)))

    def _run(self) -> None:
        """Start requests and cancel them, until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._left or self._next_client())
                if self._closed:
                    return
                started = self._take()
                left = [*self._left]
                self._left.clear()
            try:
                self._send(started, left)
            except Exception as error:  # without this thread no request would ever end
                _log.exception("cannot reach the model's process")
                self._lost(self._process, error)

    def _next_client(self) -> str | None:
        """Return the client whose next request can start now."""
        own = Counter(answer.client for answer in self._active.values())
        return self._waiting.find(lambda client: own[client] < ROWS_OF_ONE, self._fits)

    def _take(self) -> list[Answer]:
        """Move the requests that can start now to the active ones."""
        started = []
        while (client := self._next_client()) is not None:
            answer = self._waiting.take(client)
            if not self._active:
                self._heard = time.monotonic()
            self._active[answer.number] = answer
            started.append(answer)
        return started

    def _fits(self, answer: Answer) -> bool:
        """Return True if a request can run together with the active ones."""
        first = next(iter(self._active.values()), None)
        if first is None:
            return True
        is_full = answer.one_at_a_time or len(self._active) >= ROWS
        return answer.place == first.place and not is_full

    def _send(self, started: list[Answer], left: list[int]) -> None:
        lines = [json.dumps({"cancel": number}) for number in left]
        if started:
            process = self._started()
            job = self.running_job()
            for answer in started:
                arguments = answer.arguments | {"job": job}
                call = {"id": answer.number, "call": answer.call, "arguments": arguments}
                lines.append(json.dumps(call))
        else:
            process = self._process
        if process is None or process.stdin is None or not lines:
            return
        process.stdin.write("".join(f"{line}\n" for line in lines).encode())
        process.stdin.flush()

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process, started if need be; only the engine's thread starts one."""
        if self._process is not None:
            return self._process
        process = subprocess.Popen(
            python_command("-m", "ondevice.server.engine.process", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=child_environment(),
        )
        with self._changed:
            self._process = process
        threading.Thread(target=self._read, args=(process,), daemon=True).start()
        if self._closed:
            _end(process)
        return process

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what a process says until it ends."""
        assert process.stdout is not None  # noqa: S101  it is a pipe
        error: Exception | None = None
        try:
            for line in process.stdout:
                self._pass_on(json.loads(line))
        except (OSError, ValueError) as problem:
            error = problem
        self._lost(process, error or OSError(f"exit status {_own_end(process)}"))

    def _pass_on(self, message: dict[str, Any]) -> None:
        with self._changed:
            self._heard = time.monotonic()
            answer = self._active.get(message["id"])
            if answer is None:
                return
            if "part" not in message:
                del self._active[message["id"]]
                self._ended.append(time.monotonic())
                self._changed.notify_all()
        if "error" in message:
            answer.put(rebuild_error(message["error"]))
        else:
            answer.put(message)

    def _lost(self, process: subprocess.Popen[bytes] | None, error: Exception) -> None:
        """Fail the requests of a process that has died; those that wait get another one."""
        with self._changed:
            if process is not self._process:
                return
            self._process = None
            failed = [*self._active.values()]
            self._active.clear()
            self._left.clear()
            self._changed.notify_all()
        _end(process)
        for answer in failed:
            answer.put(
                TrainingError(
                    f"the model's process ended without a reply: {error}",
                    hint="it may have run out of memory; the daemon's log has more",
                )
            )


def _stops() -> OndeviceError:
    return BusyError("the daemon stops", hint="try again once it is back")


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _own_end(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit status of a process that has closed its pipe; a kill would hide its own."""
    try:
        return process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        return _end(process)


def _end(process: subprocess.Popen[bytes] | None) -> int | None:
    """Kill a process, and return its exit status."""
    if process is None:
        return None
    _kill(process)
    if process.stdin is not None:
        try:
            process.stdin.close()
        except OSError:
            pass
    return process.wait()
