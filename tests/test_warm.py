"""A process forked from one that has imported everything is the process that was asked for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import DIFFERENT
from tests.warm import BY_IMPORTS, HEADER_BYTES, Warm, fits

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(os.environ.get("ONDEVICE_TESTS_COLD")),
    reason="here Python starts as ever",
)


@pytest.fixture(autouse=True)
def _needs_forks(warm: Warm) -> None:
    if not warm.forks:
        pytest.skip("imports start threads here")


def ended(warm: Warm, *words: str, **options: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(warm.python), *words], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


def running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_warm_process_has_the_arguments_environment_and_exit_status_of_a_fresh_one(
    warm: Warm, tmp_path: Path
) -> None:
    (tmp_path / "near.py").write_text(
        "import os, sys\nprint(__name__, sys.argv[1:], os.getcwd(), os.environ['A'])\n"
    )
    folder = tmp_path / "ein Ordner"
    folder.mkdir()
    for words in (["-m", "near"], [str(tmp_path / "near.py")]):
        environment = {**os.environ, "A": "ä", "PYTHONPATH": str(tmp_path)}
        code, told, _ = ended(warm, *words, "ü b", cwd=folder, env=environment)
        assert (code, told) == (0, f"__main__ ['ü b'] {folder} ä\n")
    loaded = "import sys; print(len({'torch', 'ondevice'} & sys.modules.keys()))"
    assert (
        ended(warm, "-c", loaded, env=warm.environment)[1] == "1\n"
    )  # a test before may have left variables
    assert ended(warm, "-c", "import sys; print(sys.stdin.read()); sys.exit(7)", input="ö")[:2] == (
        7,
        "ö\n",
    )
    code, _, errors = ended(warm, "-c", "1 / 0")
    assert code == 1 and errors.endswith("ZeroDivisionError: division by zero\n")
    for number in (signal.SIGKILL, signal.SIGINT):
        assert ended(warm, "-c", f"import os; os.kill(os.getpid(), {number})")[0] == -number
    assert ended(warm, "-c", "import sys; sys.exit('a reason')") == (1, "", "a reason\n")
    late = "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
    code = f"import atexit, threading, time; atexit.register(print, 'at exit', end=''); {late}; print('main')"
    assert ended(warm, "-c", code)[:2] == (0, "main\nthread\nat exit")


def test_commands_of_the_workers_of_a_run_fork(pytestconfig: pytest.Config) -> None:
    """Variables that the tests' imports set are those of the process that forks."""
    assert pytestconfig.stash.get(DIFFERENT, {}) == {}


def test_where_imports_start_threads_python_starts_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        cold = Warm(tmp_path, ("json",))
    assert not cold.forks and not Warm.of_another(tmp_path, {}).forks
    assert ended(cold, "-c", "import sys; print('torch' in sys.modules)") == (0, "False\n", "")
    cold.close()


def test_variables_set_by_libraries_do_not_restart_the_warm_process(warm: Warm) -> None:
    """Each command would import torch again, in the worker whose earlier tests had exported a
    program."""
    pytest.importorskip("mlx_lm")
    inductor = "from torch._inductor.runtime import cache_dir_utils; cache_dir_utils.cache_dir()"
    code = f"import json, os, mlx_lm; {inductor}; print(json.dumps(dict(os.environ)))"
    environment = json.loads(ended(warm, "-c", code, env=warm.environment)[1].splitlines()[-1])
    assert environment.keys() >= set(BY_IMPORTS)
    assert fits({"words": ["-c"], "environment": environment}, warm.environment)
    assert not fits(
        {"words": ["-c"], "environment": {**environment, "HF_HOME": "/nowhere"}}, warm.environment
    )


def test_a_warm_process_gets_signals_and_input_like_a_fresh_one(warm: Warm) -> None:
    code = "import os, signal, time; print(os.getpid(), flush=True); time.sleep(60)"
    for number in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(
            [str(warm.python), "-c", code], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            forked = Path("/proc", process.stdout.readline().strip())
            process.send_signal(number)
            assert (
                process.stdout.read() == "" and process.wait() == -number
            )  # its end of the pipe is closed
        until = time.monotonic() + 120
        while running(forked):  # its files are closed before it has ended
            assert time.monotonic() < until
            time.sleep(0.05)


def test_files_read_by_an_import_are_read_again(warm: Warm) -> None:
    code = "import sys; from huggingface_hub.constants import HF_HOME; print(HF_HOME, 'torch' in sys.modules)"
    assert (
        ended(warm, "-c", code, env={**os.environ, "HF_HOME": "/nowhere"})[1] == "/nowhere False\n"
    )
    assert ended(warm, "-P", "-c", "print(5)")[1] == "5\n"


def test_commands_that_end_at_any_moment_harm_no_other_command(tmp_path: Path, capfd) -> None:
    warm = Warm(tmp_path, preloaded=())
    for sent in (
        b"",
        b"\x07",
        (99).to_bytes(HEADER_BYTES, "little") + b"{",
    ):  # killed while it asks
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(tmp_path / "socket"))
            link.sendall(sent)
    # Memory, because a process with some takes a moment to die.
    code = (
        "import os, time; held = b'x' * (64 << 20); print(os.getpid(), flush=True); time.sleep(60)"
    )
    commands = [
        subprocess.Popen([str(warm.python), "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    forked = [int(process.stdout.readline()) for process in commands if process.stdout]
    assert not {process.pid for process in commands} & set(forked)  # it forks as before
    warm.close()
    assert not [number for number in forked if running(Path("/proc", str(number)))]
    assert [process.communicate() and process.returncode for process in commands] == [
        -signal.SIGKILL
    ] * 3
    assert capfd.readouterr() == ("", "")


def test_a_signal_that_comes_at_once_is_not_lost(tmp_path: Path) -> None:
    """The command passes it on before the fork has its handlers."""
    warm = Warm(tmp_path, preloaded=())
    for number in (signal.SIGINT, signal.SIGTERM):
        with socket.socket(socket.AF_UNIX) as link, open(os.devnull, "r+b") as nothing:
            link.connect(str(tmp_path / "socket"))
            task = {"words": ["-c", "import time; time.sleep(60)"], "environment": dict(os.environ)}
            text = json.dumps(
                {**task, "folder": "/", "group": os.getpgrp(), "command": os.getpid()}
            ).encode()
            network = os.open("/proc/self/ns/net", os.O_RDONLY)
            socket.send_fds(
                link,
                [len(text).to_bytes(HEADER_BYTES, "little")],
                [nothing.fileno()] * 3 + [network],
            )
            os.close(network)
            link.sendall(text)
            assert link.recv(4) == b"warm"
            link.sendall(bytes([number]))
            link.settimeout(30)
            assert int(link.recv(16)) == -number
    warm.close()


def test_workers_of_a_run_are_forks_of_the_warm_process(pytestconfig: pytest.Config) -> None:
    """Each collects all tests, which takes half the CPU time if the frameworks are imported."""
    if "warm" not in getattr(pytestconfig, "workerinput", {}):
        pytest.skip("this process is no worker")
    words = Path(f"/proc/{os.getpid()}/cmdline").read_bytes().split(b"\0")
    assert any(word.endswith(b"warm.py") for word in words), words
