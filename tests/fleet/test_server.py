"""Flower's ServerApp over a grid in this process: devices that come, go, lie and lose their memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")

from ondevice.core.errors import FleetError
from ondevice.fleet import apps
from ondevice.fleet.charter import Charter
from ondevice.fleet.client import RECORD
from ondevice.fleet.log import replay
from ondevice.fleet.messages import Task, read_event
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.state import State
from ondevice.fleet.store import Store
from tests.fleet.fleets import answer, charter, drawn, fails
from tests.fleet.grids import LocalGrid, name_the_run

pytestmark = pytest.mark.flower
SETTINGS = {"rounds": 4, "least_devices": 3, "sample": 1.0, "wait_s": 0.2}


@pytest.fixture(autouse=True)
def a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    name_the_run(monkeypatch)
    monkeypatch.setattr(apps, "POLL_S", 0.01)


class Node:
    """A device that keeps its state in memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: State | None = None
        self.seen: list[bytes] = []
        self.sends: Callable[[bytes], bytes] = lambda data: data

    def reply(self, content: dict[str, Any]) -> dict[str, Any]:
        if "charter" in content:
            self.state = self.state or Charter.from_bytes(content["charter"]).state()
            if "events" not in content:
                return {"place": len(self.seen)}
        assert self.state is not None
        new = [
            event for event in content["events"] if event not in self.seen
        ]  # as a device's file knows them
        for event in new:
            self.state.apply(read_event(event))
        self.seen += new
        if "task" not in content:
            return {"digest": self.state.digest(), "place": len(self.seen)}
        task = Task.from_bytes(content["task"])
        assert task.begin == self.state.hash
        numbers = drawn(2, 100 * task.round + self.number)
        return {"answer": self.sends(answer(task, self.number, numbers).to_bytes())}


class Grid(LocalGrid):
    """What the server sees of Flower.

    Attributes:
        away: devices that never reply to the task of a round.
        slow: (round, device) -> the round that must have begun before that device replies to the first.
        tasks: that were sent.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.devices = {node.number: node for node in nodes}
        super().__init__(self.devices)
        self.away: dict[int, set[int]] = {}
        self.slow: dict[tuple[int, int], int] = {}
        self.tasks: list[Task] = []

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        given = list(messages)
        contents = [dict(message.content[RECORD]) for message in given]
        self.tasks += [
            Task.from_bytes(content["task"]) for content in contents if "task" in content
        ]
        return super().push_messages(given)

    def ready(self, node: int, content: Any) -> bool:
        asked = dict(content[RECORD])
        newest = max((task.round for task in self.tasks), default=-1)
        return "task" not in asked or newest >= self.slow.get(
            (Task.from_bytes(asked["task"]).round, node), -1
        )

    def reply(self, node: int, content: Any) -> dict[str, Any] | None:
        asked = dict(content[RECORD])
        if "task" in asked and node in self.away.get(Task.from_bytes(asked["task"]).round, set()):
            return None
        return {RECORD: self.devices[node].reply(asked)}


def run(folder: Path, grid: Grid, fleet: Charter | None = None, **more: Any) -> Store:
    store = Store.create(folder, fleet or charter())
    apps.Server(grid, store, {**SETTINGS, **more}).run()  # type: ignore[arg-type]
    return store


def test_devices_that_miss_rounds_end_with_the_servers_hash(tmp_path: Path) -> None:
    grid = Grid(map(Node, (7, 8, 9)))
    grid.away = {1: {8}, 2: {8, 9}}
    store = run(tmp_path, grid)
    digest = store.state().digest()
    assert {node.state.digest() for node in grid.devices.values() if node.state} == {digest}
    assert json.loads(store.fact("devices") or "") == {"7": True, "8": True, "9": True}
    assert [row["answers"] for row in store.table()] == [3, 2, 1, 3]


def test_the_next_round_begins_before_a_slow_device_has_replied(tmp_path: Path) -> None:
    """Its answer counts, and the others do not wait for it; the outcomes are applied in the order of the rounds."""
    grid = Grid(map(Node, (7, 8, 9)))
    grid.slow = {(0, 9): 2}  # it answers to round 0 when round 2 has begun
    store = run(tmp_path, grid, charter(open_rounds=3), least_devices=2, wait_s=120.0)
    begun = {task.round: task.begin for task in grid.tasks}
    assert begun[0] == begun[1] == begun[2] != begun[3]
    assert [row["answers"] for row in store.table()] == [3, 2, 2, 3]
    assert {node.state.digest() for node in grid.devices.values() if node.state} == {
        store.state().digest()
    }
    assert replay(store.log()).digest() == store.state().digest()


def test_a_reply_after_its_round_is_refused(tmp_path: Path) -> None:
    """The wait is over, so the round ends without it; the device answers to the next one all the same."""
    grid = Grid(map(Node, (7, 8, 9)))
    grid.slow = {(1, 9): 2}
    store = run(tmp_path, grid, least_devices=2)
    assert [row["answers"] for row in store.table()] == [3, 2, 3, 3]
    assert store.table()[-1]["refused"] == 1


def test_a_server_that_goes_on_ends_where_one_that_ran_through_does(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", Grid(map(Node, (7, 8, 9)))).state().digest()
    grid = Grid(map(Node, (7, 8, 9)))
    run(tmp_path / "parts", grid, rounds=2)
    grid.devices[8] = Node(8)  # it has lost its folder
    assert run(tmp_path / "parts", grid).state().digest() == whole


def test_refused_replies_are_counted_and_the_others_make_the_round(tmp_path: Path) -> None:
    nodes = [Node(7), Node(8), Node(9)]
    nodes[0].sends = lambda data: data[:-1]
    nodes[1].sends = lambda data: answer(
        Rounds(charter()).begin([7]).tasks[7], 7, drawn(2)
    ).to_bytes()
    store = run(tmp_path, Grid(nodes))
    assert [row["answers"] for row in store.table()] == [1] * 4
    assert store.table()[-1]["refused"] == 8


def test_rounds_without_replies_end_the_server(tmp_path: Path) -> None:
    with fails(3):
        run(tmp_path / "few", Grid([Node(7)]))
    grid = Grid(map(Node, (7, 8, 9)))
    grid.away = {number: {7, 8, 9} for number in range(9)}
    with pytest.raises(FleetError):
        run(tmp_path / "silent", grid, rounds=9)
    lost = [Node(7), Node(8), Node(9)]
    for node in lost:
        node.reply = lambda content: {"error": "other_fleet"}  # type: ignore[method-assign]
    with pytest.raises(FleetError, check=lambda error: "0 of 3" in error.received):
        run(tmp_path / "other", Grid(lost))
    assert Store.open(tmp_path / "other").table()[0]["answers"] == 0
