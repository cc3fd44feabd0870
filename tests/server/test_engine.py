"""The engine behind the routes: order, leaving, a full queue, a dying process; nothing is stuck."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from benchmarks.serve.clients import complete, get, request, storm
from ondevice.core.errors import BusyError, TrainingError
from ondevice.models import save_tiny
from ondevice.server.connections import reader_state
from ondevice.server.engine import engine as engines
from ondevice.server.engine.engine import Engine
from ondevice.server.engine.fair import FairQueue, QueueFullError
from tests.server.running import DaemonProcess

LONG = 60_000
"""Tokens of an answer, or a prompt, that does not end while a test looks."""
ANSWER = {"model": "long", "prompt": "a", "max_tokens": LONG, "temperature": 0}
PROMPT = {"model": "long", "prompt": [7] * LONG, "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, warm: Any) -> Any:
    store = tmp_path_factory.mktemp("engine") / "store"
    save_tiny(store / "models" / "long", "llama", layers=1, max_positions=65_536)
    limits = {"connections.READER_S": 8.0, "routes.asking.KEEP_ALIVE_S": 1.0}
    with DaemonProcess(store, python=warm.python, limits=limits) as daemon:
        yield daemon.address


@pytest.fixture(autouse=True)
def begun_warm(warm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of an engine in this one begin with torch imported; a kill of the command is
    theirs."""
    monkeypatch.setattr(sys, "executable", str(warm.python))


@pytest.fixture
def quiet(address: str) -> Any:
    """The address of a daemon that nobody asks, also after the test."""
    asyncio.run(until(address, waiting=0, running=0))
    yield address
    asyncio.run(until(address, waiting=0, running=0))


async def until(address: str, **figures: int) -> None:
    """Wait until so many requests wait, or run."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answers = (await get(address, "/v1/metrics"))["answers"]
        if all(answers[name] == count for name, count in figures.items()):
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"expected {figures}, received {answers}")


def listens(process: int, address: str) -> bool:
    """True for the daemon of an address; other tests run daemons of their own meanwhile."""
    port = urlsplit(address).port
    open_now = psutil.Process(process).net_connections("tcp")
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in open_now)


def in_turns(queue: FairQueue[str]) -> list[str]:
    taken = []
    while (client := queue.find(lambda client: True, lambda item: True)) is not None:
        taken.append(queue.take(client))
    return taken


def test_clients_take_turns_and_each_ones_requests_keep_their_order() -> None:
    queue: FairQueue[str] = FairQueue(10, 10)
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.add(item[0], item)
    assert queue.remove("c", "c1") and not queue.remove("c", "c1")
    assert len(queue) == 5 and in_turns(queue) == ["a1", "b1", "c2", "a2", "a3"]


def test_a_request_that_does_not_fit_keeps_the_others_behind_it_but_no_full_client_does() -> None:
    queue: FairQueue[str] = FairQueue(10, 10)
    queue.add("a", "a1")
    queue.add("b", "b1")
    assert queue.find(lambda client: True, lambda item: item != "a1") is None
    assert queue.find(lambda client: client != "a", lambda item: item != "a1") == "b"


def test_a_full_queue_refuses_one_client_and_then_everybody() -> None:
    queue: FairQueue[str] = FairQueue(4, 3)
    for number in range(3):
        queue.check_room("a", 1)
        queue.add("a", f"a{number}")
    with pytest.raises(QueueFullError):
        queue.check_room("a", 1)
    with pytest.raises(QueueFullError):
        queue.check_room("b", 2)
    queue.check_room("b", 1)


Asking = Callable[[Engine], Coroutine[Any, Any, None]]


def with_engine(work: Asking) -> None:
    """Run work with an engine of its own in this process's event loop."""

    async def run() -> None:
        engine = Engine()
        try:
            await work(engine)
        finally:
            engine.close()

    asyncio.run(run())


def tiny(**fields: Any) -> dict[str, Any]:
    place = {"model": "tiny:llama", "artifact": None, "adapter": None}
    return place | {"prompt": "a", "max_new_tokens": 8, "temperature": 0.0} | fields


async def collect(parts: AsyncIterator[Any]) -> list[Any]:
    return [part async for part in parts]


def test_a_killed_process_fails_what_it_ran_and_what_waits_is_answered() -> None:
    async def work(engine: Engine) -> None:
        answers = engine.ask("a", "complete", [tiny(max_new_tokens=400) for _ in range(12)])
        await answers[0].next()
        assert engine.figures() == {"waiting": 12 - engines.ROWS_OF_ONE, "running": 8}
        assert engine._process is not None
        engine._process.kill()
        ended = await asyncio.gather(*map(collect, answers), return_exceptions=True)
        assert [type(one) for one in ended] == [TrainingError] * 8 + [list] * 4
        assert "ended without a reply" in str(ended[0])

    with_engine(work)


def test_a_process_that_cannot_start_fails_its_requests_and_no_later_ones(monkeypatch) -> None:
    async def work(engine: Engine) -> None:
        with monkeypatch.context() as broken:
            broken.setattr(engines, "python_command", lambda *words: ["/no/such/python"])
            (answer,) = engine.ask("a", "complete", [tiny()])
            with pytest.raises(TrainingError):
                await asyncio.wait_for(answer.next(), 60)
        (answer,) = engine.ask("a", "complete", [tiny()])
        assert await answer.next() == {"prompt_tokens": 1}

    with_engine(work)


def test_a_reader_of_a_cancelled_answer_stops_waiting() -> None:
    async def work(engine: Engine) -> None:
        (answer,) = engine.ask("a", "complete", [tiny()])
        reading = asyncio.create_task(answer.next())
        await asyncio.sleep(0)
        answer.cancel()
        assert await asyncio.wait_for(reading, 5) is None and await answer.next() is None

    with_engine(work)


def test_other_models_take_turns_and_an_error_ends_one_request() -> None:
    async def work(engine: Engine) -> None:
        answers = engine.ask("a", "complete", [tiny(), tiny(model="tiny:qwen2"), tiny()])
        answers += engine.ask("b", "complete", [tiny(prompt=[9999])])
        ended = await asyncio.gather(*map(collect, answers), return_exceptions=True)
        assert [type(one).__name__ for one in ended] == ["list", "list", "list", "ConfigError"]
        assert ended[0] == ended[2] != ended[1]
        assert engine.figures() == {"waiting": 0, "running": 0}

    with_engine(work)


def test_a_closed_engine_ends_every_request() -> None:
    async def work(engine: Engine) -> None:
        answers = engine.ask("a", "complete", [tiny(max_new_tokens=400) for _ in range(12)])
        await answers[0].next()
        engine.close()
        ended = await asyncio.gather(*map(collect, answers), return_exceptions=True)
        assert [type(one) for one in ended] == [BusyError] * 12
        with pytest.raises(BusyError):
            engine.ask("a", "complete", [tiny()])

    with_engine(work)


def test_an_idle_process_ends_and_a_busy_one_stays() -> None:
    async def work(engine: Engine) -> None:
        (answer,) = engine.ask("a", "complete", [tiny(max_new_tokens=400)])
        await answer.next()
        process = engine._process
        engine.end_if_idle()
        assert process is not None and process.poll() is None
        answer.cancel()
        while engine.figures()["running"]:
            await asyncio.sleep(0.02)
        engine.end_if_idle(60)
        assert process.poll() is None
        engine.end_if_idle()
        assert process.poll() is not None and engine._process is None

    with_engine(work)


@pytest.mark.parametrize("body", [ANSWER, PROMPT], ids=["in its answer", "in its prompt"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_when_its_client_leaves(quiet: str, body: dict, stream: bool) -> None:
    async def work() -> None:
        async with request(quiet, "/v1/completions", body | {"stream": stream}):
            await until(quiet, running=1)
        await until(quiet, running=0)

    asyncio.run(work())


def test_a_long_prompt_is_read_next_to_other_answers_and_says_that_it_is_alive(quiet: str) -> None:
    async def work() -> None:
        async with request(quiet, "/v1/completions", PROMPT | {"stream": True}) as reading:
            await until(quiet, running=1)
            other = await complete(quiet, "long", "two", prompt="a", max_tokens=4)
            assert other["usage"]["completion_tokens"] == 4
            assert await reading.head() == 200
            lines = []
            async for line in reading.lines():
                lines.append(line)
                if len(lines) == 2:
                    break
            assert lines == [": keep-alive"] * 2

    asyncio.run(work())


def test_a_reader_that_takes_nothing_is_cut_and_delays_nobody(quiet: str) -> None:
    async def work() -> None:
        body = ANSWER | {"stream": True, "logprobs": 20}
        async with request(quiet, "/v1/completions", body, receive_bytes=4096) as stalled:
            assert await stalled.head() == 200
            stalled.writer.transport.pause_reading()  # type: ignore[attr-defined]
            other = await complete(quiet, "long", "two", prompt="a", max_tokens=4)
            assert other["status"] == 200
            await until(quiet, running=0)

    asyncio.run(work())


def test_another_clients_request_does_not_wait_for_all_of_the_first(quiet: str) -> None:
    async def work() -> None:
        done: list[str] = []

        async def ask(client: str) -> None:
            answer = await complete(quiet, "long", client, prompt="a", max_tokens=100)
            assert answer["status"] == 200
            done.append(client)

        first = [asyncio.create_task(ask("one")) for _ in range(40)]
        await until(quiet, running=engines.ROWS_OF_ONE)
        await ask("two")
        assert len(done) < 30
        await asyncio.gather(*first)

    asyncio.run(work())


def test_a_full_queue_says_when_to_come_back(quiet: str) -> None:
    """Control answers meanwhile, and those who wait can leave."""

    async def work() -> None:
        async with AsyncExitStack() as stack:

            async def ask() -> Any:
                return await stack.enter_async_context(request(quiet, "/v1/completions", ANSWER))

            await asyncio.gather(*(ask() for _ in range(engines.ROWS_OF_ONE)))
            await until(quiet, running=engines.ROWS_OF_ONE)
            await asyncio.gather(*(ask() for _ in range(engines.WAITING_OF_ONE)))
            await until(quiet, waiting=engines.WAITING_OF_ONE)
            refused = await ask()
            assert await refused.head() == 409
            assert 1 <= int(refused.headers["retry-after"]) <= engines.LONGEST_RETRY_S
            assert b"the queue of requests to the model is full" in await refused.body()
            other = await complete(quiet, "long", "two", prompt="a", max_tokens=2)
            assert other["status"] == 200

    asyncio.run(work())


def test_nothing_is_stuck_after_50_requests_that_leave_and_stall_and_two_kills(quiet: str) -> None:
    async def kill() -> bool:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or ()
            if "ondevice.server.engine.process" in words and listens(int(words[-1]), quiet):
                process.kill()
                return True
        return False

    async def work() -> None:
        outcomes, _ = await storm(quiet, "long", 50, 25, kill=kill, kills=2)
        assert outcomes.pop("kills") == 2
        assert outcomes.total() == 50 and not outcomes["stuck"], outcomes
        assert outcomes["answered"] and outcomes["left"], outcomes

    asyncio.run(work())


def test_a_reader_that_takes_nothing_is_told_from_a_slow_one() -> None:
    with socket.socket() as server, socket.socket() as client:
        server.bind(("127.0.0.1", 0))
        server.listen()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        own, _ = server.accept()

        class Transport:
            def get_write_buffer_size(self) -> int:
                return 0

            def get_extra_info(self, name: str) -> socket.socket:
                return own

        with own:
            own.setblocking(False)
            assert reader_state(Transport())[0] == 0  # type: ignore[arg-type]
            own.send(b"x" * 100_000)
            time.sleep(0.3)
            unread, taken = reader_state(Transport())  # type: ignore[arg-type]
            time.sleep(0.3)
            assert unread > 0 and reader_state(Transport()) == (unread, taken)  # type: ignore[arg-type]
            while client.recv(1500):
                if reader_state(Transport())[1] > taken:  # type: ignore[arg-type]
                    return
