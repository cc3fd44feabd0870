"""Rounds as files: three devices without a network, each file below 2 kB, and every refusal with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ondevice.core.errors import FleetError
from ondevice.fleet.carry import MOST_BYTES, Desk, Parcel, files_of, parcel_of
from ondevice.fleet.codes import Code
from ondevice.fleet.messages import Task, TaskReply
from ondevice.fleet.store import Store
from tests.cli.command import CommandLine
from tests.fleet.fleets import answer, charter, drawn, fails, refused
from tests.fleet.test_simulate import rows

BEGIN = ("fleet", "begin", "--model", "tiny:llama", "--task", "sst2", "--max-length", 32, "--queries", 2,
         "--local-steps", 2, "--set", "method.rank=2", "--set", "fleet.momentum=0.5", "--json")  # fmt: skip


def test_three_devices_train_by_file(ondevice: CommandLine, tmp_path: Path) -> None:
    fleet = tmp_path / "a fleet"
    assert ondevice(*BEGIN, "--out", fleet).code == 0
    files = {device: tmp_path / f"gerät {device}.odfleet" for device in range(3)}
    data = {device: rows(tmp_path / f"rows {device}.jsonl", 4 + device) for device in files}
    closed = {}
    for number in range(2):
        for device, file in files.items():
            if (number, device) == (1, 2):
                continue  # it is away
            written = ondevice(
                "fleet", "carry", "out", fleet, "--device", device, "--to", file, "--json"
            ).json
            assert max(written["bytes"]) <= MOST_BYTES
            replied = ondevice("fleet", "carry", "answer", file, "--data", data[device], "--out",
                               tmp_path / f"device {device}", "--to", tmp_path / "answer.odfleet",
                               "--json")  # fmt: skip
            assert replied.json["bytes"] <= 256, replied.err
            taken = ondevice("fleet", "carry", "in", fleet, tmp_path / "answer.odfleet", "--json")
            assert taken.json["taken"] == [device], taken.err
        closed = ondevice("fleet", "carry", "in", fleet, "--close", "--json").json
        assert closed["closed"] == number
    for device, file in files.items():
        ondevice("fleet", "carry", "out", fleet, "--device", device, "--last", "--to", file)
        for _ in range(2):  # a file that is taken twice does nothing
            end = ondevice(
                "fleet", "carry", "answer", file, "--out", tmp_path / f"device {device}", "--json"
            ).json
            assert end["hash"] == closed["hash"]
    late = ondevice("fleet", "carry", "in", fleet, tmp_path / "answer.odfleet", "--json")
    assert late.code == 14
    assert "late" in late.err
    assert ondevice("fleet", "replay", fleet, "--json").json["final_hash"] == closed["hash"]


def test_what_a_desk_has_taken_survives_it(tmp_path: Path) -> None:
    with Store.create(tmp_path, charter()) as store:
        parcel = parcel_of(Desk(store).out(5)[0])
        assert parcel.charter == charter().to_bytes()
        task = Task.from_bytes(parcel.task or b"")
        given_answer = answer(task, 5, drawn(2))
        (file,) = files_of(Parcel(device=5, answer=given_answer.to_bytes()))
        with pytest.raises(FleetError):
            Desk(store).take(Desk(store).out(5)[0])
        Desk(store).out(6)
        assert Desk(store).take(file) == given_answer
        with refused(Code.TWICE):
            Desk(store).take(file)
        with pytest.raises(FleetError):
            Desk(store).out(5)
        outcome = Desk(store).close()
        assert Desk(store).rounds.state.hash == outcome.after != outcome.before
        with pytest.raises(FleetError):
            Desk(store).close()
        assert parcel_of(Desk(store).out(5)[0]).charter is None, "it has it"
        assert parcel_of(Desk(store).out(6)[0]).events == [outcome.to_bytes()]


def test_a_device_that_was_long_away_gets_several_files() -> None:
    events = [bytes([place]) * 104 for place in range(40)]
    files = files_of(Parcel(b"{}" * 300, 3, events, b"task"))
    assert max(map(len, files)) <= MOST_BYTES
    assert [event for file in files for event in parcel_of(file).events] == events
    assert parcel_of(files[-1]).task == b"task"
    assert len(files) == 3


def test_an_outcome_too_large_for_a_file_is_refused() -> None:
    with fails("2000 bytes"):
        files_of(Parcel(events=[bytes(3000)]))


@given(st.data())
def test_a_damaged_file_is_refused(data) -> None:
    (whole,) = files_of(Parcel(b'{"a": 1}', 3, [b"event"], b"task"))
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    for broken in (bytes(changed), whole[:place], data.draw(st.binary(max_size=80))):
        with pytest.raises(FleetError):
            parcel_of(broken)


def test_a_reply_in_another_devices_name_is_refused(tmp_path: Path) -> None:
    with Store.create(tmp_path, charter()) as store:
        task = Task.from_bytes(parcel_of(Desk(store).out(5)[0]).task or b"")
        stolen: TaskReply = replace(answer(task, 5, drawn(2)))
        with refused(Code.OTHER_DEVICE):
            Desk(store).take(files_of(Parcel(device=6, answer=stolen.to_bytes()))[0])
