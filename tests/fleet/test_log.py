"""The log and the store: a replay is the run, damage is said, and a killed server loses no whole round."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ondevice.core.errors import FleetError, StorageError
from ondevice.fleet import file as file_module
from ondevice.fleet import store as store_module
from ondevice.fleet.charter import Charter
from ondevice.fleet.log import log_bytes, read_log, replay
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.store import FILE_NAME, Store, read_file
from tests.fleet.fleets import answer, charter, drawn, fails
from tests.sampling import part_of


def run(store: Store, rounds: int) -> bytes:
    """Go on to `rounds` rounds of two devices; gives the state's digest."""
    server = Rounds(store.charter, store.state())
    while server.next < rounds:
        current = server.begin([0, 1])
        for device, task in current.tasks.items():
            server.receive(answer(task, device, drawn(2, 10 * task.round + device)))
        outcome = server.close(current.number)
        store.add(outcome, server.state, answers=list(current.answers.values()), loss=current.loss)
    return server.state.digest()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("a fleet")
    with Store.create(folder, charter()) as store:
        return folder, run(store, 7)


def test_a_replay_has_the_servers_hash(finished: tuple[Path, bytes]) -> None:
    folder, digest = finished
    for place in (folder, folder / FILE_NAME):
        assert replay(read_file(place)).digest() == digest
    content = read_file(folder)
    data = log_bytes(content.charter, [event.to_bytes() for event in content.events])
    assert replay(read_log(data)).digest() == digest
    assert replay(read_log(data), rounds=3).digest() != digest
    with pytest.raises(FleetError, check=lambda error: error.received == 8):
        replay(read_log(data), rounds=8)


def test_replies_are_stored(finished: tuple[Path, bytes]) -> None:
    with Store.open(finished[0]) as store:
        assert [item.device for item in store.answers(6)] == [0, 1]
        assert [row["answers"] for row in store.table()] == [2] * 7


def test_a_log_that_is_cut_off_replays_to_the_last_whole_round(
    finished: tuple[Path, bytes],
) -> None:
    content = read_file(finished[0])
    data = log_bytes(content.charter, [event.to_bytes() for event in content.events])
    cut = read_log(data[:-5])
    assert len(cut.events) == 6
    assert cut.unfinished
    assert replay(cut).digest() == replay(content, rounds=6).digest()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=part_of(60))
@given(data=st.data())
def test_a_damaged_log_is_refused_or_ends_early(finished: tuple[Path, bytes], data) -> None:
    content = read_file(finished[0])
    whole = bytearray(log_bytes(content.charter, [event.to_bytes() for event in content.events]))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    try:
        log = read_log(bytes(whole))
    except FleetError as error:
        assert error.message
    else:  # a length that was changed reads as an end that is missing
        assert len(log.events) < 7
        assert log.unfinished


def test_other_files_are_not_read_as_logs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path / "notes.txt", tmp_path / "gone"):
        with pytest.raises(FleetError):
            read_file(path)
    with pytest.raises(FleetError):
        Charter.from_bytes(b'{"version": 2}')


def test_a_store_goes_on_from_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SNAPSHOT_EVERY", 3)
    with Store.create(tmp_path, charter(momentum=0.9)) as store:
        digest = run(store, 8)
    with Store.create(tmp_path, charter(momentum=0.9)) as store:
        store.connection.execute(
            "UPDATE events SET event = x'00' WHERE place < 6"
        )  # what the snapshot covers
        assert store.state().digest() == digest
        assert store.state().round == 8


def test_another_charter_is_refused(finished: tuple[Path, bytes]) -> None:
    with fails({"learning_rate": 0.01}):
        Store.create(finished[0], charter(rate=0.5))


def test_a_damaged_store_is_reported(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"SQLite format 3\0" + bytes(200))
    with pytest.raises((StorageError, FleetError)):
        Store.open(tmp_path)


def test_a_server_that_is_killed_before_any_statement_of_its_database_loses_no_whole_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SNAPSHOT_EVERY", 2)
    connect, rounds, found = file_module.connect, 2, set()
    with Store.create(tmp_path / "whole", charter()) as store:
        expected = run(store, rounds)
    for point in itertools.count(1):
        folder, left = tmp_path / f"killed at {point}", itertools.count(point, -1)

        def connect_and_die(path: Path, left: itertools.count = left):
            connection = connect(path)
            connection.set_trace_callback(
                lambda _: os.kill(os.getpid(), signal.SIGKILL) if next(left) == 1 else None
            )
            return connection

        child = os.fork()
        if child == 0:  # nothing of pytest may run here, whatever happens
            try:
                file_module.connect = connect_and_die
                with Store.create(folder, charter()) as store:
                    run(store, rounds)
            finally:
                os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        with Store.create(folder, charter()) as store:
            found.add(store.state().round)
            assert run(store, rounds) == expected
        if not killed:
            break
    assert point > 20
    assert found == set(range(rounds + 1))


def test_a_charter_that_names_no_devices_keeps_its_number() -> None:
    """Fleets that were begun before charters could name them go on: their messages have this number."""
    assert "device_keys" not in charter().values()
    assert charter().id == 3604656094
    assert Charter.from_bytes(charter().to_bytes()) == charter()
    named = charter().model_copy(update={"device_keys": ("a" * 64,)})
    assert named.id != charter().id
    assert Charter.from_bytes(named.to_bytes()) == named
