"""Python processes that begin with torch and transformers imported, for tests that start many short
ones.

Importing the two takes 4 CPU seconds, more than most commands over a tiny model. `Warm` keeps one
process that has imported them and done nothing else; its `python` and `ondevice` are commands that
ask that process to fork, and so is `worker`, with which pytest-xdist starts its workers. What they
run is a process of its own, with the caller's arguments, environment, folder, open files and
network, and ends as it would have ended: by its exit status, its exception or its signal. Signals
go on to it, and it is killed when the command is.

Whatever such a start cannot give is started as ever: options of the interpreter, or another value
of a variable that an import reads.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "tokenizers",
    "pydantic",
    "typer",
    "rich.console",
)
FOR_EXPORTS = ("executorch.exir", "executorch.backends.xnnpack.partition.xnnpack_partitioner")
"""The same of programs that export one; imported if ExecuTorch is installed."""
STARTS_S = 300
AT_IMPORT = (
    "HF_",
    "TRANSFORMERS_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "ONEDNN_",
    "CUDA_",
    "LD_",
    "USE_",
    "PYTHON",
)
"""Beginnings of the names of variables that an import reads; PYTHONPATH is followed."""
QUIET = ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_VERBOSITY")
"""What `ondevice` sets before it imports a framework, and so its children have."""
BY_IMPORTS = ("TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_NO_ADVISORY_WARNINGS")
"""What `torch._inductor` (by an export) and `mlx_lm` set when a test imports them, for all it
starts later."""
LATER = ("PYTHONPATH", "TORCHELASTIC_", "TORCH_NCCL_", *QUIET, *BY_IMPORTS)
"""Beginnings of those that are read later, as what `torchrun` sets for each of its processes."""
CLONE_NEWNET = 0x40000000
HEADER_BYTES = 8
COLD = "cold"
"""File beside the socket that says that nobody listens there: imports started threads."""
CLIENT = """import json, os, signal, socket, sys
words = sys.argv[1:]
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
try:
    link = socket.socket(socket.AF_UNIX)
    link.connect({address!r})
except OSError:
    os.execv({python!r}, [{python!r}, *words])
own = dict(words=words, environment=dict(os.environ), folder=os.getcwd(), group=os.getpgrp(), command=os.getpid())
text = json.dumps(own).encode()
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # one that comes now waits until there is who gets it
for number in numbers:
    signal.signal(number, lambda number, frame: link.send(bytes([number])))
network = os.open("/proc/self/ns/net", os.O_RDONLY)
socket.send_fds(link, [len(text).to_bytes({header}, "little")], [0, 1, 2, network])
link.sendall(text)
if (start := link.recv(4)) == b"cold":
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
if start == b"cold":
    os.execv({python!r}, [{python!r}, *words])
answer = link.recv(16)
status = int(answer) if answer else -signal.SIGKILL
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class Warm:
    """The process that forks, started at the first use; `python` and `ondevice` are in `folder`.

    Args:
        preloaded: modules that it imports first.
        wait: until it has; otherwise commands before it start Python as ever.
    """

    def __init__(
        self, folder: Path, preloaded: tuple[str, ...] = PRELOADED, wait: bool = True
    ) -> None:
        self.folder = folder
        self.python, self.ondevice = folder / "python", folder / "ondevice"
        self.worker = folder / "worker"
        address, client = str(folder / "socket"), folder / "client.py"
        client.write_text(
            CLIENT.format(python=sys.executable, address=address, header=HEADER_BYTES)
        )
        for path, first, prefix in (
            (self.python, "", ""),
            (self.ondevice, "", "-m ondevice "),
            # execnet starts a worker with `-u`, but sets up the standard streams itself.
            (self.worker, "shift\n", ""),
        ):
            # A shell's command, because a path in #! may have no space.
            words = f"{shlex.quote(sys.executable)} -IS {shlex.quote(str(client))} {prefix}"
            path.write_text(f'#!/bin/sh\n{first}exec {words}"$@"\n')
            path.chmod(0o755)
        self.environment = dict(os.environ)
        self.process: subprocess.Popen[bytes] | None = None
        self.forks = False
        # Elsewhere the commands start Python as ever, and so they do if imports start threads, as on
        # some hosts: nobody listens at the address then.
        if sys.platform != "linux" or os.environ.get("ONDEVICE_TESTS_COLD"):
            return
        command = [sys.executable, __file__, address, *preloaded]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        if wait:
            said = self.process.stdout.readline()
            assert said in (b"ready\n", b"cold\n"), "the process that forks has ended"
            self.forks = said == b"ready\n"

    @classmethod
    def of_another(cls, folder: Path, environment: dict[str, str]) -> Warm:
        """Return the commands of one that another process has started in `folder` and ends."""
        warm = cls.__new__(cls)
        warm.folder, warm.environment, warm.process = folder, environment, None
        warm.python, warm.ondevice = folder / "python", folder / "ondevice"
        warm.forks = True
        until = time.monotonic() + STARTS_S
        while True:
            with socket.socket(socket.AF_UNIX) as link:
                try:
                    link.connect(str(folder / "socket"))
                    return warm
                except (FileNotFoundError, ConnectionRefusedError):
                    warm.forks = not (folder / COLD).exists()
                    if not warm.forks:
                        return warm
                    assert time.monotonic() < until, "the process that forks did not start"
            time.sleep(0.05)

    def close(self) -> None:
        """End it, and with it what it has started."""
        if self.process is not None:
            self.process.communicate()


def preloaded() -> tuple[str, ...]:
    """Return what the process of all tests imports: with ExecuTorch, if it is installed."""
    has_executorch = importlib.util.find_spec("executorch") is not None
    return (*PRELOADED, *FOR_EXPORTS) if has_executorch else PRELOADED


def serve(address: str, started_with: dict[str, str]) -> dict[str, Any] | None:
    """Fork for each request until standard input ends: None then, and in each fork what it is to
    do."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    # Ctrl-C is for the tests. Not ignored: a fork that is sent one keeps it until it has its
    # handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.set_wakeup_fd(waker.fileno())
    selector = selectors.DefaultSelector()
    for source in (listener, woken, sys.stdin):
        selector.register(source, selectors.EVENT_READ)
    links: dict[int, socket.socket] = {}
    os.write(1, b"ready\n")
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                signal.set_wakeup_fd(
                    -1
                )  # `waker` is closed with this function, and forks that end would write to it
                for process in links:
                    os.kill(process, signal.SIGKILL)
                for process in links:
                    os.waitpid(process, 0)
                return None
            if key.fileobj is woken:
                woken.recv(4096)
                _reap(links, selector)
            elif key.fileobj is listener:
                link, _ = listener.accept()
                head, files, _, _ = socket.recv_fds(link, HEADER_BYTES, 4)
                text, size = b"", int.from_bytes(head, "little")
                while len(text) < size and (part := link.recv(size - len(text))):
                    text += part
                if len(head) < HEADER_BYTES or len(text) < size:  # it was killed while it asked
                    for file in (*files, link.detach()):
                        os.close(file)
                    continue
                task = json.loads(text)
                if not fits(task, started_with):
                    _tell(link, b"cold")
                    for file in (*files, link.detach()):
                        os.close(file)
                    continue
                if not (process := os.fork()):
                    signal.set_wakeup_fd(-1)
                    for end in (listener, woken, waker, link, *links.values()):
                        end.close()
                    selector.close()
                    return {**task, "files": files}
                for file in files:
                    os.close(file)
                _tell(link, b"warm")
                links[process] = link
                selector.register(link, selectors.EVENT_READ, process)
            elif key.data in links:
                try:
                    numbers = links[key.data].recv(64)
                except OSError:
                    numbers = b""
                for number in numbers or bytes([signal.SIGKILL]):  # the command is gone
                    os.kill(key.data, number)
                if not numbers:
                    selector.unregister(links[key.data])


def _reap(links: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while links:
        process, status = os.waitpid(-1, os.WNOHANG)
        if not process:
            return
        link = links.pop(process)
        try:
            selector.unregister(link)
        except KeyError:
            pass
        _tell(link, str(os.waitstatus_to_exitcode(status)).encode())
        link.close()


def _tell(link: socket.socket, what: bytes) -> None:
    try:
        link.sendall(what)
    except OSError:  # nobody waits for it any more
        pass


def fits(task: dict[str, Any], started_with: dict[str, str]) -> bool:
    """Return True if a fork can give what is asked for."""
    words = task["words"][task["words"][0] == "-P" :]
    known = words[0] in ("-m", "-c") or not words[0].startswith("-")
    return known and read_by_imports(task["environment"]) == read_by_imports(started_with)


def become(task: dict[str, Any], paths: list[str]) -> None:
    """Make this fork the process that was asked for, and run it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *files, network = task["files"]
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    enter(network)
    try:
        os.setpgid(0, task["group"])
    except OSError:  # in another session
        pass
    os.chdir(task["folder"])
    os.getppid = lambda: parent_of(task["command"])
    words, environment = task["words"], task["environment"]
    safe_path = words[0] == "-P"
    words = words[safe_path:]
    os.environ.clear()
    os.environ.update(environment)
    more = [
        os.path.abspath(path)
        for path in environment.get("PYTHONPATH", "").split(os.pathsep)
        if path
    ]
    first = (
        os.getcwd()
        if words[0] == "-m"
        else ""
        if words[0] == "-c"
        else str(Path(words[0]).resolve().parent)
    )
    sys.path[:] = [*([] if safe_path else [first]), *more, *paths]
    sys.path_importer_cache.clear()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def parent_of(process: int) -> int:
    """Return who started a process, or whoever has taken it over since; 1 when it is gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 1


def enter(network: int) -> None:
    """Go into the network namespace of the command, which may be another host's; `os.setns` comes
    with Python 3.12."""
    if os.fstat(network).st_ino != os.stat("/proc/self/ns/net").st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(network, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an import reads."""
    return {
        key: value
        for key, value in environment.items()
        if key.startswith(AT_IMPORT) and not key.startswith(LATER)
    }


def end(error: BaseException | None) -> None:
    """End as the interpreter would, but leave the memory to the system: to take torch apart costs
    0.4 CPU seconds.

    Threads are waited for, what was registered with `atexit` runs, and standard output is written.
    """
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # nobody reads: the interpreter's own status
        status = 120
    os._exit(status & 0xFF)


def _main() -> None:
    started_with = dict(os.environ)
    own = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths = [path for path in sys.path if path not in own]
    sys.path[:] = paths
    os.environ |= {QUIET[0]: "1", QUIET[1]: "error"}
    for name in sys.argv[2:]:
        __import__(name)
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # such a process cannot fork safely
        print(f"{threads} threads after importing {sys.argv[2:]}: no forks", file=sys.stderr)
        Path(sys.argv[1]).with_name(COLD).touch()
        os.write(1, b"cold\n")
        return
    gc.freeze()
    if (task := serve(sys.argv[1], started_with)) is not None:
        try:
            become(task, paths)
        except KeyboardInterrupt:  # as the interpreter ends
            traceback.print_exc()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            end(error)
        end(None)


if __name__ == "__main__":
    _main()
