"""Processes beside the daemon for what needs a framework: plans, previews, validation, answers of a model.

The daemon itself loads neither torch nor transformers. A helper starts when it is first asked, answers one call at
a time, and ends when nobody has asked for a while, so that its memory is there for training. Both ends of the pipe are
here: `Helper` in the daemon, and `main` in the process, `python -m ondevice.server.helper DAEMON_PID`, with one JSON
object a line in and one out.
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
from pathlib import Path
from typing import Any

from ondevice.core import errors
from ondevice.core.errors import BusyError, DataError, OndeviceError, TrainingError
from ondevice.server.complete import STOP, listen_for_stop
from ondevice.server.worker import child_environment, quiet_frameworks

_log = logging.getLogger(__name__)
IDLE_S = 120.0
TIMEOUT_S = 300.0
QUEUE_S = 60.0
MAX_ANSWER_BYTES = 64 << 20


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
                raise self._died(error) from None
        finally:
            self._used = time.monotonic()
            self._lock.release()
        if "error" in answer:
            raise rebuild_error(answer["error"])
        return answer["value"]

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
        """End the process, whatever it does."""
        self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                # -P: a module of the folder that the daemon was started in is not imported.
                [sys.executable, "-P", "-m", "ondevice.server.helper", str(os.getpid())],
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

    def _exchange(self, process: subprocess.Popen[bytes], question: dict[str, Any]) -> dict[str, Any]:
        self._write(process, question)
        return self._read(process)

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
        deadline, content, source = time.monotonic() + self.timeout_s, bytearray(self._ahead), process.stdout.fileno()
        while (end := content.find(b"\n")) < 0:
            if len(content) > MAX_ANSWER_BYTES or (left := deadline - time.monotonic()) <= 0:
                raise OSError(f"no answer in {self.timeout_s:g} s")
            if select.select([source], [], [], min(left, 1.0))[0]:
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
    """Read every row; return format, counts and every bad row with line, field and reason."""
    from ondevice.data import read_rows

    rows = read_rows(file, task=task, columns=columns, allow_empty=True)
    name = Path(file).name
    problems = [problem.to_dict() | {"file": name} for problem in rows.problems]
    return {"format": rows.format, "rows": len(rows.items), "problems": problems}


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
    from ondevice.data import preview as preview_rows
    from ondevice.data.columns import parse_columns
    from ondevice.models import load_tokenizer
    from ondevice.models.open import artifact_tokenizer

    tokenizer = load_tokenizer(str(model)) if artifact is None else artifact_tokenizer(Path(artifact))
    shown = preview_rows(
        file,
        tokenizer,
        task=task,
        columns=parse_columns(columns or ()),
        max_length_tokens=max_length_tokens,
        train_on_prompt=train_on_prompt,
        rows=rows,
        strict_columns=strict_columns,
    )
    return shown.to_dict() | {"file": Path(file).name}


def check_model(folder: str) -> dict[str, Any]:
    """Read a model's sizes, its tokenizer and the shapes of its weights; raise ModelError if one cannot be."""
    from ondevice.models.open import dims_and_family, load_tokenizer
    from ondevice.models.source import check_folder, check_weights

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


CALLS: dict[str, Callable[..., Any]] = {
    "plan": plan,
    "validate": validate,
    "preview": preview,
    "check_model": check_model,
    "choose": choose,
    "generate": generate,
    "complete": complete,
    "convert": convert,
}


def serve(source: Any, target: Any) -> None:
    """Answer until the other side closes."""
    for line in source:
        question = json.loads(line)
        try:
            value = CALLS[question["call"]](**question["arguments"])
            answer = {"value": _send_parts(value, target) if isinstance(value, Generator) else value}
        except OndeviceError as error:
            answer = {"error": error.to_dict()}
        except (ValueError, OSError, RecursionError, UnicodeError) as error:
            problem = DataError(f"{question['call']}: {type(error).__name__}: {error}")
            answer = {"error": problem.to_dict()}
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": TrainingError(f"{question['call']} failed: {type(error).__name__}: {error}").to_dict()}
        target.write(json.dumps(answer).encode() + b"\n")
        target.flush()


def _send_parts(parts: Generator[Any, None, Any], target: Any) -> Any:
    """Write each part as a line of its own; return the value at the end."""
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return end.value
        target.write(json.dumps({"part": part}).encode() + b"\n")
        target.flush()


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
    listen_for_stop()
    # Answers go to a copy of standard output, which itself becomes standard error: a library that prints there would
    # break the protocol.
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
