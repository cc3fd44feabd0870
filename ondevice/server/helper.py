"""Helper processes of the daemon for everything that needs a framework: plans, previews,
generation.

The daemon itself loads neither torch nor transformers. A helper process starts at its first call,
runs one call at a time, and ends when it has been idle for a while, so that training gets its
memory. Both ends of the pipe are here: `Helper` in the daemon, and `main` in the process, `python
-m ondevice.server.helper DAEMON_PID`, with one JSON object per line in each direction.

A call that reads an uploaded file has a memory limit, which the kernel enforces. A file that needs
more is refused with an error, and the process ends, so that the next call starts with a small one.
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
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

from ondevice.core import errors
from ondevice.core.child import python_command
from ondevice.core.errors import BusyError, DataError, OndeviceError, TrainingError
from ondevice.planning.limit import own_memory, status_bytes, was_refused
from ondevice.server.interrupt import STOP, listen_for_stop
from ondevice.server.worker import child_environment, quiet_frameworks

_log = logging.getLogger(__name__)
IDLE_S = 120.0
TIMEOUT_S = 300.0
QUEUE_S = 60.0
MAX_ANSWER_BYTES = 64 << 20
PREVIEW_ROWS = 20_000
"""Most rows that a preview reads: tokenizing a large file takes minutes."""
PROBLEMS = 100
"""Most bad rows that a response names."""


class Helper:
    """One helper process, which runs `CALLS`.

    Args:
        name: for the log.
        timeout_s: seconds without a sign of life after which the process is killed.
        idle_s: idle seconds after which the process is ended.
    """

    def __init__(self, name: str, timeout_s: float = TIMEOUT_S, idle_s: float = IDLE_S) -> None:
        self.name, self.timeout_s, self.idle_s = name, timeout_s, idle_s
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
        then.

        A reader that stops early (`close`) ends the call at its next token; the model stays loaded.

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
                self._kill()
                ended = True
                raise self._died(error) from None
        finally:
            if not ended:
                self._cut_short()
            self._used = time.monotonic()
            self._lock.release()
        return self._value(reply)

    def _value(self, reply: dict[str, Any]) -> Any:
        if "error" in reply:
            raise rebuild_error(reply["error"])
        return reply["value"]

    def _cut_short(self) -> None:
        """End a call whose parts nobody reads any more."""
        process = self._process
        if process is None:
            return
        try:
            process.send_signal(STOP)
            while "part" in self._read(process):
                pass
        except (OSError, ValueError):
            self._kill()

    def end_if_idle(self, idle_s: float | None = None) -> None:
        """End the process if it has been idle for `idle_s` seconds (None: its own limit)."""
        waited_s, least_s = time.monotonic() - self._used, self.idle_s if idle_s is None else idle_s
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
                python_command("-m", "ondevice.server.helper", str(os.getpid())),
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
        deadline, content, source = (
            time.monotonic() + self.timeout_s,
            bytearray(self._ahead),
            process.stdout.fileno(),
        )
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


def rebuild_error(values: dict[str, Any]) -> OndeviceError:
    """Rebuild an error of another process, with its class."""
    kind = getattr(errors, str(values.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, OndeviceError)):
        kind = OndeviceError
    return kind(
        str(values.get("message", "")), expected=values.get("expected"), received=values.get("received"),
        hint=values.get("try"),
    )  # fmt: skip


def plan(config: dict[str, Any], artifact: str | None) -> dict[str, Any]:
    """Plan a job: memory by part and time per step, within its memory limit if it has one."""
    from ondevice.api.runfile import RunConfig
    from ondevice.artifact.manifest import read_manifest
    from ondevice.planning.artifacts import plan_artifact
    from ondevice.planning.devices import place
    from ondevice.planning.estimate import plan_run
    from ondevice.planning.render import MEANING

    run = RunConfig.parse(config, "job")
    if artifact is None:
        from ondevice.training.length import with_length

        run, _ = with_length(run)
    if artifact is not None:
        folder = Path(artifact)
        planned = plan_artifact(folder, read_manifest(folder), run.train.memory_limit_bytes)
    else:
        planned = plan_run(run, place(run))
    parts = planned.parts | planned.host_parts
    return planned.to_dict() | {"meaning": {part: MEANING.get(part, "") for part in parts}}


def validate(file: str, task: str | None, columns: dict[str, str] | None = None) -> dict[str, Any]:
    """Check every row; return format, counts, and line, field and reason of the first bad rows."""
    from ondevice.data.readers.source import FROM_OUTSIDE
    from ondevice.data.reading import check_rows

    checked = check_rows(
        file, task=task, columns=columns, limits=FROM_OUTSIDE, most_problems=PROBLEMS, alive=_alive
    )
    name = Path(file).name
    problems = [problem.to_dict() | {"file": name} for problem in checked.problems]
    return {
        "format": checked.format,
        "rows": checked.rows,
        "bad_rows": checked.bad_rows,
        "problems": problems,
    }


def preview(
    file: str,
    model: str | None,
    task: str | None,
    max_length_tokens: int | None,
    train_on_prompt: bool,
    rows: int,
    artifact: str | None = None,
    columns: list[str] | None = None,
    strict_columns: bool = False,
) -> dict[str, Any]:
    """Decode examples, with lengths and labels, by the tokenizer of the model or the artifact."""
    from ondevice.artifact.manifest import read_manifest
    from ondevice.data import preview_rows
    from ondevice.data.readers.source import FROM_OUTSIDE
    from ondevice.data.reading import open_reading
    from ondevice.data.tasks.columns import parse_columns
    from ondevice.models import load_tokenizer, read_dims
    from ondevice.models.load import artifact_tokenizer

    if artifact is None:
        tokenizer, vocabulary = load_tokenizer(str(model)), read_dims(str(model)).vocab
    else:
        tokenizer = artifact_tokenizer(Path(artifact))
        vocabulary = read_manifest(Path(artifact)).model.dims.get("vocab")
    named = parse_columns(columns or ())
    read = open_reading(
        file, task=task, columns=named, limits=FROM_OUTSIDE, most_records=PREVIEW_ROWS, alive=_alive
    )  # fmt: skip
    shown = preview_rows(
        read,
        tokenizer,
        max_length_tokens,
        train_on_prompt,
        rows,
        PROBLEMS,
        strict_columns,
        vocabulary,
    )
    return shown.to_dict() | {"file": Path(file).name}


def check_model(folder: str) -> dict[str, Any]:
    """Check a model's sizes, tokenizer and shapes of weights; raise ModelError for a bad one."""
    from ondevice.models.load import dims_and_family, load_tokenizer
    from ondevice.models.sources.resolve import check_folder, check_weights

    dims, family = dims_and_family(folder, None)
    check_folder(Path(folder))
    check_weights(Path(folder), family.weight_shapes(dims))
    load_tokenizer(folder)
    return {"layers": dims.layers, "hidden": dims.hidden, "vocab": dims.vocab}


def choose(source: str) -> dict[str, str]:
    """Choose the method of a job that names none. This may need a framework to inspect a block."""
    from ondevice.models.choice import choose_method

    name, said = choose_method(source)
    return {"method": name, "said": said}


def generate(**arguments: Any) -> dict[str, Any]:
    """Generate with and without an adapter: see `server.generate.answer`."""
    from ondevice.server.generate import answer

    return answer(**arguments)


def complete(**arguments: Any) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Generate in parts: see `server.complete`."""
    from ondevice.server.complete import complete as answer

    return answer(**arguments)


def convert(**arguments: Any) -> Generator[dict[str, str], None, dict[str, Any]]:
    """Convert an adapter, and yield each stage: see `server.convert`."""
    from ondevice.server.convert import convert as write

    return write(**arguments)


ROWS_BYTES = 400 << 20
"""Memory for checking rows; with the process and its libraries it stays below 512 MiB."""
TOKENIZER_BYTES = 2 << 30
"""Memory for a call that loads a tokenizer: transformers imports PyTorch, and both take 450 MiB."""
CALLS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "plan": (plan, None),  # opens the GPU, whose driver maps more memory than any limit
    "validate": (validate, ROWS_BYTES),
    "preview": (preview, TOKENIZER_BYTES),
    "check_model": (check_model, TOKENIZER_BYTES),
    "choose": (choose, TOKENIZER_BYTES),
    "generate": (generate, None),  # these three load a model, and check the free memory themselves
    "complete": (complete, None),
    "convert": (convert, None),
}
"""The calls, each with its limit of memory in bytes, without the files of libraries."""


def serve(source: Any, target: Any) -> None:
    """Run calls until the other side closes, or until a call was refused memory."""
    global _alive
    _alive = partial(_send, target, {"part": None})
    at_start_bytes = status_bytes("RssAnon")
    for line in source:
        request = json.loads(line)
        call, limit = CALLS[request["call"]]
        try:
            with own_memory(None if limit is None else at_start_bytes + limit):
                value = call(**request["arguments"])
                reply = {
                    "value": _send_parts(value, target) if isinstance(value, Generator) else value
                }
        except OndeviceError as error:
            reply = {"error": error.to_dict()}
        except Exception as error:
            if limit is not None and was_refused(error):
                _send(target, {"error": _too_large(request["call"], limit).to_dict(), "ends": True})
                return
            reply = {"error": _unexpected(request["call"], error).to_dict()}
        _send(target, reply)


def _alive() -> None:
    """Send a sign of life in a long call; `serve` replaces this function."""


def _too_large(call: str, limit: int) -> DataError:
    if call == "validate":
        hint = "write the rows as JSON lines, one row a line, or split the longest rows"
    else:
        hint = "a smaller file, or rows as JSON lines"
    return DataError(
        "the file needs too much memory to be read",
        expected=f"at most {limit >> 20} MiB in the helper process",
        received="more",
        hint=hint,
    )


def _unexpected(call: str, error: Exception) -> OndeviceError:
    """Return the error of a call that raised something other than an OndeviceError."""
    if isinstance(error, (ValueError, OSError, RecursionError)):
        return DataError(f"{call}: {type(error).__name__}: {error}")
    import traceback

    traceback.print_exception(error)
    return TrainingError(f"{call} failed: {type(error).__name__}: {error}")


def _send(target: Any, reply: dict[str, Any]) -> None:
    target.write(json.dumps(reply).encode() + b"\n")
    target.flush()


def _send_parts(parts: Generator[Any, None, Any], target: Any) -> Any:
    """Write each part on a separate line, and return the final value."""
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return end.value
        _send(target, {"part": part})


def end_with(parent: int) -> None:
    """End when the daemon is gone.

    It polls, because the kernel's PR_SET_PDEATHSIG fires when the thread that started it ends.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(arguments: list[str]) -> int:
    """Run the process."""
    threading.Thread(target=end_with, args=(int(arguments[0]),), daemon=True).start()
    quiet_frameworks()
    # Freed memory goes back to the system; pyarrow's pools would keep it, counted by the limit.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    listen_for_stop()
    # Replies go to a copy of standard output, which itself becomes standard error: a library that
    # prints there would break the protocol.
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
