"""Who may ask what: tokens, sessions, hosts, origins, sizes, headers, and nothing of it in a log."""

from __future__ import annotations

import http.client
import http.server
import json
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from ondevice.server import security
from ondevice.server.client import RefusedError
from ondevice.server.guard import BODY_BYTES, CSP
from ondevice.server.store import Store
from ondevice.server.uploads import PART_BYTES
from tests.server.running import DaemonProcess, refused, rows
from tests.warm import Warm


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[DaemonProcess]:
    """A daemon that needs a token."""
    folder = tmp_path_factory.mktemp("closed")
    store = Store(folder / "store")
    token = security.create_token(store, "tests")
    store.close()
    with DaemonProcess(folder / "store", token=token, python=warm.python) as daemon:
        yield daemon


def send(
    daemon: DaemonProcess,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, str], bytes]:
    """A request with these headers and no others."""
    host, port = daemon.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.putrequest(
            method, path, skip_host="Host" in (headers or {}), skip_accept_encoding=True
        )
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if body is not None and "Content-Length" not in (headers or {}):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        connection.close()


def bearer(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize(
    "path",
    ["/", "/v1/health", "/v1/jobs", "/v1/jobs/none", "/nothing", "/metrics", "/v1/openapi.json"],
)
def test_every_answer_carries_the_headers(served, path: str) -> None:
    status, headers, _ = send(served.daemon, "GET", path)
    assert status in (200, 404)
    assert (
        headers["content-security-policy"] == CSP
        and "unsafe" not in CSP
        and "default-src 'none'" in CSP
    )
    assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"
    assert (
        headers["referrer-policy"] == "no-referrer"
        and headers["cross-origin-resource-policy"] == "same-origin"
    )
    assert "server" not in headers and "access-control-allow-origin" not in headers
    if path.startswith("/v1"):
        assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example", "", "[", "[::1"],
)
def test_another_name_is_dns_rebinding(served, host: str) -> None:
    status, headers, _ = send(served.daemon, "GET", "/v1/jobs", headers={"Host": host})
    assert status == 421 and headers["content-security-policy"] == CSP


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:8765", "LOCALHOST"])
def test_this_machine_has_several_names(served, host: str) -> None:
    assert send(served.daemon, "GET", "/v1/health", headers={"Host": host})[0] == 200


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_another_page_changes_nothing(served, headers: dict[str, str]) -> None:
    for method, path in (("POST", "/v1/jobs"), ("POST", "/v1/adapters/rollback"), ("DELETE", "/v1/jobs/x"),
                         ("POST", "/v1/session"), ("PATCH", "/v1/jobs/x")):  # fmt: skip
        assert send(served.daemon, method, path, b"{}", JSON | headers)[0] == 403


OTHER_PAGES = (
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"},
)


@pytest.mark.parametrize("headers", OTHER_PAGES)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_another_page_reads_nothing(served, method: str, headers: dict[str, str]) -> None:
    for path in (
        "/v1/models",
        "/v1/jobs",
        "/v1/health",
        "/v1/openapi.json",
        "/metrics",
        "/v1/thumbs/export",
    ):
        assert send(served.daemon, method, path, headers=headers)[0] == 403


def test_a_link_to_the_page_may_be_followed(served) -> None:
    visit = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    assert send(served.daemon, "GET", "/", headers=visit)[0] == 200
    assert send(served.daemon, "GET", "/", headers=visit | {"Sec-Fetch-Dest": "iframe"})[0] == 403
    assert (
        send(served.daemon, "GET", "/js/app.js", headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
    )
    for own in ({"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}, {}):
        assert send(served.daemon, "GET", "/v1/jobs", headers=own)[0] == 200


def test_no_get_leaves_the_machine(tmp_path, root: Path) -> None:
    """Every GET of the API, with a hub id wherever text is taken, while the hub is a server that counts."""
    visits: list[str] = []

    class Hub(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            visits.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HOME": str(tmp_path / "hub"), "HF_TOKEN": "hf_the-owner-s"}
    try:
        with DaemonProcess(tmp_path / "store", environment=environment) as daemon:
            dataset = daemon.client.upload("dataset", rows(tmp_path / "rows.jsonl"))["id"]
            for path, operations in daemon.client.ask("GET", "/v1/openapi.json")["paths"].items():
                if "get" in operations:
                    names = [
                        one["name"]
                        for one in operations["get"].get("parameters", [])
                        if one["in"] == "query"
                    ]
                    asked = urlencode(
                        dict.fromkeys(
                            {*names, "model"} - {"limit", "bytes", "points"}, "some/model"
                        )
                    )
                    send(daemon, "GET", f"{re.sub(r'{.*?}', dataset, path)}?{asked}")
            assert visits == []
            with pytest.raises(RefusedError):  # a POST does, so the hub above is one that is asked
                daemon.client.ask(
                    "POST", f"/v1/datasets/{dataset}/preview", {"model": "some/model"}
                )
            assert any("some/model" in path for path in visits)
            seen = len(visits)
            daemon.client.ask("POST", "/v1/method", {"model": "some/other"})
            assert len(visits) > seen
    finally:
        server.shutdown()


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_forms_are_not_taken(served, kind: str) -> None:
    body = json.dumps({"kind": "dataset", "name": "x.jsonl", "bytes": 1}).encode()
    headers = {"Content-Type": kind} if kind else {}
    assert send(served.daemon, "POST", "/v1/uploads", body, headers)[0] == 415


def test_its_own_page_may(served) -> None:
    own = {"Origin": served.daemon.address, "Sec-Fetch-Site": "same-origin"}
    status, _, body = send(served.daemon, "POST", "/v1/jobs", b"{}", JSON | own)
    assert status == 422 and b"dataset" in body


def test_bodies_have_a_size(served) -> None:
    daemon = served.daemon
    octets = {"Content-Type": "application/octet-stream"}
    assert send(daemon, "POST", "/v1/jobs", b" " * (BODY_BYTES + 1), JSON)[0] == 413
    assert send(daemon, "PUT", "/v1/uploads/x?offset=0", b" " * (PART_BYTES + 1), octets)[0] == 413
    assert (
        send(daemon, "POST", "/v1/jobs", b"{}", JSON | {"Content-Length": "99999999999"})[0] == 413
    )
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    chunked = b"".join([chunk] * (BODY_BYTES // 0x10000 + 1)) + b"0\r\n\r\n"
    host, port = daemon.address.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    connection.putrequest("POST", "/v1/jobs")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    connection.send(chunked)
    assert connection.getresponse().status == 413
    connection.close()
    with refused(422):
        served.client.ask(
            "POST", "/v1/uploads", {"kind": "adapter", "name": "x", "bytes": 60 << 30}
        )


@pytest.mark.parametrize(
    "path",
    [
        "/v1/jobs/..%2f..%2fetc%2fpasswd", "/v1/jobs/%2e%2e/log", "/v1/jobs/../../etc/passwd", "/../ondevice.db",
        "/%2e%2e/%2e%2e/etc/passwd", "/..%2f..%2fetc/passwd", "/v1/adapters/..%2f..%2fx/download",
        "/v1/adapters/%00/download", "/v1/datasets/a..b/preview?model=tiny:llama", "//etc/passwd", "/\\..\\x",
        "/v1/uploads/.%2e", "/v1/jobs/JOB-1", "/v1/jobs/" + "a" * 65,
    ],
)  # fmt: skip
def test_no_path_leads_out_of_the_store(served, path: str) -> None:
    status, _, body = send(served.daemon, "GET", path)
    assert status in (404, 405, 422) and b"root:" not in body and b"SQLite" not in body


def test_nothing_without_the_token(closed) -> None:
    document = closed.client.ask("GET", "/v1/openapi.json")
    open_ones = {("get", "/v1/health"), ("post", "/v1/session"), ("delete", "/v1/session")}
    for path, operations in document["paths"].items():
        for method in operations:
            status = send(closed, method.upper(), re.sub(r"\{\w+\}", "x", path), b"{}", JSON)[0]
            assert ((method, path) in open_ones) == (status != 401), (method, path, status)
    assert send(closed, "GET", "/v1/health")[0] == 200
    assert send(closed, "GET", "/v1/openapi.json")[0] == 401
    assert send(closed, "GET", "/v1/jobs", headers=bearer(closed.token))[0] == 200


def test_a_browser_exchanges_the_token_for_a_cookie(closed) -> None:
    body = json.dumps({"token": closed.token}).encode()
    status, headers, content = send(closed, "POST", "/v1/session", body, JSON)
    cookie = headers["set-cookie"]
    assert (
        status == 200
        and "HttpOnly" in cookie
        and "SameSite=strict" in cookie
        and str(closed.token) not in cookie
    )
    pair = {"Cookie": cookie.partition(";")[0], "X-Ondevice-Key": key_of(content)}
    assert send(closed, "GET", "/v1/jobs", headers=pair)[0] == 200
    assert send(closed, "DELETE", "/v1/session", headers=pair)[0] == 200
    assert send(closed, "GET", "/v1/jobs", headers=pair)[0] == 401
    assert (
        send(closed, "GET", "/v1/jobs", headers=bearer(pair["Cookie"].partition("=")[2]))[0] == 401
    )


def key_of(content: bytes | str) -> str:
    """Return the page's half of a session from the response that opened it."""
    return json.loads(content)["key"]


def test_a_cookie_that_another_port_of_the_host_received_opens_nothing(closed) -> None:
    body = json.dumps({"token": closed.token}).encode()
    _, headers, content = send(closed, "POST", "/v1/session", body, JSON)
    cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
    key = key_of(content)
    assert len(key) == 22 and key not in headers["set-cookie"]
    for wrong in (cookie, cookie | {"X-Ondevice-Key": key[:-1]}, {"X-Ondevice-Key": key}):
        assert send(closed, "GET", "/v1/jobs", headers=wrong)[0] == 401
        assert send(closed, "DELETE", "/v1/jobs/x", headers=wrong)[0] == 401
    assert send(closed, "GET", f"/v1/jobs?key={key}", headers=cookie)[0] == 200
    assert send(closed, "DELETE", "/v1/session", headers=cookie)[0] == 200
    assert send(closed, "GET", f"/v1/jobs?key={key}", headers=cookie)[0] == 200, "not ended by it"


def test_a_session_is_of_one_port_only(closed) -> None:
    body = json.dumps({"token": closed.token}).encode()
    _, headers, content = send(closed, "POST", "/v1/session", body, JSON)
    cookie = headers["set-cookie"]
    name, secret = cookie.partition(";")[0].split("=")
    key = {"X-Ondevice-Key": key_of(content)}
    port = closed.address.rpartition(":")[2]
    assert name == f"ondevice_session_{port}" and "Path=/" in cookie and "Domain" not in cookie
    assert send(closed, "GET", "/v1/jobs", headers=key | {"Cookie": f"{name}={secret}"})[0] == 200
    for other in ("ondevice_session", "ondevice_session_1", f"__Host-{name}"):
        wrong = key | {"Cookie": f"{other}={secret}"}
        assert send(closed, "GET", "/v1/jobs", headers=wrong)[0] == 401


def test_no_secret_is_written_down(closed, tmp_path) -> None:
    secrets = [str(closed.token), "odt_0123456789ab_made-up-secret", "hunter2-hunter2"]
    body = json.dumps({"token": secrets[0]}).encode()
    _, headers, content = send(closed, "POST", "/v1/session", body, JSON)
    cookie = headers["set-cookie"].partition(";")[0]
    secrets += [cookie.partition("=")[2], key_of(content)]
    for secret in secrets:
        send(closed, "GET", f"/v1/jobs?key={secret}", headers={"Cookie": cookie})
        send(closed, "GET", f"/v1/jobs?token={secret}", headers=bearer(secret))
        send(
            closed,
            "GET",
            f"/v1/jobs/{secret}",
            headers={"Cookie": f"{cookie.partition('=')[0]}={secret}"},
        )
        send(
            closed, "POST", "/v1/session", json.dumps({"token": secret, "x": secret}).encode(), JSON
        )
    send(closed, "GET", "/v1/jobs", headers={"Cookie": "x" * 300})
    time.sleep(0.2)
    for path in [*closed.store.rglob("*"), closed.errors]:
        if path.is_file():
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in secrets), path
    mode = (closed.store / "ondevice.db").stat().st_mode & 0o777
    assert mode == 0o600 and closed.store.stat().st_mode & 0o777 == 0o700
    with sqlite3.connect(closed.store / "ondevice.db") as db:
        kept = [row[0] for row in db.execute("SELECT sha256 FROM tokens WHERE kind = 'token'")]
    assert len(kept) == 1 and len(kept[0]) == 64


def test_wrong_tokens_have_to_wait(closed) -> None:
    """Last of the daemon's tests: afterwards this address waits."""
    answers = [
        send(closed, "GET", "/v1/jobs", headers=bearer(f"odt_000000000000_{i}")) for i in range(14)
    ]
    statuses = [status for status, _, _ in answers]
    assert statuses[-1] == 429 and set(statuses) <= {401, 429} and statuses == sorted(statuses)
    assert 1 <= int(answers[-1][1]["retry-after"]) <= 61
    # Behind a proxy everybody has this address: the right token passes, whoever else guesses.
    assert send(closed, "GET", "/v1/jobs", headers=bearer(closed.token))[0] == 200
    assert (
        send(closed, "POST", "/v1/session", json.dumps({"token": closed.token}).encode(), JSON)[0]
        == 200
    )
    assert (
        send(
            closed,
            "POST",
            "/v1/session",
            json.dumps({"token": "odt_000000000000_9"}).encode(),
            JSON,
        )[0]
        == 429
    )
    assert send(closed, "GET", "/v1/health")[0] == 200


def test_beyond_this_machine_a_revoked_last_token_opens_nothing(tmp_path) -> None:
    store = Store(tmp_path / "store")
    token = security.create_token(store)
    with DaemonProcess(tmp_path / "store", "--host", "0.0.0.0", token=token) as daemon:
        assert daemon.client.jobs() == []
        security.revoke(store, str(security.check(store, token)))
        assert send(daemon, "GET", "/v1/jobs")[0] == 401
        assert send(daemon, "GET", "/", headers={"Host": "["})[0] == 421
        assert json.loads(send(daemon, "GET", "/v1/health")[2])["token_needed"]
    store.close()


def test_the_daemon_reads_no_pickle(root: Path) -> None:
    """Nothing in the server's code, and nothing that it is given, is unpickled."""
    words = (
        "pickle",
        "torch.load",
        "joblib",
        "dill",
        "yaml.load(",
        "eval(",
        "exec(",
        "trust_remote_code=True",
    )
    collected: list[Any] = [
        (path.name, word)
        for path in (root / "ondevice" / "server").rglob("*.py")
        for word in words
        if word in path.read_text()
        and not (word == "pickle" and path.name in ("unpack.py", "security.py"))
    ]
    assert collected == []


def test_a_revoked_last_token_leaves_the_daemon_closed(tmp_path) -> None:
    store = Store(tmp_path / "store")
    token = security.create_token(store)
    with DaemonProcess(tmp_path / "store", token=token) as daemon:
        security.revoke(store, str(security.check(store, token)))
        for _ in range(2):
            status, _, body = send(daemon, "GET", "/v1/jobs")
            assert status == 401 and security.NONE_LEFT in json.loads(body)["message"]
            assert "ondevice serve token" in json.loads(body)["hint"]
            assert json.loads(send(daemon, "GET", "/v1/health")[2])["token_needed"]
            daemon.stop()
            daemon.start()
        again = security.create_token(store)
        assert send(daemon, "GET", "/v1/jobs", headers=bearer(again))[0] == 200
        assert [row["name"] for row in security.list_tokens(store)] == [""]
    store.close()
