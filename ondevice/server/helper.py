"""Processes beside the daemon for what needs a framework: plans, previews, validation, answers of a model.

The daemon itself loads neither torch nor transformers. A helper starts when it is first asked, answers one call at
a time, and ends when nobody has asked for a while, so that its memory is there for training. Both ends of the pipe are
here: `Helper` in the daemon, and `main` in the process, `python -m ondevice.server.helper DAEMON_PID`, with one JSON
object a line in and one out.

A call that reads what somebody uploaded has a limit of memory, which the kernel keeps: a file that would take more is
refused with a sentence, and the process ends, so that the next call begins with a small one.
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
"""Rows of a file that a preview reads: to tokenize all of a large one takes minutes."""
PROBLEMS = 100
"""Bad rows that an answer names."""


class Helper:
    """One process that answers `CALLS`.

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
        self._ahead = b""
        self._closed = False

    def __call__(self, call: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer. A call that takes long sends signs of life: each begins its time anew.

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
                self._write(process, {"call": call, "arguments": arguments})
                while "part" in (answer := self._read(process)):
                    pass
            except (OSError, ValueError) as error:
                self._kill()
                raise self._died(error) from None
            if answer.get("ends"):
                self._kill()
        finally:
            self._used = time.monotonic()
            self._lock.release()
        return self._value(answer)

    def stream(self, call: str, **arguments: Any) -> Generator[Any, None, Any]:
        """Ask for an answer that comes in parts; yield each, and return the value. The helper is busy until then.

        A reader that stops early (`close`) ends the answer at its next token, and the model stays loaded.

        Raises:
            OndeviceError, BusyError, TrainingError: as asking does, before the first part or behind any.
        """
        if not self._lock.acquire(timeout=QUEUE_S):
            raise BusyError(f"the {self.name} helper is busy", hint="try again in a minute")
        ended = False
        try:
            process = self._started()
            try:
                self._write(process, {"call": call, "arguments": arguments})
                while "part" in (answer := self._read(process)):
                    yield answer["part"]
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
        return self._value(answer)

    def _value(self, answer: dict[str, Any]) -> Any:
        if "error" in answer:
            raise rebuild_error(answer["error"])
        return answer["value"]

    def _cut_short(self) -> None:
        """End an answer that nobody reads any more."""
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
        """Give the memory back when nobody has asked for `idle_s` seconds (None: its own); a call is not disturbed."""
        waited_s, least_s = time.monotonic() - self._used, self.idle_s if idle_s is None else idle_s
        if self._process is not None and waited_s > least_s and self._lock.acquire(False):
            try:
                self._kill()
            finally:
                self._lock.release()

    def interrupt(self) -> None:
        """End the process under a call, which then raises TrainingError; the pipes are that call's to close."""
        process = self._process
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """End the process, whatever it does; who waits for it starts no other."""
        self._closed = True
        self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise BusyError("the daemon stops", hint="ask again once it is back")
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
            f"the {self.name} helper ended without an answer: {error}",
            hint="it may have run out of memory; the daemon's log has more",
        )

    def _write(self, process: subprocess.Popen[bytes], question: dict[str, Any]) -> None:
        if process.stdin is None:
            raise OSError("no pipe")
        self._ahead = b""
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Return the next line; what has arrived behind it is kept for the next call."""
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
                raise OSError(f"no answer in {self.timeout_s:g} s")
            # Not `select`, which refuses the numbers of files that a daemon with a thousand connections has.
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
    """Rebuild an error of another process, of the class it had there."""
    kind = getattr(errors, str(values.get("error")), None)
    if not (isinstance(kind, type) and issubclass(kind, OndeviceError)):
        kind = OndeviceError
    return kind(
        str(values.get("message", "")), expected=values.get("expected"), received=values.get("received"),
        hint=values.get("try"),
    )  # fmt: skip


def plan(config: dict[str, Any], artifact: str | None) -> dict[str, Any]:
    """Plan a job: memory by part and time of a step, within its memory limit where it has one."""
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
    """Decode examples, with lengths and labels, by the model's tokenizer or the artifact's own."""
    from ondevice.artifact.manifest import read_manifest
    from ondevice.data import preview_rows
    from ondevice.data.readers.source import FROM_OUTSIDE
    from ondevice.data.reading import open_reading
    from ondevice.data.tasks.columns import parse_columns
    from ondevice.models import load_tokenizer, read_dims
    from ondevice.models.open import artifact_tokenizer

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
    """Read a model's sizes, its tokenizer and the shapes of its weights; raise ModelError if one cannot be."""
    from ondevice.models.open import dims_and_family, load_tokenizer
    from ondevice.models.sources.resolve import check_folder, check_weights

    dims, family = dims_and_family(folder, None)
    check_folder(Path(folder))
    check_weights(Path(folder), family.weight_shapes(dims))
    load_tokenizer(folder)
    return {"layers": dims.layers, "hidden": dims.hidden, "vocab": dims.vocab}


def choose(source: str) -> dict[str, str]:
    """Choose the method of a job that names none; whether a block is known may take a framework to find out."""
    from ondevice.models.choice import choose_method

    name, said = choose_method(source)
    return {"method": name, "said": said}


def generate(**arguments: Any) -> dict[str, Any]:
    """Answer a prompt: see `server.generate.answer`."""
    from ondevice.server.generate import answer

    return answer(**arguments)


def complete(**arguments: Any) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Answer in parts: see `server.complete`."""
    from ondevice.server.complete import complete as answer

    return answer(**arguments)


def convert(**arguments: Any) -> Generator[dict[str, str], None, dict[str, Any]]:
    """Convert an adapter, and say each stage: see `server.convert`."""
    from ondevice.server.convert import convert as write

    return write(**arguments)


ROWS_BYTES = 400 << 20
"""What checking rows may take. The process has 30 MiB before, and libraries' files take 60: 512 MiB hold all."""
TOKENIZER_BYTES = 2 << 30
"""What a call may take that loads a tokenizer, for which transformers imports PyTorch: both take 450 MiB."""
CALLS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "plan": (plan, None),  # opens the GPU, whose driver maps more than any limit
    "validate": (validate, ROWS_BYTES),
    "preview": (preview, TOKENIZER_BYTES),
    "check_model": (check_model, TOKENIZER_BYTES),
    "choose": (choose, TOKENIZER_BYTES),
    "generate": (
        generate,
        None,
    ),  # these three load a model, and are held against the memory that is free
    "complete": (complete, None),
    "convert": (convert, None),
}
"""The calls, and what each may take of memory that is not there for libraries' files, in bytes."""


def serve(source: Any, target: Any) -> None:
    """Answer until the other side closes, or until a call was refused memory."""
    global _alive
    _alive = partial(_send, target, {"part": None})
    at_start_bytes = status_bytes("RssAnon")
    for line in source:
        question = json.loads(line)
        call, limit = CALLS[question["call"]]
        try:
            with own_memory(None if limit is None else at_start_bytes + limit):
                value = call(**question["arguments"])
                answer = {
                    "value": _send_parts(value, target) if isinstance(value, Generator) else value
                }
        except OndeviceError as error:
            answer = {"error": error.to_dict()}
        except Exception as error:
            if limit is not None and was_refused(error):
                _send(
                    target, {"error": _too_large(question["call"], limit).to_dict(), "ends": True}
                )
                return
            answer = {"error": _unexpected(question["call"], error).to_dict()}
        _send(target, answer)


def _alive() -> None:
    """Send a sign of life in a long call; `serve` puts the function here that does."""


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
    """Return the error of a call that raised what is not one of ours."""
    if isinstance(error, (ValueError, OSError, RecursionError)):
        return DataError(f"{call}: {type(error).__name__}: {error}")
    import traceback

    traceback.print_exception(error)
    return TrainingError(f"{call} failed: {type(error).__name__}: {error}")


def _send(target: Any, answer: dict[str, Any]) -> None:
    target.write(json.dumps(answer).encode() + b"\n")
    target.flush()


def _send_parts(parts: Generator[Any, None, Any], target: Any) -> Any:
    """Write each part as a line of its own; return the value at the end."""
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return end.value
        _send(target, {"part": part})


def end_with(parent: int) -> None:
    """End when the daemon is gone.

    Polled, because the kernel's signal for it (PR_SET_PDEATHSIG) comes already when the thread ends that started us.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main(arguments: list[str]) -> int:
    """Run the process."""
    threading.Thread(target=end_with, args=(int(arguments[0]),), daemon=True).start()
    quiet_frameworks()
    # Freed memory goes back to the system: pyarrow's own pools keep it, and it would count against the limit.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    listen_for_stop()
    # Answers go to a copy of standard output, which itself becomes standard error: a library that prints there would
    # break the protocol.
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
