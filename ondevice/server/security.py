"""Access: tokens and sessions (hashed at rest), failed tries by address, hosts, origins."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, QueryParams

from ondevice.core.errors import ConfigError
from ondevice.server.store import MissingError, Store

SESSION_S = 12 * 3600.0
TRIES = 10
WINDOW_S = 60.0
SESSION_KEY_CHARACTERS = 22
"""Of the page's half of a session's secret: some 128 bits; the cookie has as many."""
KEY_HEADER = "x-ondevice-key"
KEY_PARAMETER = "key"
"""Where the page sends its half: in a header, or in the address of a link and of a stream of
events."""
COOKIE = "ondevice_session"
"""Start of the cookie's name (`cookie_name`)."""
REVOKED = "revoked"
"""Kind of the row that remains of a revoked token, so that the store does not become open again."""


NONE_LEFT = "all tokens of this server were revoked, so it refuses all requests"


def create_token(store: Store, name: str = "") -> str:
    """Make a token of 256 random bits, which is shown once; the store only has its SHA-256."""
    return _create(store, "token", "odt", name, None, None)


def create_session(store: Store, token: str) -> tuple[str, str]:
    """Make a session, valid for some hours and only as long as its token.

    A browser sends a cookie to every port of a host, so the cookie is only half of the secret. The
    page keeps the other half in its storage, which belongs to one port, and sends it as
    `KEY_HEADER`.

    Returns:
        The cookie's content and the page's key; neither opens anything without the other.
    """
    secret = _create(store, "session", "ods", "", store.clock.now() + SESSION_S, token)
    middle = len(secret) - SESSION_KEY_CHARACTERS
    return secret[:middle], secret[middle:]


def check(store: Store, secret: str, kind: str = "token") -> str | None:
    """Return the id of the token with this secret, or None, in constant time."""
    parts = secret.split("_", 2)
    name = ""
    if len(parts) == 3:
        name = parts[1]
    row = store.row("SELECT * FROM tokens WHERE id = ? AND kind = ?", name, kind)
    expected = (
        row["sha256"] if row is not None else _digest("")
    )  # compared anyway, so that the time reveals no id
    same = hmac.compare_digest(expected, _digest(secret))
    if (
        row is None
        or not same
        or (row["expires_s"] is not None and row["expires_s"] < store.clock.now())
    ):
        return None
    return str(row["id"])


def has_tokens(store: Store) -> bool:
    """Return True if there is a token."""
    return store.row("SELECT 1 FROM tokens WHERE kind = 'token' LIMIT 1") is not None


def needs_token(store: Store, host: str) -> bool:
    """Return True if a server on `host` requires a token: on a network, and once one was made."""
    if not is_loopback(host):
        return True
    return store.row("SELECT 1 FROM tokens WHERE kind IN ('token', ?) LIMIT 1", REVOKED) is not None


def list_tokens(store: Store) -> list[dict[str, Any]]:
    """List tokens, without their secrets."""
    return [
        {"id": row["id"], "name": row["name"], "created_s": row["created_s"]}
        for row in store.rows("SELECT * FROM tokens WHERE kind = 'token' ORDER BY created_s")
    ]


def revoke(store: Store, token: str) -> None:
    """Revoke a token and the sessions that it opened. After the last one the store stays closed.

    Raises:
        MissingError: the id is unknown.
    """
    with store.transaction(frees=True) as db:
        query = "UPDATE tokens SET kind = ?, sha256 = '' WHERE id = ? AND kind = 'token'"
        if not db.execute(query, (REVOKED, token)).rowcount:
            raise MissingError(
                f"no such token: {token}", hint="`ondevice serve token --list` lists them"
            )
        db.execute("DELETE FROM tokens WHERE parent = ?", (token,))


def cookie_name(port: int, tls: bool) -> str:
    """Return the name of the session's cookie.

    A browser sends a cookie to every port of a host. The port in the name keeps two daemons of one
    host apart. With TLS the prefix `__Host-` makes the browser refuse one that another host, a
    plain connection or another path has set.
    """
    return f"{'__Host-' if tls else ''}{COOKIE}_{port}"


def session_of(scope: MutableMapping[str, Any], tls: bool) -> str:
    """Read the session's secret: the cookie of this port and the page's key. Empty without a
    cookie."""
    headers = Headers(scope=scope)
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    cookie = cookies.get(cookie_name(scope["server"][1], tls))
    if cookie is None:
        return ""
    key = headers.get(KEY_HEADER)
    if key is None:
        key = QueryParams(scope["query_string"]).get(KEY_PARAMETER, "")
    return cookie.value + key


def end_session(store: Store, secret: str) -> None:
    """Delete a session: the browser logs out."""
    if name := check(store, secret, "session"):
        with store.transaction(frees=True) as db:
            db.execute("DELETE FROM tokens WHERE id = ?", (name,))


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def ensure_guarded(store: Store, host: str) -> None:
    """Refuse to listen to other machines without a token.

    Raises:
        ConfigError: `host` is not a loopback address and the store has no token.
    """
    if not is_loopback(host) and not has_tokens(store):
        raise ConfigError(
            f"listening on {host} without a token would let everybody on the network train here",
            expected="127.0.0.1, or a token",
            received=host,
            hint="`ondevice serve token` makes one",
        )


def same_origin(host: str, headers: Mapping[str, str]) -> bool:
    """Return True if a request comes from this server's own page, or from no page at all.

    Browsers send Fetch metadata to this machine and over TLS. Otherwise there is only the origin,
    which a GET may lack; but then no request passes without a token.
    """
    fetch_site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if fetch_site is not None and fetch_site not in ("same-origin", "none"):
        return False
    try:
        return origin is None or urlsplit(origin).netloc == host
    except ValueError:
        return False


def host_name(host: str) -> str | None:
    """Parse the name in a Host header, without the port; None for an invalid one, such as `[`."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return None


def is_own_name(host: str, bound: str) -> bool:
    """Return True if the Host header names this machine; another name means DNS rebinding."""
    name = host_name(host) or ""
    return name in ("localhost", bound.strip("[]").lower()) or is_loopback(name)


class Tries:
    """Failed tries by address; after too many the address has to wait.

    Args:
        clock: seconds that never go back.
    """

    KEPT = 10_000

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """Return seconds that `address` has to wait; 0 if it may try."""
        times = self._recent(address)
        if len(times) < TRIES:
            return 0.0
        return max(0.0, times[0] + WINDOW_S - self.clock())

    def refusal(self, address: str) -> tuple[Any, ...] | None:
        """Return the refusal of an address that failed too often (for `refused`), or None."""
        wait_s = self.wait_s(address)
        if not wait_s:
            return None
        headers = {"Retry-After": str(int(wait_s) + 1)}
        return (
            429,
            "too many wrong tokens",
            f"a pause of {wait_s:.0f} s",
            "another try",
            "wait",
            headers,
        )

    def failed(self, address: str) -> None:
        """Count a failed try."""
        key = network_of(address)
        self._failed.setdefault(key, deque(maxlen=TRIES)).append(self.clock())
        self._failed.move_to_end(key)
        while len(self._failed) > self.KEPT:  # many addresses must not fill the memory
            self._failed.popitem(last=False)

    def _recent(self, address: str) -> deque[float]:
        times = self._failed.get(network_of(address), deque())
        while times and times[0] + WINDOW_S <= self.clock():
            times.popleft()
        return times


def network_of(address: str) -> str:
    """Return the key for counting a client: the 2^64 addresses of an IPv6 customer count as one."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return address
    return str(ipaddress.ip_network((ip, 64), strict=False))


def _create(
    store: Store, kind: str, prefix: str, name: str, expires_s: float | None, parent: str | None
) -> str:
    number = secrets.token_hex(6)
    secret = f"{prefix}_{number}_{secrets.token_urlsafe(32)}"
    with store.transaction() as db:
        db.execute("DELETE FROM tokens WHERE expires_s < ?", (store.clock.now(),))
        db.execute(
            "INSERT INTO tokens VALUES (?, ?, ?, ?, ?, ?, ?)",
            (number, kind, name, _digest(secret), time.time(), expires_s, parent),
        )
    return secret


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
