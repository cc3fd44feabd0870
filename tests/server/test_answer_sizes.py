"""Answers have a limit in memory: probabilities that are not streamed, and what a slow client has
not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import BusyError, ConfigError
from ondevice.server.engine import answer as answers
from ondevice.server.engine.answer import Answer, Unread
from ondevice.server.openai_answers import Built
from ondevice.server.openai_requests import MOST_PROBABILITIES, ChatRequest, TextRequest
from ondevice.server.routes import completions

HALF = MOST_PROBABILITIES // 2
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "a"}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (TextRequest, TEXT | {"logprobs": 1, "max_tokens": HALF + 1}),
        (TextRequest, TEXT | {"logprobs": 0, "max_tokens": HALF + 1, "n": 2}),
        (TextRequest, TEXT | {"prompt": ["a"] * 128, "logprobs": 20, "max_tokens": 100}),
        (ChatRequest, CHAT | {"logprobs": True, "top_logprobs": 1, "max_tokens": HALF + 1}),
    ],
)
def test_more_probabilities_than_fit_are_refused_by_name_unless_streamed(
    kind: Any, body: dict[str, Any]
) -> None:

    def refuse(fields: dict[str, Any]) -> None:
        request = kind.model_validate(fields)
        request.check_size(request.asked())

    with pytest.raises(ConfigError) as caught:
        refuse(body)
    assert caught.value.message.startswith("'logprobs'")
    assert "stream" in str(caught.value.hint) and str(MOST_PROBABILITIES) in caught.value.expected
    refuse(body | {"stream": True})
    refuse(body | {"max_tokens": 16})
    refuse({name: one for name, one in body.items() if "logprobs" not in name})


def part(top: int = 2) -> dict[str, Any]:
    token = {"id": 1, "token": "a", "logprob": -1.0, "bytes": [97], "offset": 0}
    return {"text": "a", "tokens": [{**token, "top_logprobs": [token] * top}]}


def with_answers(
    work: Callable[[list[Answer]], Coroutine[Any, Any, None]], count: int = 1
) -> list[Answer]:
    """Run work with answers of one request; return those that have been left."""
    left: list[Answer] = []

    async def run() -> None:
        unread = Unread()
        arguments = {"model": "m", "artifact": None, "adapter": None}
        made = [Answer("a", "complete", arguments, left.append, unread) for _ in range(count)]
        for one in made:
            one.put({"part": {"prompt_tokens": 1}})
        await work(made)

    asyncio.run(run())
    return left


def end(answer: Answer) -> None:
    answer.put({"value": {"finish": "stop", "completion_tokens": 4}})


def test_a_response_without_a_known_length_is_ended_at_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(completions, "MOST_PROBABILITIES", 24)

    async def work(made: list[Answer]) -> None:
        for answer in made:
            for _ in range(4):
                answer.put({"part": part()})
            end(answer)
        built = Built(True, "m", 1, True)
        if len(made) == 2:  # 24 probabilities
            assert (await completions._whole(built, made)).status_code == 200
            return
        with pytest.raises(ConfigError) as caught:
            await completions._whole(built, made)
        assert caught.value.message.startswith("'logprobs'")

    with_answers(work, 2)
    with_answers(work, 3)


def test_a_client_that_reads_too_slowly_is_told_so_and_its_answer_ends(monkeypatch) -> None:
    """The limit is that of the request, whichever of its answers is slow."""
    monkeypatch.setattr(answers, "MOST_UNREAD", 20)

    async def work(made: list[Answer]) -> None:
        first, second = made
        await first.next()
        for _ in range(4):  # four values each
            first.put({"part": part()})
        second.put({"part": part()})
        await asyncio.sleep(0)
        second.put({"part": part()})  # never kept
        end(second)
        assert await second.next() == {"prompt_tokens": 1}
        with pytest.raises(BusyError):
            await second.next()
        assert [await first.next() for _ in range(4)] == [part()] * 4

    (left,) = with_answers(work, 2)
    assert left.arguments["model"] == "m"


def test_a_stream_takes_from_its_answers_only_what_its_client_reads() -> None:
    async def work(made: list[Answer]) -> None:
        for answer in made:
            for _ in range(50):
                answer.put({"part": part()})
            end(answer)
        begun = [asyncio.ensure_future(answer.next()) for answer in made]
        events = completions._events(Built(False, "m", 1, True), made, begun, True)
        seen = [await anext(events) for _ in range(10)]
        await asyncio.sleep(0.01)
        assert made[0]._unread.count >= 4 * (100 - len(seen) - 4)
        seen += [event async for event in events]
        assert len(seen) == 2 * 51 + 2 and seen[-1] == completions.DONE
        assert made[0]._unread.count == 0

    assert with_answers(work, 2) == []


def test_an_error_in_a_stream_is_its_last_event() -> None:
    async def work(made: list[Answer]) -> None:
        made[0].put({"part": part()})
        made[0].put(BusyError("the model is gone"))
        begun = [asyncio.ensure_future(answer.next()) for answer in made]
        events = completions._events(Built(False, "m", 1, True), made, begun, False)
        seen = [event async for event in events]
        assert len(seen) == 2 and b"the model is gone" in seen[1]

    with_answers(work)
