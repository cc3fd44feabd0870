"""Clients that open connections and do not finish: nobody else waits for them, and they fill no memory."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.server import connections
from ondevice.server.service import own_bytes
from ondevice.server.store import Store
from ondevice.server.uploads import PART_BYTES
from tests.server.running import DaemonProcess, wait_for

CONTROL = ("/v1/health", "/v1/jobs?limit=100", "/v1/system", "/v1/datasets", "/v1/metrics", "/")
SLOWEST_S = 0.5
SOCKETS, QUESTIONS, JOBS, PARTS = 2100, 60, 10_000, 60
HALVES = (
    b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n",
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    b"G",
    b"",
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, warm: Any) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("crowded") / "store", python=warm.python) as running:
        yield running


HEAD_S, SILENT_S, READER_S = 2.0, 4.0, 4.0
"""Of the daemon that is impatient, so that nobody waits for the limits of a real one."""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory, warm: Any) -> Iterator[DaemonProcess]:
    """A daemon with short limits, and a job with a long log."""
    store = Store(tmp_path_factory.mktemp("impatient") / "store")
    folder = store.path("jobs", "job-1")
    folder.mkdir()
    (folder / "worker.log").write_bytes((b"x" * 99 + b"\n") * 40_000)
    query = "INSERT INTO jobs (id, state, priority, spec, created_s) VALUES ('job-1', 'done', 0, '{}', 0)"
    store.connection.execute(query)
    store.close()
    limits = {"HEAD_S": HEAD_S, "SILENT_S": SILENT_S, "READER_S": READER_S}
    named = {f"connections.{name}": value for name, value in limits.items()}
    with DaemonProcess(store.root, python=warm.python, limits=named) as running:
        yield running


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * SOCKETS:
        pytest.skip(f"this system allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SOCKETS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def place(daemon: DaemonProcess) -> tuple[str, int]:
    host, port = daemon.address.removeprefix("http://").split(":")
    return host, int(port)


@contextmanager
def slow_sockets(daemon: DaemonProcess, count: int = SOCKETS) -> Iterator[list[socket.socket]]:
    """Connections that send half a request each, and then nothing."""
    with ExitStack() as stack:
        opened = []
        for number in range(count):
            opened.append(stack.enter_context(socket.create_connection(place(daemon), timeout=30)))
            opened[-1].sendall(HALVES[number % len(HALVES)])
        yield opened


@contextmanager
def waiting_questions(daemon: DaemonProcess, count: int = QUESTIONS) -> Iterator[list[int]]:
    """Questions that have been asked at one moment; yields the list of the statuses that have come."""
    statuses: list[int] = []

    def ask() -> None:
        connection = http.client.HTTPConnection(*place(daemon), timeout=200)
        body = {"model": "tiny:llama", "prompt": "once", "max_tokens": 120}
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            statuses.append(connection.getresponse().status)
        except (OSError, http.client.HTTPException):
            statuses.append(0)
        finally:
            connection.close()

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    yield statuses
    for thread in threads:
        thread.join(200)


def control_times_s(daemon: DaemonProcess, tries: int = 5) -> dict[str, float]:
    """The median time of each control route, over connections of its own; every answer is 200."""
    times: dict[str, list[float]] = {path: [] for path in CONTROL}
    for _ in range(tries):
        for path in CONTROL:
            began = time.perf_counter()
            connection = http.client.HTTPConnection(*place(daemon), timeout=60)
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            connection.close()
            assert response.status == 200, path
            times[path].append(time.perf_counter() - began)
    return {path: statistics.median(values) for path, values in times.items()}


def test_control_answers_beside_2100_half_sent_requests(daemon) -> None:
    with slow_sockets(daemon):
        times = control_times_s(daemon)
    assert max(times.values()) <= SLOWEST_S, times


def test_control_answers_beside_60_questions(daemon) -> None:
    with waiting_questions(daemon) as statuses:
        times = control_times_s(daemon)
        answered = len(statuses)
    assert max(times.values()) <= SLOWEST_S, times
    assert answered < QUESTIONS, "all were answered before control was measured"
    assert set(statuses) <= {200, 409} and statuses.count(200) > 0


@pytest.mark.slow
def test_control_answers_beside_all_of_it_at_once(daemon) -> None:
    store = Store(daemon.store)
    spec = json.dumps({"dataset": "data-1", "model": "tiny:llama", "config": {}, "limits": {}})
    with store.transaction() as db:
        query = (
            "INSERT INTO jobs (id, state, priority, spec, created_s) VALUES (?, 'done', 0, ?, 0)"
        )
        db.executemany(query, [(f"job-{number}", spec) for number in range(JOBS)])
    store.close()
    with slow_sockets(daemon), waiting_questions(daemon) as statuses:
        times = control_times_s(daemon)
        answered = len(statuses)
    assert max(times.values()) <= SLOWEST_S, times
    assert answered < QUESTIONS


def test_parts_that_lack_a_byte_hold_little_memory(daemon) -> None:
    assert daemon.process is not None
    before = own_bytes(daemon.process.pid)
    request = {"kind": "model", "name": "big", "bytes": 2 * PART_BYTES}
    uploads = [daemon.client.ask("POST", "/v1/uploads", request)["id"] for _ in range(PARTS)]
    content = bytes(PART_BYTES - 1)
    with ExitStack() as stack:
        for upload in uploads:
            sender = stack.enter_context(socket.create_connection(place(daemon), timeout=60))
            head = f"PUT /v1/uploads/{upload}?offset=0 HTTP/1.1\r\nHost: localhost\r\n"
            head += (
                f"Content-Type: application/octet-stream\r\nContent-Length: {PART_BYTES}\r\n\r\n"
            )
            sender.sendall(head.encode() + content)
        time.sleep(1.0)
        grown = own_bytes(daemon.process.pid) - before
        assert grown < 96 << 20, f"{grown >> 20} MiB"
    for upload in uploads:
        wait_for(
            lambda name=upload: arrived(daemon, name) > PART_BYTES - (2 << 20),
            "what came is kept",
            20,
        )
        daemon.client.ask("DELETE", f"/v1/uploads/{upload}")


def arrived(daemon: DaemonProcess, upload: str) -> int:
    return daemon.client.ask("GET", f"/v1/uploads/{upload}")["received_bytes"]


def closed_after_s(
    connection: socket.socket, send: Callable[[], object], limit_s: float
) -> tuple[float, bytes]:
    """How long a connection lives on which `send` is called again and again, and what came over it."""
    began, received = time.monotonic(), b""
    connection.settimeout(0.5)
    while time.monotonic() - began < limit_s:
        try:
            send()
            chunk = connection.recv(4096)
            if not chunk:
                break
            received += chunk
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began, received


def test_a_request_that_does_not_arrive_is_closed(impatient) -> None:
    """A head by the byte, a body by the byte, a body that stops, and a connection that says nothing."""
    body = HALVES[1].replace(b"Content-Length: 100", b"Content-Length: 100000")
    kinds: dict[str, tuple[bytes, bytes, float]] = {
        "a slow head": (b"GET / HTTP/1.1\r\nX: ", b"a", HEAD_S),
        "a slow body": (body, b" ", SILENT_S),
        "a body that stops": (body, b"", SILENT_S),
        "silence": (b"", b"", HEAD_S),
    }
    results: dict[str, tuple[float, bytes]] = {}

    def attempt(name: str, first: bytes, more: bytes, limit_s: float) -> None:
        with socket.create_connection(place(impatient), timeout=30) as connection:
            connection.sendall(first)
            results[name] = closed_after_s(
                connection, lambda: connection.sendall(more), limit_s + 10
            )

    threads = [threading.Thread(target=attempt, args=(name, *kind)) for name, kind in kinds.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (_, _, limit_s) in kinds.items():
        seconds, received = results[name]
        assert limit_s - 1 <= seconds <= limit_s + 5, (name, seconds)
        assert received.startswith(b"HTTP/1.1 408 ") or name == "silence", (name, received[:80])
    assert b"did not arrive in time" in results["a slow head"][1]
    assert b'"type": "invalid_request_error"' in results["a slow head"][1]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "sent",
    [b"GARBAGE\r\n\r\n", HEAD + b"X: \x00\r\n\r\n", HEAD + b"Transfer-Encoding: chunked\r\n\r\nZ\r\n"],
)  # fmt: skip
def test_what_is_not_http_is_refused_in_the_form_of_openai(daemon, sent: bytes) -> None:
    with socket.create_connection(place(daemon), timeout=30) as connection:
        connection.sendall(sent)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400
        error = json.loads(response.read())["error"]
    assert error["type"] == "invalid_request_error" and "not valid HTTP" in error["message"]


def test_an_answer_that_nobody_reads_is_given_up(impatient) -> None:
    daemon = impatient
    with ExitStack() as stack:
        assert daemon.process is not None
        process, port = psutil.Process(daemon.process.pid), place(daemon)[1]

        def held() -> int:
            return sum(
                one.status == "ESTABLISHED" and one.laddr.port == port
                for one in process.net_connections()
            )

        for _ in range(20):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(place(daemon))
            reader.sendall(
                b"GET /v1/jobs/job-1/log?bytes=1048576 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
        wait_for(lambda: held() == 20, "the connections", 20)
        time.sleep(HEAD_S)
        wait_for(lambda: held() == 0, "the answers are given up", READER_S + 5)


class Transport:
    """What `Crowd` sees of a connection, without one."""

    def __init__(self, address: str, arriving: bool = True) -> None:
        self.address, self.is_arriving, self.dropped = address, arriving, False

    def drop(self) -> None:
        self.dropped = True
        self.crowd.leave(self)  # type: ignore[arg-type]

    crowd: connections.Crowd


def test_one_client_does_not_take_the_room_of_another(monkeypatch) -> None:
    crowd = connections.Crowd(most=10, most_of_one=6)
    monkeypatch.setattr(Transport, "crowd", crowd, raising=False)
    entered: Any = lambda *given, **named: crowd.enter(Transport(*given, **named))  # type: ignore[arg-type]  # noqa: E731
    busy = [Transport("a", arriving=False) for _ in range(6)]
    assert all(crowd.enter(one) for one in busy)  # type: ignore[arg-type]
    assert not entered("a")  # all of its requests are being answered
    assert all(entered("b") for _ in range(4))
    quiet = next(iter(crowd.clients["b"]))
    assert entered("c") and quiet.dropped and not any(one.dropped for one in busy)
    assert len(crowd.clients["b"]) == 3


def test_the_connection_that_was_silent_for_the_longest_goes_first(monkeypatch) -> None:
    crowd = connections.Crowd(most=100, most_of_one=3)
    monkeypatch.setattr(Transport, "crowd", crowd, raising=False)
    first, second, third = (Transport("a") for _ in range(3))
    for one in (first, second, third):
        assert crowd.enter(one)  # type: ignore[arg-type]
    crowd.moved(first)  # type: ignore[arg-type]
    assert crowd.enter(Transport("a")) and (first.dropped, second.dropped, third.dropped) == (
        False,
        True,
        False,
    )  # type: ignore[arg-type]
