"""The rights that a fleet's processes give up, tried in processes that gave them up."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TRIED = """
import json, os, socket, subprocess, sys
from pathlib import Path
from ondevice.fleet.confine import confine
folder, port, other = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
confined = confine([folder / "device.json"], [port])

def outcome(action):
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "done"

print(json.dumps({"confined": confined, **{name: outcome(action) for name, action in {
    "read its own file": lambda: (folder / "device.json").read_text(),
    "import a module": lambda: __import__("imaplib"),
    "resolve a name": lambda: socket.getaddrinfo("localhost", 80),
    "connect to the server": lambda: socket.create_connection(("127.0.0.1", port)).close(),
    "connect to its device": lambda: socket.socket(socket.AF_UNIX).connect(str(folder / "device")),
    "read rows": lambda: (folder / "rows.jsonl").read_text(),
    "list a folder": lambda: os.listdir(folder),
    "write a file": lambda: (folder / "new").write_text("x"),
    "replace its own file": lambda: (folder / "device.json").write_text("x"),
    "delete rows": lambda: (folder / "rows.jsonl").unlink(),
    "start a program": lambda: subprocess.run([sys.executable, "-c", ""]),
    "connect elsewhere": lambda: socket.create_connection(("127.0.0.1", other)),
    "listen": lambda: socket.create_server(("127.0.0.1", 0)),
    "signal another process": lambda: os.kill(os.getppid(), 0),
}.items()}}))
"""


def test_the_process_for_the_network_reads_python_and_reaches_the_server_and_nothing_else(
    tmp_path: Path,
) -> None:
    for name in ("device.json", "rows.jsonl"):
        (tmp_path / name).write_text("{}")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as device,
    ):
        device.bind(str(tmp_path / "device"))
        device.listen()
        ports = [str(one.getsockname()[1]) for one in (server, other)]
        done = subprocess.run(
            [sys.executable, "-c", TRIED, str(tmp_path), *ports],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)
    if not tried.pop("confined"):
        pytest.skip("this system has no Landlock")
    allowed = [
        "read its own file",
        "import a module",
        "resolve a name",
        "connect to the server",
        "connect to its device",
    ]
    assert [name for name, outcome in tried.items() if outcome == "done"] == allowed, tried
    assert (tmp_path / "rows.jsonl").read_text() == "{}"


def test_a_fleets_process_writes_for_its_user_only_and_leaves_no_core_file(tmp_path: Path) -> None:
    program = (
        "import resource; from pathlib import Path; from ondevice.fleet.confine import shed; shed(); "
        f"Path({str(tmp_path / 'new')!r}).write_text('x'); print(resource.getrlimit(resource.RLIMIT_CORE)); "
        "print('NoNewPrivs:\\t1' in Path('/proc/self/status').read_text())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[0] == "(0, 0)"
    if sys.platform == "linux":
        assert done.stdout.splitlines()[1] == "True"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
