"""What every request passes: host, origin, token, size; and what every answer carries."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException

from ondevice.server import security
from ondevice.server.uploads import PART_BYTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ondevice.server.daemon import Daemon

_log = logging.getLogger("ondevice.access")
BODY_BYTES = 1 << 20
SAFE = ("GET", "HEAD", "OPTIONS")
TYPES = ("application/json", "application/octet-stream")
"""No form: what a page elsewhere can send without asking is refused."""
OPEN = ("/v1/health", "/v1/session")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=()",
}


class Guard:
    """ASGI middleware, outermost.

    Args:
        host: what the server is bound to.
        tls: whether it speaks TLS.
        tries: failed tries, counted here and where a token is exchanged for a session.
    """

    def __init__(self, app: ASGIApp, daemon: Daemon, host: str, tls: bool, tries: security.Tries) -> None:
        self.app, self.daemon, self.host, self.tls, self.tries = app, daemon, host, tls, tries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(scope, message)
            await send(message)

        try:
            refusal = self._refuse(scope)
            if refusal is not None:
                await _error(answer, *refusal)
            else:
                await self.app(scope, _limited(receive, _limit(scope)), answer)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "") or ("/v1/..." if scope["path"].startswith("/v1") else "/")
            self.daemon.metrics.request(scope["method"], path, status)
            seconds = time.perf_counter() - began
            _log.info("%s %s %d %.0f ms", scope["method"][:10], path, status, seconds * 1e3)

    def _refuse(self, scope: Scope) -> tuple[Any, ...] | None:
        """Status, message, expected, received, hint and headers of a refusal; None for a request that may pass."""
        headers, path = Headers(scope=scope), scope["path"]
        host = headers.get("host", "")
        local = security.is_loopback(self.host)
        if security.host_name(host) is None or (local and not security.is_own_name(host, self.host)):
            return 421, "this server is not known by that name", "localhost", host[:200], "open http://127.0.0.1"
        if scope["method"] not in SAFE:
            if not security.same_origin(host, headers.get("origin"), headers.get("sec-fetch-site")):
                return 403, "the request comes from another page", f"origin {host}", headers.get("origin", "")[:200]
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            length = headers.get("content-length", "0")
            if kind not in TYPES and (kind or length != "0" or "transfer-encoding" in headers):
                return 415, "the body is of a type that is not taken", " or ".join(TYPES), kind[:100] or "none"
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > _limit(scope):
            return 413, "the body is too large", f"at most {_limit(scope)} bytes", length[:30]
        needs_token = (path.startswith("/v1/") and path not in OPEN) or path in ("/metrics", "/v1")
        if needs_token and security.needs_token(self.daemon.store, self.host):
            return self._check_token(scope, headers)
        return None

    def _check_token(self, scope: Scope, headers: Headers) -> tuple[Any, ...] | None:
        address = (scope.get("client") or ("unknown", 0))[0]
        if refusal := must_wait(self.tries, address):
            return refusal
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and security.check(self.daemon.store, secret.strip()):
            return None
        session = session_of(headers)
        if session and security.check(self.daemon.store, session, "session"):
            return None
        if secret or session:
            self.tries.failed(address)
        message = "the token is not known" if secret or session else "this server needs a token"
        hint = "`ondevice serve token` makes one; send it as Authorization: Bearer TOKEN"
        return 401, message, "a token", "another" if secret or session else "none", hint, {"WWW-Authenticate": "Bearer"}

    def _add_headers(self, scope: Scope, message: MutableMapping[str, Any]) -> None:
        headers = MutableHeaders(scope=message)
        for name, value in HEADERS.items():
            headers[name] = value
        if self.tls:
            headers["Strict-Transport-Security"] = "max-age=31536000"
        headers.setdefault("Cache-Control", "no-store" if scope["path"].startswith("/v1") else "no-cache")


def must_wait(tries: security.Tries, address: str) -> tuple[Any, ...] | None:
    """The refusal for an address that has failed too often; None where it may try."""
    wait_s = tries.wait_s(address)
    if not wait_s:
        return None
    headers = {"Retry-After": str(int(wait_s) + 1)}
    return 429, "too many wrong tokens", f"a pause of {wait_s:.0f} s", "another try", "wait", headers


def session_of(headers: Headers) -> str:
    """The session's secret in the cookie, or nothing."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(security.COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _limit(scope: Scope) -> int:
    part = scope["method"] == "PUT" and scope["path"].startswith("/v1/uploads/")
    return PART_BYTES if part else BODY_BYTES


def _limited(receive: Receive, limit: int) -> Receive:
    """`receive` that counts: a body without a length is held to the limit too."""
    taken = 0

    async def counted() -> Message:
        nonlocal taken
        message = await receive()
        if message["type"] == "http.request":
            taken += len(message.get("body", b""))
            if taken > limit:
                raise HTTPException(413)
        return message

    return counted


async def _error(
    send: Send, status: int, message: str, expected: Any = None, received: Any = None, hint: str | None = None,
    headers: dict[str, str] | None = None,
) -> None:  # fmt: skip
    body = json.dumps(
        {"error": "Refused", "message": message, "expected": expected, "received": received, "hint": hint}
    ).encode()
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})
