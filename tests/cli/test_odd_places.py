"""The command where streams, memory, users and names are not what they usually are: a sentence and the right status."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.core.errors import ConfigError, DoesNotFitError
from ondevice.core.process import expanded
from tests.cli.command import write_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shell and limits of Linux")

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def run(words: list[str], shell: str = "{}", **environment: str) -> tuple[int, str, str]:
    """Run the command in a shell line that has it in place of `{}`."""
    line = shell.format(shlex.join([sys.executable, "-m", "ondevice", *words]))
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in out + err, err
    return done.returncode, out, err


@pytest.mark.parametrize("environment", [ASCII, {"PYTHONIOENCODING": "ascii"}], ids=["C", "ascii"])
def test_ascii_streams_take_every_text(tmp_path: Path, environment: dict[str, str]) -> None:
    turns = [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "Süß ✓"}]
    rows = str(write_rows(tmp_path / "rows.jsonl", [{"messages": turns}] * 3))
    code, out, _ = run(["data", rows, "--model", "tiny:llama"], **environment)
    assert code == 0 and "S\\xfc\\xdf +" in out and out.isascii()
    code, out, _ = run(["data", rows, "--model", "tiny:llama", "--json"], **environment)
    assert code == 0 and "Süß ✓" in json.dumps(json.loads(out), ensure_ascii=False)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_status(closed: str) -> None:
    assert run(["plan", "tiny:llama", "--method", "mesp", "--json"], "{} " + closed)[0] == 0
    code, _, err = run(["data", "nothing.jsonl"], "{} " + closed)
    assert code == 3
    assert ("no such data file" in err) == ("2>" not in closed)


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    code = "from ondevice.cli.common import open_streams; open_streams(); import sys; "
    code += (
        "f = open(sys.argv[1], 'w'); print('output'); sys.stdout.flush(); f.write(str(f.fileno()))"
    )
    file = tmp_path / "a file"
    words = shlex.join([sys.executable, "-c", code, str(file)])
    assert subprocess.run(["bash", "-c", f"{words} <&- >&- 2>&-"], check=False).returncode == 0
    assert int(file.read_text()) > 2


def test_output_on_a_full_disk_is_an_error_and_messages_there_are_none() -> None:
    code, _, err = run(["plan", "tiny:llama", "--method", "mesp"], "{} > /dev/full")
    assert code == 11 and "No space left" in err
    assert run(["plan", "tiny:llama", "--method", "mesp"], "{} 2> /dev/full")[0] == 0
    assert run(["data", "nothing.jsonl"], "{} 2> /dev/full")[0] == 3


def test_memory_that_the_system_refuses_is_said(tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", [{"text": "a"}]))
    words = ["train", "tiny:llama", "-d", rows, "--method", "lora", "--out", str(tmp_path / "run")]
    code, _, err = run(words, "ulimit -v 1500000; {}")
    assert code == DoesNotFitError.exit_code
    assert "the system refused this process memory" in err and "ulimit -v" in err


@pytest.mark.parametrize(
    "words", [["data", "a\udcff.jsonl"], ["a\udcff"], ["runs", "show", "\udcff"]]
)
def test_an_argument_that_is_not_utf_8_is_refused(words: list[str]) -> None:
    code, _, err = run(words)
    assert code == ConfigError.exit_code
    assert "not valid UTF-8" in err and "\\xff" in err


def test_a_user_without_a_folder_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def none(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", none)
    with pytest.raises(ConfigError) as refusal:
        expanded("~/.cache", hint="set HOME or ONDEVICE_CACHE")
    assert "no home folder" in str(refusal.value) and "ONDEVICE_CACHE" in str(refusal.value)
    assert expanded("rows.jsonl") == Path("rows.jsonl")


def test_every_use_of_the_home_folder_is_the_one_that_tells(root: Path) -> None:
    users = [
        path.name
        for room in ("ondevice", "exporters", "runtime_ops")
        for path in (root / room).rglob("*.py")
        if ".expanduser()" in path.read_text() or "Path.home()" in path.read_text()
    ]
    assert users == ["process.py"]
