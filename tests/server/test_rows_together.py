"""Rows of requests that wait together are predicted together, with the numbers that each has alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ondevice.api.predict import ROWS_AT_ONCE, Predictor
from ondevice.core.errors import DataError
from ondevice.models import load_model
from ondevice.server import room
from ondevice.server.engine.answer import Answer
from ondevice.server.engine.engine import Engine
from ondevice.server.engine.rows import Rows
from tests.server.asked import Asked

TEXTS = ("good", "a bad film that nobody needs, and long", "so so", "fine" * 9, "é", "the end")


def reviews(count: int, first: int = 0) -> list[Any]:
    return [{"sentence": f"{TEXTS[(first + n) % 6]} {n}"} for n in range(count)]


def questions(count: int) -> list[Any]:
    return [{"title": "a", "context": TEXTS[n % 6], "question": f"who {n}?"} for n in range(count)]


def begin(asked: Asked, number: int, rows: list[Any], task: str = "sst2", **more: Any) -> None:
    asked.begin(
        number, "predict", model="tiny:llama", rows=rows, folder=None, name="m", task=task, **more
    )


def values(requests: dict[int, list[Any]], **more: Any) -> dict[int, dict[str, Any]]:
    """Return what requests that begin together get."""
    asked = Asked()
    for number, rows in requests.items():
        begin(asked, number, rows, **more)
    asked.finish()
    lasts = {number: asked.sent[number][-1] for number in requests}
    assert all("value" in last for last in lasts.values()), lasts
    return {number: last["value"] for number, last in lasts.items()}


def alone(requests: dict[int, list[Any]], **more: Any) -> dict[int, dict[str, Any]]:
    return {number: values({number: rows}, **more)[number] for number, rows in requests.items()}


def test_labels_of_several_requests_are_scored_together_with_the_numbers_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = {1: reviews(3), 2: reviews(20, 2), 3: [*reviews(2, 4), {"other": 1}]}
    expected = alone(requests)
    scored: list[int] = []
    own = Predictor._scores

    def counted(self: Predictor, dataset: Any, items: list[Any]) -> Any:
        scored.append(len(items))
        return own(self, dataset, items)

    monkeypatch.setattr(Predictor, "_scores", counted)
    found = values(requests)
    assert scored == [ROWS_AT_ONCE - 1, 10], "one row of 26 cannot be predicted"
    for number, value in found.items():
        assert len(value["data"]) == len(requests[number])
        for row, other in zip(value["data"], expected[number]["data"], strict=True):
            assert row["index"] == other["index"] and row["prediction"] == other["prediction"]
            assert row["reason"] == other["reason"]
            for label, probability in row["probabilities"].items():
                assert probability == pytest.approx(other["probabilities"][label], abs=1e-5)
    assert found[3]["not_predicted"][0]["row"] == 3 and found[3]["predicted"] == 2


def test_answers_of_several_requests_are_written_together_and_are_those_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = {1: questions(1), 2: questions(19), 3: [*questions(2), {"other": 1}]}
    options = {"task": "squad", "max_new_tokens": 7}
    expected = alone(requests, **options)
    most: list[int] = []
    own = Rows._write

    def counted(self: Rows) -> Any:
        went_on = own(self)
        most.append(len({id(request) for request in went_on}))
        return went_on

    monkeypatch.setattr(Rows, "_write", counted)
    found = values(requests, **options)
    assert max(most) == 3
    for number, value in found.items():
        assert value["data"] == expected[number]["data"]
    assert found[2]["cut"] == expected[2]["cut"] and found[3]["predicted"] == 2


def test_a_short_request_ends_before_a_long_one_that_came_first() -> None:
    asked = Asked()
    begin(asked, 1, reviews(200))
    asked.work.step()
    begin(asked, 2, reviews(2))
    while "value" not in asked.sent.get(2, [{}])[-1]:
        asked.work.step()
    assert "value" not in asked.sent[1][-1]
    asked.work.take({"cancel": 1})
    assert asked.work.is_idle and asked.sent[1][-1]["value"] is None


def test_a_request_that_cannot_begin_leaves_the_others() -> None:
    asked = Asked()
    begin(asked, 1, reviews(2))
    begin(asked, 2, [{"other": 1}])
    asked.finish()
    assert isinstance(asked.error(2), DataError)
    assert asked.sent[1][-1]["value"]["predicted"] == 2


def test_answers_wait_for_memory_and_the_only_one_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ondevice.server.engine.rows.has_room", lambda *_: False)
    options = {"task": "squad", "max_new_tokens": 3}
    found = values({1: questions(2), 2: questions(1)}, **options)
    assert [value["predicted"] for value in found.values()] == [2, 1]


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)])
def test_texts_are_kept_at_the_longest_s_length_next_to_a_job(
    monkeypatch: pytest.MonkeyPatch, spare: int, fits: bool
) -> None:
    loaded = load_model("tiny:llama")
    need = (3 * 10 - 4) * room.cache_bytes(loaded.dims, 4)  # float32
    monkeypatch.setattr(room, "job_wants", lambda device, job: 1000 if job else 0)
    monkeypatch.setattr(room, "usable_bytes", lambda device: need + 1000 + spare)
    assert room.has_room(loaded, [10, 7, 9], 4, {"id": "job"}) is fits


def test_only_rows_for_the_same_model_and_task_run_together() -> None:
    async def answer(call: str, **arguments: Any) -> Answer:
        return Answer("a", call, {"model": "m", **arguments}, lambda _: None)

    async def fits(first: dict[str, Any], second: dict[str, Any]) -> bool:
        engine = Engine()
        engine._active[1] = await answer(**first)
        return engine._fits(await answer(**second))

    rows = {"call": "predict", "task": "sst2", "folder": "f"}
    for other, expected in (
        ({**rows, "max_new_tokens": 3}, True), ({**rows, "task": "squad"}, False),
        ({**rows, "folder": "g"}, False), ({**rows, "adapter": "a"}, False),
        ({"call": "complete"}, False),
    ):  # fmt: skip
        assert asyncio.run(fits(rows, other)) is expected, other
