"""Flower's ServerApp over a grid in this process: devices that come, go, lie and lose their memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")

from ondevice.core.errors import FleetError
from ondevice.fleet import apps
from ondevice.fleet.charter import Charter
from ondevice.fleet.messages import Task, read_event
from ondevice.fleet.rounds import Rounds
from ondevice.fleet.state import State
from ondevice.fleet.store import Store
from tests.fleet.fleets import answer, charter, drawn

pytestmark = pytest.mark.flower
SETTINGS = {"rounds": 4, "least_devices": 3, "sample": 1.0, "wait_s": 0.5}


@pytest.fixture(autouse=True)
def a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the run that Flower's own process would be in."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


class Node:
    """A device that keeps its state in memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.state: State | None = None
        self.place = 0
        self.sends: Callable[[bytes], bytes] = lambda data: data

    def reply(self, content: dict[str, Any]) -> dict[str, Any]:
        if "charter" in content:
            self.state = self.state or Charter.from_bytes(content["charter"]).state()
            return {"place": self.place}
        assert self.state is not None
        for event in map(read_event, content["events"]):
            self.state.apply(event)
            self.place += 1
        if "task" not in content:
            return {"digest": self.state.digest(), "place": self.place}
        task = Task.from_bytes(content["task"])
        assert task.begin == self.state.hash
        numbers = drawn(2, 100 * task.round + self.number)
        return {"answer": self.sends(answer(task, self.number, numbers).to_bytes())}


class Grid:
    """What the server sees of Flower."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.number: node for node in nodes}
        self.away: dict[int, set[int]] = {}
        self.sent = 0

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def send_and_receive(self, messages: Iterable[Any], timeout: float) -> list[Any]:
        replies = []
        for message in messages:
            number, content = message.metadata.dst_node_id, dict(message.content[apps.RECORD])
            if "task" in content and number in self.away.get(Task.from_bytes(content["task"]).round, set()):
                continue
            reply = self.nodes[number].reply(content)
            replies.append(
                SimpleNamespace(
                    metadata=SimpleNamespace(src_node_id=number), has_error=lambda: False, content={apps.RECORD: reply}
                )
            )
        return replies


def run(folder: Path, grid: Grid, **more: Any) -> Store:
    store = Store.create(folder, charter())
    apps.Server(grid, store, {**SETTINGS, **more}).run()  # type: ignore[arg-type]
    return store


def test_devices_that_miss_rounds_end_with_the_servers_hash(tmp_path: Path) -> None:
    grid = Grid(map(Node, (7, 8, 9)))
    grid.away = {1: {8}, 2: {8, 9}}
    store = run(tmp_path, grid)
    digest = store.state().digest()
    assert {node.state.digest() for node in grid.nodes.values() if node.state} == {digest}
    assert json.loads(store.fact("devices") or "") == {"7": True, "8": True, "9": True}
    assert [row["answers"] for row in store.table()] == [3, 2, 1, 3]


def test_a_server_that_goes_on_ends_where_one_that_ran_through_does(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", Grid(map(Node, (7, 8, 9)))).state().digest()
    grid = Grid(map(Node, (7, 8, 9)))
    run(tmp_path / "parts", grid, rounds=2)
    grid.nodes[8] = Node(8)  # it has lost its folder
    assert run(tmp_path / "parts", grid).state().digest() == whole


def test_answers_that_are_refused_are_counted_and_the_others_make_the_round(tmp_path: Path) -> None:
    nodes = [Node(7), Node(8), Node(9)]
    nodes[0].sends = lambda data: data[:-1]
    nodes[1].sends = lambda data: answer(Rounds(charter()).begin([7]).tasks[7], 7, drawn(2)).to_bytes()
    store = run(tmp_path, Grid(nodes))
    assert [row["answers"] for row in store.table()] == [1] * 4
    assert store.table()[-1]["refused"] == 8


def test_rounds_that_nobody_answers_end_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "POLL_S", 0.01)
    with pytest.raises(FleetError, match="too few devices"):
        run(tmp_path / "few", Grid([Node(7)]))
    grid = Grid(map(Node, (7, 8, 9)))
    grid.away = {number: {7, 8, 9} for number in range(9)}
    with pytest.raises(FleetError, match="no device has answered"):
        run(tmp_path / "silent", grid, rounds=9)
    lost = [Node(7), Node(8), Node(9)]
    for node in lost:
        node.reply = lambda content: {"error": "it holds another fleet"}  # type: ignore[method-assign]
    with pytest.raises(FleetError, match="0 of 3"):
        run(tmp_path / "other", Grid(lost))
    assert Store.open(tmp_path / "other").count() == 0
