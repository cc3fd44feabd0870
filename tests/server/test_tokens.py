"""Tokens are stored as hashes, wrong ones have to wait, and another machine needs one; TLS."""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import ssl
import subprocess

import pytest

from ondevice.core.errors import ConfigError, DeviceError
from ondevice.server import security
from ondevice.server.client import Client
from ondevice.server.connections import HEAD_S
from ondevice.server.serve import serve
from ondevice.server.store import MissingError, Store
from tests.server.running import DaemonProcess


def test_tries_are_counted_by_address_and_forgotten() -> None:
    now = [0.0]
    tries = security.Tries(lambda: now[0])
    for number in range(security.TRIES):
        assert not tries.wait_s("10.0.0.1")
        tries.failed("10.0.0.1")
        tries.failed(f"2001:db8::{number:x}")
        now[0] += 1
    assert tries.wait_s("10.0.0.1") == pytest.approx(security.WINDOW_S - security.TRIES)
    assert (
        tries.wait_s("2001:db8::ffff") > 0
        and not tries.wait_s("2001:db9::1")
        and not tries.wait_s("10.0.0.2")
    )
    now[0] = security.WINDOW_S
    assert not tries.wait_s("10.0.0.1")
    for number in range(security.Tries.KEPT + 50):
        tries.failed(f"host-{number}")
    assert len(tries._failed) <= security.Tries.KEPT


def test_a_token_is_accepted_until_it_is_revoked(store: Store) -> None:
    assert not security.has_tokens(store)
    one, two = security.create_token(store, "one"), security.create_token(store)
    assert one != two and security.check(store, one) and security.check(store, two)
    first = str(security.check(store, one))
    for wrong in (
        "",
        "odt",
        one[:-1],
        one + "x",
        one.replace("odt", "ods"),
        f"odt_{first}_",
        "\ud800",
        "_" * 9,
    ):
        assert security.check(store, wrong) is None
    session = "".join(security.create_session(store, first))
    assert security.check(store, session, "session") and security.check(store, session) is None
    assert [token["name"] for token in security.list_tokens(store)] == ["one", ""]
    assert one not in json.dumps(security.list_tokens(store))
    store.connection.execute(
        "UPDATE tokens SET expires_s = ? WHERE kind = 'session'", (store.clock.now() - 1,)
    )
    assert security.check(store, session, "session") is None
    session = "".join(security.create_session(store, first))
    security.revoke(store, first)
    assert security.check(store, one) is None and security.check(store, session, "session") is None
    assert security.check(store, two)
    with pytest.raises(MissingError):
        security.revoke(store, first)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "jetson.local"])
def test_listening_elsewhere_demands_a_token(tmp_path, host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(tmp_path / "store", host, 0)
    assert "serve token" in str(caught.value.hint)
    store = Store(tmp_path / "store")
    security.create_token(store)
    security.ensure_guarded(store, host)
    store.close()


def test_both_tls_files_or_none(tmp_path) -> None:
    with pytest.raises(ConfigError) as one:
        serve(tmp_path / "store", tls_cert=tmp_path / "cert.pem")
    assert one.value.received == "one of them"
    with pytest.raises(ConfigError) as absent:
        serve(tmp_path / "store", tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    assert absent.value.expected == "a PEM file"


def test_the_daemon_serves_over_tls(tmp_path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command = ["openssl", "req", *kind, *names, "-keyout", str(key), "-out", str(cert)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    with DaemonProcess(
        tmp_path / "store", "--tls-cert", str(cert), "--tls-key", str(key)
    ) as daemon:
        assert daemon.address.startswith("https://")
        assert Client(daemon.address, ca=cert).health()["status"] == "ok"
        port = int(daemon.address.rpartition(":")[2])
        connection = http.client.HTTPSConnection(
            "127.0.0.1", port, context=ssl.create_default_context(cafile=str(cert)), timeout=20
        )
        connection.request("GET", "/v1/health")
        response = connection.getresponse()
        assert "max-age" in str(response.getheader("Strict-Transport-Security")) and response.read()
        token = security.create_token(Store(tmp_path / "store"))
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/session", json.dumps({"token": token}), headers)
        cookie = str(connection.getresponse().getheader("Set-Cookie"))
        assert (
            cookie.startswith(f"__Host-ondevice_session_{port}=")
            and "Secure" in cookie
            and "Path=/" in cookie
        )
        connection.close()
        with socket.create_connection(("127.0.0.1", port), timeout=2 * HEAD_S) as silent:
            assert silent.recv(1) == b""  # no handshake came
        with pytest.raises(DeviceError):
            Client(daemon.address).health()  # an unknown certificate
