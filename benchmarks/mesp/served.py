"""Processes that have a program open and take steps in turn, and the memory that each has for itself."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

from benchmarks.common import ROOT

POLL_S = 0.01


class Served:
    """A process that has a program open and takes a step when it is asked to."""

    def __init__(self, command: list[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self._answer()  # the runtime is loaded
        self.before = self.most = anonymous_bytes(self.process.pid)
        self.ended = threading.Event()
        self.watcher = threading.Thread(target=self._watch, daemon=True)
        self.watcher.start()
        self._ask("open")

    def step(self, counts: bool) -> None:
        """One step; its seconds, and those of its threads, are kept if it counts."""
        seconds, cpu_seconds = self._ask("step")
        if counts:
            self.seconds.append(seconds)
            self.cpu_seconds.append(cpu_seconds)

    def close(self) -> int:
        """End the process; the most anonymous bytes it had beyond its loaded runtime's."""
        self.ended.set()
        self.watcher.join()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        return self.most - self.before

    def _ask(self, word: str) -> tuple[float, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> tuple[float, float]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("done "):
                elapsed, cpu = line.split()[1:]
                return float(elapsed), float(cpu)
        raise SystemExit(f"{' '.join(map(str, self.process.args[-5:]))} has ended")  # type: ignore[index]

    def _watch(self) -> None:
        while not self.ended.wait(POLL_S):
            self.most = max(self.most, anonymous_bytes(self.process.pid))


def anonymous_bytes(pid: int) -> int:
    """Of a process, in memory and swapped out."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "VmSwap:"))
    )
