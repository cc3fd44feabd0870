"""What a fleet writes is for its user only: adapters, keys, the paths of rows, and answers on their way."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ondevice.fleet.averaging.store import AdapterStore
from ondevice.fleet.device import DeviceSettings, answering
from ondevice.fleet.store import Store
from ondevice.server.fleets import Seat, write_seat
from tests.cli.command import CommandLine
from tests.fleet.fleets import charter, open_to_others
from tests.fleet.test_simulate import rows


@pytest.fixture(autouse=True)
def a_mask_that_lets_everybody_in() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_all_that_the_commands_of_a_fleet_write_is_private(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    data, out = rows(tmp_path / "r.jsonl"), tmp_path / "out"
    out.mkdir(mode=0o700)
    tiny = ("--model", "tiny:llama", "--task", "sst2", "--max-length", 64)
    server, parcel, answer = out / "server", out / "round.odfleet", out / "answer.odfleet"
    device = ("--data", data, "--out", out / "device")
    for command in (
        ("begin", *tiny, "--queries", 2, "--out", server),
        ("begin", *tiny, "--method", "lora", "--out", out / "averages"),
        ("carry", "out", server, "--device", 1, "--to", parcel),
        ("carry", "answer", parcel, *device, "--to", answer),
        ("carry", "in", server, answer, "--close"),
        ("simulate", *tiny, "--queries", 2, "--data", data, "--devices", 2, "--rounds", 1, "--batch-size", 2,
         "--out", out / "simulated"),
        ("replay", out / "simulated", "--out", out / "adapter"),
    ):  # fmt: skip
        done = ondevice("fleet", *command, "--json")
        assert done.code == 0, done.err
    assert open_to_others(out) == []
    assert os.umask(0) == 0, "a command leaves the mask as it was"


@pytest.mark.flower
def test_keys_are_private_from_the_moment_they_are_written(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from ondevice.fleet.certificates import make

    make(tmp_path / "keys", ("localhost",), 2)
    assert open_to_others(tmp_path / "keys") == []


def test_the_socket_of_a_devices_process_is_in_a_folder_that_only_its_user_enters(
    tmp_path: Path,
) -> None:
    with answering(DeviceSettings(folder=str(tmp_path / "device"), data="")) as file:
        socket = Path(json.loads(file.read_text())["socket"])
        assert socket.is_socket()
        assert socket.parent.stat().st_mode & 0o777 == 0o700


def test_a_seat_is_private(tmp_path: Path) -> None:
    write_seat(tmp_path / "store", "home", Seat(data="/rows.jsonl", insecure=True))
    assert open_to_others(tmp_path / "store") == []


def test_a_fleets_file_is_private_while_it_is_open_and_an_older_one_becomes_so(
    tmp_path: Path,
) -> None:
    with Store.create(tmp_path / "fleet", charter()) as store:
        store.set_fact("name", "value")
        assert open_to_others(tmp_path / "fleet") == []  # with SQLite's own files
    file = tmp_path / "fleet" / Store.file_name
    file.chmod(0o644)
    with Store.open(tmp_path / "fleet") as store:
        assert store.fact("name") == "value"
    assert file.stat().st_mode & 0o777 == 0o600
    assert sqlite3.connect(file).execute("PRAGMA user_version").fetchone() == (Store.version,)
    assert AdapterStore.__mro__[1] is Store.__mro__[1], (
        "both kinds of fleet share the file that this is of"
    )
