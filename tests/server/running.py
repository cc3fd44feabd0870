"""A daemon in a process of its own, as a user starts it, and what the tests give it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ondevice.server.client import Client
from ondevice.server.transport import RefusedError

SETTINGS: dict[str, Any] = {
    "method": {"name": "prge", "rank": 2, "queries": 2, "learning_rate": 0.1},
    "train": {"steps": 40, "batch_size": 2, "seed": 3, "checkpoint_every": 10},
    "data": {"max_length_tokens": 32},
}
SPARE_PAUSES_S = 120


class DaemonProcess:
    """`ondevice serve` over a store.

    Args:
        python: what its workers and helpers are started with; a command of `tests.warm` spares them their imports where
            nothing is killed and no memory is measured.
        limits: other values of the server's constants, such as {"connections.HEAD_S": 2.0}.
    """

    def __init__(
        self, store: Path, *flags: str, token: str | None = None, environment: dict[str, str] | None = None,
        python: Path | None = None, limits: dict[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.limits = limits or {}
        self.store, self.flags, self.token = store, flags, token
        self.python = str(python or sys.executable)
        self.environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})
        }  # fmt: skip
        self.process: subprocess.Popen[str] | None = None
        self.errors = store.with_name(f"{store.name}.stderr")
        self.address = ""

    def start(self) -> DaemonProcess:
        """Start it, and wait until it answers."""
        lines = [f"import sys; sys.executable = {self.python!r}"]
        for name, value in self.limits.items():
            module, _, constant = f"ondevice.server.{name}".rpartition(".")
            lines.append(f"import {module} as module; module.{constant} = {value!r}")
        program = "; ".join([*lines, "from ondevice.cli.app import run; run()"])
        command = [
            sys.executable,
            "-c",
            program,
            "serve",
            "--store",
            str(self.store),
            "--port",
            "0",
            "--json",
        ]
        self.errors.parent.mkdir(parents=True, exist_ok=True)
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, *self.flags],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("{"):
            pytest.fail(f"the daemon did not start: {self.errors.read_text()}")
        answer = json.loads(line)
        if "address" not in answer:
            pytest.fail(str(answer))
        self.address = answer["address"]
        return self

    @property
    def client(self) -> Client:
        """A client of it."""
        return Client(self.address, self.token, timeout_s=60)

    def kill(self) -> None:
        """kill -9."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def stop(self) -> str:
        """SIGTERM; gives what it wrote to standard error."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=120)
        return self.errors.read_text()

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop()
            finally:
                self.process.kill()


def rows(path: Path, count: int = 12) -> Path:
    """Rows of a classification by label."""
    lines = [
        json.dumps({"text": f"{'ab'[i % 2]}{i}", "label": ["no", "yes"][i % 2]})
        for i in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(**train: Any) -> dict[str, Any]:
    """The sections of a short run."""
    return {**SETTINGS, "train": {**SETTINGS["train"], **train}}


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
    """The first value that is true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if actual := condition():
            return actual
        time.sleep(0.05)
    pytest.fail(f"waited in vain: {what}")


def workers(store: Path) -> list[int]:
    """Process ids of the workers of a store."""
    collected = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"ondevice.server.worker" in words and any(
                word.startswith(os.fsencode(store)) for word in words
            ):
                collected.append(int(folder.name))
    return collected


def adapter_bits(folder: Path) -> dict[str, bytes]:
    """Every tensor of an adapter, to the bit. (The order of the file's metadata is another in every process.)"""
    from ondevice.artifact.adapter import load_adapter

    return {name: value.tobytes() for name, value in load_adapter(folder).tensors.items()}


@contextmanager
def refused(status: int) -> Iterator[pytest.ExceptionInfo[RefusedError]]:
    """Expect that the daemon refuses a request with this status of HTTP."""
    with pytest.raises(RefusedError) as caught:
        yield caught
    assert caught.value.status == status
