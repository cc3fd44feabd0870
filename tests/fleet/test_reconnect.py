"""Servers, devices and links that go and come back; `python -m benchmarks.fleet.reconnect` kills twenty times."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ondevice.core.errors import FleetError
from ondevice.fleet.link import Delays, News
from ondevice.fleet.standing import Standing, standing_of
from tests.cli.command import CommandLine
from tests.ports import free_port


@pytest.mark.flower
@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_fleet_ends_by_itself_after_kills_of_its_server_a_device_and_the_link(
    tmp_path: Path,
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from benchmarks.fleet.reconnect import run

    done = run(tmp_path / "a fleet", 8, ["server", "device", "link"], devices=2)
    assert done["kills"] == 3
    assert (done["rounds"], done["failed_rounds"], done["hashes"]) == (8, 0, 1)
    assert done["least_replies"] == 2, "a device that came back lost its task"
    assert done["most_answers_to_a_round"] == 1
    assert done["most_status"] == 0
    assert done["killed_with_status_0"] == 0


@pytest.mark.flower
def test_a_server_without_devices_says_when_it_gives_up_and_fails(
    ondevice: CommandLine, tmp_path: Path
) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    folder = tmp_path / "server"
    begun = ondevice("fleet", "begin", "--model", "tiny:llama", "--task", "sst2", "--max-length", 64,
                     "--queries", 2, "--out", folder, "--json")  # fmt: skip
    assert begun.code == 0, begun.err
    done = ondevice("fleet", "server", folder, "--devices", 2, "--wait", 2, "--port", free_port(),
                    "--insecure", "--json")  # fmt: skip
    assert done.code == FleetError.exit_code
    assert "waiting for devices: 0 connected, 2 needed; gives up in 2 s" in done.err
    assert done.json["message"] == "too few devices take part: gave up after 2 s"
    assert (done.json["rounds"], done.json["hashes_equal"]) == (0, None)


@pytest.fixture
def grid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A grid of two devices, of which each keeps its message until `replies` has its number."""
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from flwr.common.constant import ErrorCode

    from tests.fleet.grids import LocalGrid, name_the_run

    name_the_run(monkeypatch)

    class Grid(LocalGrid):
        gone: set[int] = set()
        silent: set[int] = set()

        def ready(self, node: int, content: Any) -> bool:
            return node not in self.silent

        def reply(self, node: int, content: Any) -> dict[str, Any]:
            return {"from": node}

        def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
            replies = super().pull_messages(numbers)
            for reply in replies:
                if reply.metadata.src_node_id in self.gone:
                    reply.has_error = lambda: True
                    reply.error = SimpleNamespace(code=ErrorCode.NODE_UNAVAILABLE)
            return replies

    return Grid([1, 2])


def messages(nodes: Iterable[int]) -> list[Any]:
    from flwr.app import ConfigRecord, Message, RecordDict

    content = RecordDict({"fleet": ConfigRecord({"task": b"1"})})
    return [Message(content=content, dst_node_id=node, message_type="train") for node in nodes]


@pytest.mark.flower
def test_a_device_that_came_back_gets_its_message_again_and_its_reply_counts_once(
    grid: Any,
) -> None:
    from ondevice.fleet.returns import ReturningPost

    arrived: dict[int, float] = {}
    post = ReturningPost(grid, 60.0, lambda: arrived)
    grid.gone = {2}
    post.send(messages([1, 2]))
    assert [sent.node for sent, _ in post.take()] == [1]
    assert post.busy == {2}, "a device that has gone is expected back"
    grid.gone = set()
    assert post.take() == []
    arrived[2] = time.monotonic()
    assert [sent.node for sent, _ in post.take()] == [2]
    assert post.busy == set()
    assert grid.count == 3


@pytest.mark.flower
def test_a_device_that_stays_away_is_not_waited_for_longer_than_a_minute(
    grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ondevice.fleet.post import RETURN_S
    from ondevice.fleet.returns import ReturningPost

    now = [100.0]
    monkeypatch.setattr("ondevice.fleet.post.time.monotonic", lambda: now[0])
    post = ReturningPost(grid, 600.0, dict)
    grid.gone = {2}
    post.send(messages([2]))
    assert post.take() == []
    now[0] += RETURN_S + 1
    grid.nodes = []
    assert post.take() == [], "nobody else is here: the link may be down"
    grid.nodes = [1]
    ((sent, reply),) = post.take()
    assert (sent.node, reply) == (2, None)


@pytest.mark.flower
def test_a_restarted_server_gives_a_device_its_old_number_and_lets_it_in_at_once() -> None:
    pytest.importorskip("flwr", reason="Flower is not installed; try: make fleet-test")
    from ondevice.fleet.grid import in_memory

    numbers = set()
    for _ in range(2):
        state = in_memory().state()
        number = state.create_node("me", "me", b"a key", 30.0)
        assert state.activate_node(number, 30.0)
        assert state.activate_node(number, 30.0), "its predecessor was killed a moment ago"
        assert state.get_node_id_by_public_key(b"a key") == number
        numbers.add(number)
    assert len(numbers) == 1


def test_an_outage_is_said_once_and_so_is_its_end(tmp_path: Path) -> None:
    said: list[str] = []
    standing = Standing(tmp_path, "fleet.example:9092", said.append)
    for news in (News.CONNECTED, News.REPLIED, *[News.UNREACHABLE] * 3):
        standing.hear(news)
    assert "cannot be reached" in standing_of(tmp_path)["why"]
    standing.hear(News.CONNECTED)
    assert standing_of(tmp_path)["why"] == ""
    assert [line.partition(" ")[0] for line in said] == ["connected", "the", "connected"]
    assert "again, after 0 s" in said[-1]


def test_a_round_without_a_devices_reply_reaches_its_page_and_its_exit_status(
    tmp_path: Path,
) -> None:
    standing = Standing(tmp_path, "fleet.example:9092", lambda line: None)
    standing.hear(News.CONNECTED)
    standing.failed_in(3, "the rows have no label")
    assert standing_of(tmp_path)["why"] == "round 4 failed: the rows have no label"
    with pytest.raises(FleetError, match="did not reply in 1 rounds") as failure:
        standing.check()
    assert "the rows have no label" in str(failure.value)
    standing.replied(3)
    standing.check()
    assert standing_of(tmp_path)["why"] == ""


def test_devices_try_again_after_longer_waits_that_differ() -> None:
    drawn = [[next(delays) for _ in range(9)] for delays in (Delays(), Delays())]
    assert drawn[0] != drawn[1]
    for waits in drawn:
        assert waits[0] <= 0.5
        assert max(waits) <= 15.0
        assert min(waits[-2:]) >= 7.5


def test_a_damaged_standing_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "standing.json").write_text(json.dumps([1]))
    assert standing_of(tmp_path) == {}
