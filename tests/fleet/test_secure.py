"""Secure sums: the plain sum to the bit, whoever goes away when, and nothing else that a server could read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core.errors import ConfigError, FleetError
from ondevice.data import Batches
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.carry import Desk
from ondevice.fleet.charter import Charter
from ondevice.fleet.codes import Code
from ondevice.fleet.device import Device, DeviceSettings
from ondevice.fleet.keys import DeviceKey
from ondevice.fleet.member import Member
from ondevice.fleet.messages import Task, read_event
from ondevice.fleet.replies import Reply, reply_of
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.secure import Secrets, exponent_of
from ondevice.fleet.stages import read_request
from ondevice.fleet.store import Store
from ondevice.fleet.sums import SecureSum
from tests.fleet.fleets import charter, fails, refused
from tests.fleet.grids import LocalGrid, name_the_run
from tests.fleet.keyring import Keys, make_keys
from tests.fleet.quadratic import Quadratic, QuadraticRows

ROUNDS = 4
NUMBERS = (7, 8, (1 << 64) - 9, 10, 11)
AWAY = {1: {("keys", 7)}, 2: {("shares", 8), ("mask", 11)}, 3: {("reveal", 10)}}
"""Stages before which a device goes away, by round."""


def secure(keys: Keys | None = None, **more: Any) -> Charter:
    fleet = charter(size=70, secure=True, clip_norm=9.0, **more)
    return fleet if keys is None else fleet.model_copy(update={"device_keys": keys.names})


def member(fleet: Charter, device: int) -> Member:
    """A device with rows of its own number, whose loss falls by its own numbers."""
    session = Quadratic(fleet.size, fleet.seed, fleet.queries)
    session.target *= device % 5 + 1
    return Member(
        fleet, session, Batches(QuadraticRows(device % 6 + 1).train, 1, None, 0, 0), device
    )


def plain(fleet: Charter, taking: list[list[int]]) -> Rounds:
    """The same rounds with answers that the server sees."""
    server, members = Rounds(fleet), {device: member(fleet, device) for device in NUMBERS}
    for number, devices in enumerate(taking):
        current = server.begin(NUMBERS)
        for device in devices:
            server.receive(members[device].answer(current.tasks[device]).to_bytes(), device)
        outcome = server.close(number)
        for each in members.values():
            each.follow([outcome])
    return server


class Grid(LocalGrid):
    """Flower's grid, and devices of this project behind it."""

    def __init__(self, fleet: Charter, folder: Path, keys: Keys) -> None:
        super().__init__(NUMBERS)
        self.devices, self.seen = {}, b""
        for number in NUMBERS:
            key = str(keys.files[number])
            device = Device(
                DeviceSettings(folder=str(folder / f"device {number}"), data="", key=key)
            )
            device._member = member(fleet, number)
            self.devices[number] = device

    def reply(self, node: int, content: Any) -> dict[str, Any] | None:
        asked = dict(content["fleet"])
        if "secure" in asked:
            stage = read_request(asked["secure"]).stage
            if (stage, node) in AWAY.get(Task.from_bytes(asked["task"]).round, ()):
                return None
        reply = self.devices[node].reply(asked, node)
        self.seen += repr(reply).encode()
        return {"fleet": reply}


@pytest.mark.flower
def test_a_secure_fleet_has_the_hash_of_plain_replies_whoever_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet import apps

    name_the_run(monkeypatch)
    keys = make_keys(tmp_path, NUMBERS)
    fleet = secure(keys)
    grid, store = Grid(fleet, tmp_path, keys), Store.create(tmp_path / "server", fleet)
    settings = {"rounds": ROUNDS, "least_devices": 5, "sample": 1.0, "wait_s": 0.5}
    apps.Server(grid, store, settings).run()  # type: ignore[arg-type]
    first, last = NUMBERS[0], NUMBERS[-1]
    taking = [list(NUMBERS), [n for n in NUMBERS if n != first], [n for n in NUMBERS if n not in (8, last)],
              list(NUMBERS)]  # fmt: skip
    assert [row["answers"] for row in store.table()] == [len(devices) for devices in taking]
    expected = plain(fleet, taking)
    assert np.abs(expected.state.vector).max() > 1 << 16
    assert store.state().digest() == expected.state.digest()
    assert json.loads(store.fact("devices") or "") == {str(number): True for number in NUMBERS}
    assert b"answer" not in grid.seen
    assert store.table()[-1]["loss"] == pytest.approx(
        np.average(
            [member_loss(fleet, store, n) for n in NUMBERS], weights=[n % 6 + 1 for n in NUMBERS]
        ),
        abs=1e-2,
    )


def member_loss(fleet: Charter, store: Store, number: int) -> float:
    """What a device measured in the last round."""
    own, server = member(fleet, number), Rounds(fleet)
    for event in map(read_event, store.events()[:-1]):
        server.state.apply(event)
    server.next, own.state = ROUNDS - 1, server.state
    return own.answer(server.begin([number]).tasks[number]).loss


def secrets_of(keys: Keys) -> dict[int, Secrets]:
    """A round's secrets of each device that has a key."""
    return {
        number: Secrets(number, DeviceKey(file), b"task", keys.names)
        for number, file in keys.files.items()
    }


@pytest.mark.flower
def test_a_device_shows_no_share_that_would_open_its_vector(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    devices = secrets_of(make_keys(tmp_path, (1, 2, 3, 4)))
    keys = {number: each.public for number, each in devices.items()}
    sealed = {number: each.share(keys).shares for number, each in devices.items()}
    vector = np.arange(5, dtype=np.uint64)
    masked = devices[1].masked(vector, {n: sealed[n][1] for n in (2, 3, 4)})
    assert not (np.frombuffer(masked.masked, "<u8") == vector).any()
    assert not masked.without
    with refused(Code.UNSAFE):
        devices[1].masked(vector, {n: sealed[n][1] for n in (2, 3, 4)})
    for alive, gone in (({1, 2, 3, 4}, {4}), ({1, 2, 3}, set()), ({1, 2, 3, 4, 5}, set())):
        with refused(Code.UNSAFE):
            devices[1].reveal(alive, gone)
    with refused(Code.UNSAFE):
        devices[1].reveal({1, 2}, {3, 4})
    devices[1].reveal({1, 2, 3}, {4})
    with refused(Code.UNSAFE):
        devices[1].reveal({1, 2, 3, 4}, set())
    with refused(Code.UNSAFE):
        devices[2].masked(vector, {3: sealed[3][2]})
    with refused(Code.KEYS):
        secrets_of(make_keys(tmp_path / "others", (1,)))[1].share(keys)
    with fails(3):
        SecureSum(lambda contents: {}, b"task", (), print).collect({1: {}, 2: {}}, 5)


@pytest.mark.flower
def test_devices_share_secrets_only_with_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    monkeypatch.setattr("ondevice.fleet.secure.HALF_RING", 2)
    keys = make_keys(tmp_path, range(9))
    devices, most = secrets_of(keys), [0]

    def send(contents: dict[int, dict[str, Any]]) -> dict[int, Reply]:
        replies = {}
        for number, content in contents.items():
            request = read_request(content["secure"])
            if request.stage == "mask" and number == 4:
                continue
            most.append(len(getattr(request, "peers", ())))
            vector = np.array([number, -3], np.int64).view(np.uint64)
            reply = devices[number].reply(content["secure"], lambda vector=vector: vector)
            replies[number] = reply_of({"secure": reply})
        return replies

    blamed: list[Any] = []
    sums = SecureSum(send, b"task", keys.names, lambda node, code: blamed.append((node, code)))
    total, alive = sums.collect({number: {} for number in devices}, 2)
    assert total.view(np.int64).tolist() == [sum(range(9)) - 4, -3 * 8]
    assert len(alive) == 8
    assert max(most) == 5
    assert not blamed


def test_a_secure_fleet_is_of_sums_that_have_units(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"combine": "median", "clip_norm": 1.0},
        {"seeds": "own", "clip_norm": 1.0},
    ]
    for wrong in cases:
        with pytest.raises((ConfigError, ValueError)):
            Agreement(secure=True, **wrong)
    fleet = secure()
    server = Rounds(fleet)
    task = server.begin([1]).tasks[1]
    answer = member(fleet, 1).answer(task)
    assert answer.numbers.exponent == exponent_of(fleet.fleet, 2)
    from dataclasses import replace

    with refused(Code.NUMBERS):
        server.receive(replace(answer, numbers=replace(answer.numbers, exponent=3)))
    with Store.create(tmp_path, fleet) as store, pytest.raises(FleetError):
        Desk(store)
    device = Device(DeviceSettings(folder=str(tmp_path), data=""))
    device._member = member(fleet, 1)
    assert device.reply({"events": [], "task": task.to_bytes()}, 1) == {"error": "unsafe"}


@pytest.mark.flower
@pytest.mark.parametrize("liar", NUMBERS[2:4])
def test_a_device_that_spoils_secure_sums_is_found_and_the_rounds_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: int
) -> None:
    """Its vector is noise, under masks like any other: only halves of the devices tell whose it is."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet import apps
    from ondevice.fleet.stages import Masked, read

    name_the_run(monkeypatch)
    keys = make_keys(tmp_path, NUMBERS)
    fleet = secure(keys)

    class Spoiled(Grid):
        def reply(self, node: int, content: Any) -> dict[str, Any] | None:
            record = super().reply(node, content)
            asked = dict(content["fleet"])
            if node == liar and record is not None and b'"mask"' in asked.get("secure", b""):
                masked = read(Masked, record["fleet"]["secure"])
                noise = np.random.default_rng(1).bytes(len(masked.masked))
                record["fleet"] = {"secure": masked.model_copy(update={"masked": noise}).to_bytes()}
            return record

    monkeypatch.setattr("tests.fleet.test_secure.AWAY", {})
    store = Store.create(tmp_path / "server", fleet)
    settings = {"rounds": 8, "least_devices": 3, "sample": 1.0, "wait_s": 20.0}
    apps.Server(Spoiled(fleet, tmp_path, keys), store, settings).run()  # type: ignore[arg-type]
    answers = [row["answers"] for row in store.table()]
    assert answers[0] == 0
    assert answers.count(0) <= 4, answers
    assert answers[-1] == len(NUMBERS) - 1
