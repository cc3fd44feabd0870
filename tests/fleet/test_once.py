"""A device answers each task once: no repetition averages its noise away, and no second set of a round is summed."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core.errors import FleetError
from ondevice.data import Batches
from ondevice.fleet.averaging.arrays import to_bytes
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.averaging.member import AdapterReply
from ondevice.fleet.averaging.rules import Averaging
from ondevice.fleet.charter import Charter
from ondevice.fleet.device import Device, DeviceSettings
from ondevice.fleet.ledger import BUDGET, FILE_NAME, Ledger, cost_of
from ondevice.fleet.member import Member
from ondevice.fleet.messages import UNIT, Group, Outcome, Task, TaskReply
from ondevice.fleet.numbers import Numbers
from ondevice.fleet.privacy import bound, epsilon
from ondevice.fleet.replies import Reply, reply_of
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.secure import Secrets
from ondevice.fleet.stages import AskKeys, AskShares, Keys, read
from ondevice.fleet.store import Store
from ondevice.fleet.sums import SecureSum
from tests.fleet.fleets import charter
from tests.fleet.quadratic import Quadratic, QuadraticRows

REPEATS = 200


def member(fleet: Charter, number: int) -> Member:
    session = Quadratic(fleet.size, fleet.seed, fleet.queries)
    session.target *= number
    return Member(fleet, session, Batches(QuadraticRows(3).train, 1, None, 0, 0), number)


def joined(folder: Path, fleet: Charter, number: int = 1, **settings: Any) -> Device:
    """A device that has the charter."""
    device = Device(DeviceSettings(folder=str(folder / f"device {number}"), data="", **settings))
    device._member = member(fleet, number)
    assert "place" in device.reply({"charter": fleet.to_bytes()}, number)
    return device


def noisy(**more: Any) -> Charter:
    return charter(clip_norm=1.0, noise_multiplier=20.0, local_steps=8, **more)


def clean() -> np.ndarray:
    """What the device would say without noise."""
    fleet = charter(clip_norm=1.0, local_steps=8)
    return np.array(member(fleet, 1).answer(Rounds(fleet).begin([1]).tasks[1]).numbers.values())


def test_a_repeated_task_has_one_reply(tmp_path: Path) -> None:
    """The mean of 200 answers with fresh noise would have a cosine of 0.46 with two numbers of the device."""
    fleet = noisy()
    task = Rounds(fleet).begin([1]).tasks[1].to_bytes()
    answers = []
    for repeat in range(REPEATS):
        if repeat % 50 == 0:  # its process was killed and started again
            device = joined(tmp_path, fleet)
        answers.append(device.reply({"events": [], "task": task}, 1)["answer"])
    assert len(set(answers)) == 1
    mean = np.mean([TaskReply.from_bytes(answer).numbers.values() for answer in answers], axis=0)
    assert np.linalg.norm(mean) > 10 * np.linalg.norm(clean()), "the noise is all there"


def test_another_task_of_a_finished_round_is_refused(tmp_path: Path) -> None:
    fleet = noisy()
    device, server = joined(tmp_path, fleet), Rounds(fleet)
    task = server.begin([1]).tasks[1]
    first = device.reply({"task": task.to_bytes()}, 1)
    assert "answer" in first
    for other in (
        replace(task, first_step=8),
        replace(task, local_steps=7),
        replace(task, learning_rate=2e-2),
        replace(task, learning_rate=np.nextafter(np.float32(1e-2), np.float32(1)).item()),
        replace(task, begin=b"\1" * 8),
    ):
        assert device.reply({"task": other.to_bytes()}, 1) == {"error": "other_task"}, other
    assert device.reply({"task": task.to_bytes()}, 2) == {"error": "other_task"}, (
        "in another device's name"
    )
    assert device.reply({"task": replace(task, fleet=1).to_bytes()}, 1) == {"error": "other_fleet"}
    assert device.reply({"task": task.to_bytes()}, 1) == first


def test_a_round_is_not_asked_again_from_a_state_a_hair_away(tmp_path: Path) -> None:
    """A server that moves one element by 2^-32 has another state, and would measure the same again."""
    fleet = noisy()
    device, server = joined(tmp_path, fleet), Rounds(fleet)
    task = server.begin([1]).tasks[1]
    assert "answer" in device.reply({"task": task.to_bytes()}, 1)
    state = fleet.state()
    nudge = Outcome(fleet.id, 0, state.hash, bytes(8), (Group(1 << 50, Numbers((1, 0), UNIT)),))
    state.apply(nudge, check=False)
    nudge = replace(nudge, after=state.hash)
    again = replace(task, begin=state.hash)
    assert device.reply({"events": [nudge.to_bytes()], "task": again.to_bytes()}, 1) == {
        "error": "other_task"
    }
    ahead = replace(
        task, round=1, begin=state.hash
    )  # the directions of round 0 under another number
    assert device.reply({"task": ahead.to_bytes()}, 1) == {"error": "other_task"}


def test_rounds_that_are_over_are_not_begun(tmp_path: Path) -> None:
    fleet = noisy()
    device, server = joined(tmp_path, fleet), Rounds(fleet)
    events = []
    for _ in range(2):  # nobody answers, so the state stays
        server.begin([])
        events.append(server.close(server.next - 1).to_bytes())
    old = replace(server.begin([1]).tasks[1], round=1, first_step=8)
    assert device.reply({"events": events, "task": old.to_bytes()}, 1) == {"error": "other_state"}


@pytest.mark.parametrize("accountant", [True, False])
def test_a_device_stops_at_its_privacy_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accountant: bool
) -> None:
    """With or without the accountant's package; a new process does not begin anew."""
    if accountant:
        pytest.importorskip(
            "dp_accounting", reason="dp-accounting is not installed; try: make fleet-test"
        )
        assert epsilon(20.0, 17) < 2.0, "the accountant's epsilon is below the plain bound"
    else:
        monkeypatch.setitem(sys.modules, "dp_accounting", None)
        assert bound(20.0, 17) > 2.0
    fleet, budget = noisy(), 2.0
    most = next(count for count in range(1, 999) if bound(20.0, count + 1) > budget)
    server, events, given = Rounds(fleet), [], 0
    for number in range(most + 3):
        device = joined(tmp_path, fleet, epsilon=budget)
        task = server.begin([1]).tasks[1]
        reply = device.reply({"events": events[-1:], "task": task.to_bytes()}, 1)
        assert ("answer" in reply) if number < most else reply == {"error": "budget"}
        given += "answer" in reply
        events.append(server.close(number).to_bytes())
    assert given == most
    assert "answer" in joined(tmp_path, fleet, epsilon=math.inf).reply({"events": events[-1:], "task": Rounds(
        fleet, server.state).begin([1]).tasks[1].to_bytes()}, 1), "its owner decides"  # fmt: skip


def test_budgets_are_counted_over_all_fleets_of_a_folder(tmp_path: Path) -> None:
    with Ledger(tmp_path) as ledger:
        assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600
        ledger.check_budget(math.inf, None)  # a fleet without noise promises nothing
        for fleet in range(2):
            for number in range(3):
                ledger.once(
                    fleet,
                    number,
                    b"begin",
                    "answer",
                    b"task",
                    lambda: b"numbers",
                    cost_of(10.0),
                    6.0,
                )
        spent = next(budget for budget in np.arange(0.1, 9, 0.1) if not _refuses(ledger, budget))
        assert bound(10.0, 7) == pytest.approx(spent, abs=0.11)
        assert spent < BUDGET
        assert not _refuses(ledger, None)
        assert _refuses(ledger, 5.0, noise=0.0), (
            "an owner who names a budget gives nothing without noise"
        )


def _refuses(ledger: Ledger, budget: float | None, noise: float = 10.0) -> bool:
    try:
        ledger.check_budget(cost_of(noise), budget)
    except Exception:
        return True
    return False


def test_a_first_order_device_trains_once_from_one_adapter(tmp_path: Path) -> None:
    fleet = AdapterCharter(
        model_source="tiny:llama", model_sha256="0" * 64, method={"name": "lora"}, data={}, seed=1,
        learning_rate=1e-3, local_steps=1, averaging=Averaging(),
    )  # fmt: skip

    class Trainer:
        charter, count = fleet, 0

        def answer(self, number: int, arrays: dict[str, np.ndarray]) -> AdapterReply:
            self.count += 1
            return AdapterReply(
                {name: value + self.count for name, value in arrays.items()}, 4, 0.5, 0
            )

    def asked(number: int, value: float) -> dict[str, Any]:
        adapter = to_bytes({"a": np.full(3, value, np.float32)})
        return {"charter": fleet.to_bytes(), "adapter": adapter, "round": number, "last": False}

    def device() -> Device:
        found = Device(DeviceSettings(folder=str(tmp_path / "device"), data=""))
        found._averaging = Trainer()  # type: ignore[assignment]
        return found

    first = device().reply(asked(0, 0.0), 1)
    assert reply_of(first)
    assert device().reply(asked(0, 0.0), 1) == first
    assert device().reply(asked(0, 1e-6), 1) == {"error": "other_task"}
    assert "adapter" in device().reply(asked(1, 1.0), 1)
    assert device().reply(asked(0, 0.0), 1) == {"error": "answered"}, (
        "megabytes are kept for one round"
    )


class Party:
    """Devices of a secure fleet, and a server that may ask what it likes."""

    def __init__(self, folder: Path, numbers: tuple[int, ...]) -> None:
        from tests.fleet.keyring import make_keys

        self.keys = make_keys(folder, numbers)
        fleet = charter(size=70, secure=True, clip_norm=9.0)
        self.fleet = fleet.model_copy(update={"device_keys": self.keys.names})
        self.devices = {
            number: joined(folder, self.fleet, number, key=str(file))
            for number, file in self.keys.files.items()
        }
        self.task = Rounds(self.fleet).begin(numbers).tasks[numbers[0]]
        self.codes: list[tuple[int, str]] = []

    def send(self, contents: dict[int, dict[str, Any]]) -> dict[int, Reply]:
        replies = {}
        for number, content in contents.items():
            reply = self.devices[number].reply(
                {"events": [], "task": self.task.to_bytes(), **content}, number
            )
            if "error" in reply:
                self.codes.append((number, reply["error"]))
            replies[number] = reply_of(reply)
        return replies

    def sum(self, numbers: tuple[int, ...]) -> tuple[np.ndarray, list[int]]:
        blame = lambda node, code: self.codes.append((node, f"blamed: {code}"))  # noqa: E731
        sums = SecureSum(self.send, self.task.to_bytes(), self.keys.names, blame)
        return sums.collect({number: {} for number in numbers}, self.fleet.numbers + 2)


@pytest.mark.flower
def test_a_second_set_of_one_round_is_not_summed(tmp_path: Path) -> None:
    """The sum over {7, 8, 9, 10} less that over {7, 8, 9} is device 10's vector."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    party = Party(tmp_path, (7, 8, 9, 10))
    total, alive = party.sum((7, 8, 9, 10))
    assert alive == [7, 8, 9, 10]
    assert int(total.view(np.int64)[-1]) == 4 * 3, "rows"
    with pytest.raises(FleetError):
        party.sum((7, 8, 9))
    assert party.codes == [(number, "other_task") for number in (7, 8, 9)]
    again, _ = party.sum((7, 8, 9, 10))
    assert (again == total).all(), "the same is asked again: the same bytes"


@pytest.mark.flower
def test_a_device_that_lost_its_memory_sends_nothing_more_of_its_round(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    party = Party(tmp_path, (7, 8, 9, 10))
    keys = party.send({number: {"secure": AskKeys().to_bytes()} for number in (7, 8, 9, 10)})
    party.devices[7] = joined(tmp_path, party.fleet, 7, key=str(party.keys.files[7]))
    assert party.send({7: {"secure": AskKeys().to_bytes()}})[7] == keys[7]
    peers = {number: read(Keys, reply.secure) for number, reply in keys.items()}  # type: ignore[attr-defined]
    party.send({7: {"secure": AskShares(peers=peers).to_bytes()}})
    assert party.codes == [(7, "unsafe")]


@pytest.mark.flower
def test_a_server_cannot_stand_in_for_a_neighbour(tmp_path: Path) -> None:
    """It makes keys for every neighbour of device 7, whose shares and masks it could then read."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.keys import DeviceKey
    from tests.fleet.keyring import make_keys

    party, own = Party(tmp_path, (7, 8, 9, 10)), make_keys(tmp_path / "servers", (8, 9, 10))
    keys = party.send({number: {"secure": AskKeys().to_bytes()} for number in (7, 8, 9, 10)})
    honest = {number: read(Keys, reply.secure) for number, reply in keys.items()}  # type: ignore[attr-defined]
    task = party.task.to_bytes()
    forged = {
        n: Secrets(n, DeviceKey(file), task, own.names).public for n, file in own.files.items()
    }
    for peers in (
        {7: honest[7], **forged},  # keys that no device of the charter signed
        {
            7: honest[7],
            **{n: forged[n].model_copy(update={"signer": honest[n].signer}) for n in forged},
        },
        {
            7: honest[7],
            **{n: honest[n].model_copy(update={"mask_key": forged[n].mask_key}) for n in forged},
        },
        {
            7: honest[7],
            8: honest[9],
            9: honest[8],
            10: honest[10],
        },  # one device's keys under another's number
        {7: honest[7], 8: honest[8], 9: honest[8], 10: honest[10]},  # one device as two
    ):
        party.codes.clear()
        party.send({7: {"secure": AskShares(peers=peers).to_bytes()}})
        assert party.codes == [(7, "keys")]
    other = Task(party.fleet.id, 1, party.task.begin, 1, 1, party.task.learning_rate)
    old = {7: honest[7], **{n: honest[n] for n in (8, 9, 10)}}
    party.task, party.codes = other, []  # keys of round 0 in round 1
    fresh = read(Keys, party.send({7: {"secure": AskKeys().to_bytes()}})[7].secure)  # type: ignore[attr-defined]
    party.send({7: {"secure": AskShares(peers=old | {7: fresh}).to_bytes()}})
    assert party.codes == [(7, "keys")]


@pytest.mark.flower
def test_a_secure_fleet_whose_charter_names_no_devices_is_refused_by_them(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    party = Party(tmp_path, (7, 8, 9))
    fleet = party.fleet.model_copy(update={"device_keys": ()})
    device = joined(tmp_path / "old", fleet, 7, key=str(party.keys.files[7]))
    task = Rounds(fleet).begin([7]).tasks[7].to_bytes()
    assert device.reply({"task": task, "secure": AskKeys().to_bytes()}, 7) == {"error": "keys"}
    from ondevice.fleet.apps import Server

    with (
        Store.create(tmp_path / "server", fleet) as store,
        pytest.raises(FleetError),
    ):
        Server(None, store, {"wait_s": 1.0})  # type: ignore[arg-type]
    without = joined(tmp_path / "none", party.fleet, 7)
    assert without.reply({"task": party.task.to_bytes(), "secure": AskKeys().to_bytes()}, 7) == {
        "error": "keys"
    }
