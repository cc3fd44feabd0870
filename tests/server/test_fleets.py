"""The daemon as a device of a fleet: seats that the owner writes, windows, and a page's figures."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import ConfigError
from ondevice.server.fleets import AGAIN_S, Fleets, Running, Seat, write_seat
from tests.cli.command import CommandLine
from tests.fleet.test_simulate import rows
from tests.ports import free_port
from tests.server.running import DaemonProcess

NOON, MIDNIGHT = (time.mktime((2026, 11, 23, hour, 30, 0, 0, 0, -1)) for hour in (12, 0))


@pytest.fixture
def ondevice(capsys: Any) -> CommandLine:
    return CommandLine(capsys)


def until(test: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := test():
            return found
        time.sleep(0.2)
    pytest.fail("it did not come")


def test_a_device_runs_in_its_window_alone_and_never_beside_a_job(tmp_path: Path) -> None:
    """A process that stands for the device would hide what is tested: the real one starts, and waits for its server."""
    now, busy = [NOON], [False]
    fleets = Fleets(tmp_path, lambda: busy[0], clock=lambda: now[0])
    night = {"start": "22:00", "end": "06:00"}
    write_seat(
        tmp_path,
        "night",
        Seat(data=str(rows(tmp_path / "r.jsonl")), port=9, insecure=True, window=night),
    )  # type: ignore[arg-type]
    fleets.turn()
    assert fleets.table()[0]["why"] == "outside its window"
    now[0], busy[0] = MIDNIGHT, True
    fleets.turn()
    assert fleets.table()[0]["why"] == "a job runs"
    busy[0] = False
    fleets.turn()
    (row,) = fleets.table()
    assert (row["running"], row["why"], row["rounds"], row["bytes"]) == (True, "", 0, 0)
    process = fleets.running["night"].process
    assert process is not None
    assert process.poll() is None
    busy[0] = True  # a job comes
    fleets.turn()
    until(lambda: (fleets.turn(), process.poll() is not None)[1])
    fleets.turn()
    assert fleets.table()[0] | {"running": False} == fleets.table()[0]
    (tmp_path / "fleets" / "broken.json").write_text('{"data": 1}')
    assert "cannot be read" in next(row["why"] for row in fleets.table() if row["name"] == "broken")
    write_seat(tmp_path, "night", None)
    fleets.turn()
    assert [row["name"] for row in fleets.table()] == ["broken"]
    fleets.stop()


def test_a_device_whose_fleet_is_over_is_not_started_again(tmp_path: Path) -> None:
    seat = Seat(data=str(rows(tmp_path / "r.jsonl")), port=9, insecure=True)
    write_seat(tmp_path, "home", seat)
    fleets = Fleets(tmp_path, lambda: False, lambda folder: {"why": "the server cannot be reached"})
    for status, why, waits_s in ((0, "the fleet is over", math.inf), (14, "it ended", AGAIN_S)):
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
        fleets.running["home"] = Running(process)
        fleets.running["home"].why = ""
        assert fleets.table()[0]["why"] == "the server cannot be reached"
        process.wait()
        fleets.turn()
        (row,) = fleets.table()
        assert (row["running"], row["why"].startswith(why)) == (False, True), row
        assert fleets.running["home"].not_before >= time.monotonic() + waits_s - 5


def test_a_device_ends_with_the_daemon_that_was_killed(tmp_path: Path) -> None:
    """Its successor starts a device of its own on the same folder."""
    program = (
        "import subprocess, sys, os, time; p = subprocess.Popen([sys.executable, '-c', "
        "'import sys, threading; from ondevice.server.fleet_child import end_with; end_with(int(sys.argv[1]))', "
        "str(os.getpid())]); print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1)
    os.kill(child, 0)
    parent.kill()
    parent.wait()

    def gone() -> bool:
        try:
            return Path(f"/proc/{child}/stat").read_text().split()[2] == "Z"
        except FileNotFoundError:
            return True

    until(gone)
    parent.stdout.close()


def test_the_owner_adds_a_seat_by_command_and_mistakes_are_said(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    data = rows(tmp_path / "my rows.jsonl")
    seat = ("serve", "fleet", "home", "--store", tmp_path / "store", "--data", data)
    refused = ondevice(*seat, "--json").json
    assert refused["expected"] == "--certificates and --key, or --insecure"
    assert ondevice(*seat, "--insecure", "--window", "25:00-6", "--json").code != 0
    flags = (
        "--window",
        "22:00-06:00",
        "--memory-limit",
        "1.5GiB",
        "--task",
        "sst2",
        "--column",
        "text=Body",
    )
    done = ondevice(*seat, "--insecure", *flags, "--json").json
    written = json.loads(Path(done["file"]).read_text())
    assert (
        written["window"] == {"start": "22:00", "end": "06:00"}
        and written["memory_bytes"] == 3 << 29
    )
    asked = Seat.parse(written).arguments(tmp_path)
    assert (
        asked[asked.index("--task") + 1] == "sst2"
        and asked[asked.index("--column") + 1] == "text=Body"
    )
    assert written["data"] == str(data)
    assert ondevice("serve", "fleet", "home", "--store", tmp_path / "store", "--remove").code == 0
    refused = ondevice(
        "serve", "fleet", "home", "--store", tmp_path / "store", "--remove", "--json"
    ).json
    assert "not take part in fleet home" in refused["message"]
    with pytest.raises(ConfigError) as caught:
        write_seat(tmp_path, "../up", None)
    assert caught.value.received == "../up"
    assert Running().process is None


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_daemon_trains_a_round_and_shows_it(ondevice: CommandLine, tmp_path: Path) -> None:
    """Over Flower, with a real server and a real daemon; in Flower's environment (make fleet-test)."""
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("Flower is not installed; try: make fleet-test")
    port = free_port()
    assert ondevice("fleet", "begin", "--model", "tiny:llama", "--task", "sst2", "--max-length", 64, "--queries", 2,
                    "--out", tmp_path / "server").code == 0  # fmt: skip
    server = subprocess.Popen(
        [sys.executable, "-m", "ondevice", "fleet", "server", str(tmp_path / "server"), "--rounds", "2", "--port",
         str(port), "--insecure", "--json"], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        with DaemonProcess(tmp_path / "store") as daemon:
            assert daemon.client.fleets() == []
            assert ondevice("serve", "fleet", "home", "--store", tmp_path / "store", "--data",
                            rows(tmp_path / "r.jsonl"), "--port", port, "--insecure").code == 0  # fmt: skip
            said = json.loads(server.communicate(timeout=240)[0].splitlines()[-1])
            (row,) = until(lambda: [one for one in daemon.client.fleets() if one["rounds"] == 2])
            assert (row["running"], row["hash"]) == (True, said["hash"])
            assert row["bytes"] > 2 * 119  # the charter came too
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
