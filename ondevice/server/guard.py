"""What every request passes first: names, origins, tokens, limits of bodies, and the log."""

from __future__ import annotations

import logging
import time
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from anyio import CancelScope
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException

from ondevice.server import security
from ondevice.server.daemon import Daemon
from ondevice.server.openai_files import FILE_BYTES
from ondevice.server.routes import refused
from ondevice.server.uploads import PART_BYTES

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_access_log = logging.getLogger("ondevice.access")
BODY_BYTES = 1 << 20
SMALL_BYTES = 1 << 16
"""Bodies up to this size are always accepted."""
HELD_BYTES = 64 << 20
"""Bytes of all larger bodies together. Parts of uploads are written as they arrive."""
SAFE = ("GET", "HEAD", "OPTIONS")
TYPES = ("application/json", "application/octet-stream")
"""Types of bodies. A form is only accepted at `FORM_PATH`, because any other page could send one."""
FORM = "multipart/form-data"
FORM_PATH = "/v1/files"
"""The one path that takes a form, as OpenAI's clients send files."""
TABLES = ("/v1/tables/read", "/v1/tables/write")
"""Paths whose bodies are a small file."""
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
RECHECK_S = 1.0
"""Seconds after which the token of an open response is checked again, or at its next ping."""


class Guard:
    """ASGI middleware that every request passes first, even one without a route.

    Args:
        host: the address that the server is bound to.
        tls: whether it speaks TLS.
        tries: failed tries, counted here and by the route that exchanges a token for a session.
    """

    def __init__(
        self, app: ASGIApp, daemon: Daemon, host: str, tls: bool, tries: security.Tries
    ) -> None:
        self.app = app
        self.daemon = daemon
        self.host = host
        self.tls = tls
        self.tries = tries
        self.held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def send_response(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._add_headers(scope, message)
            await send(message)

        try:
            refusal = self._refuse(scope)
            if refusal is not None:
                await refused(*refusal, path=scope["path"])(scope, receive, send_response)
            else:
                await self._pass(scope, receive, send_response)
        finally:
            route = scope.get("route")
            path = getattr(route, "path", "") or (
                "/v1/..." if scope["path"].startswith("/v1") else "/"
            )
            self.daemon.metrics.request(scope["method"], path, status)
            seconds = time.perf_counter() - began
            _access_log.info("%s %s %d %.0f ms", scope["method"][:10], path, status, seconds * 1e3)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. An open response, such as events, ends once its token is revoked."""
        checked = time.monotonic()
        taken = 0
        held = 0
        limit = _limit(scope)
        is_held = limit == BODY_BYTES or scope["path"] in TABLES

        async def counted() -> Message:
            """Enforce the limits of a body, even without a length, and of all large bodies."""
            nonlocal taken, held
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > limit:
                    raise HTTPException(413)
                if is_held and taken > SMALL_BYTES:
                    self.held_bytes += taken - held
                    held = taken
                    if self.held_bytes > HELD_BYTES:
                        raise HTTPException(503, headers={"Retry-After": "60"})
            return message

        with CancelScope() as work:

            async def guarded(message: Message) -> None:
                nonlocal checked
                goes_on = message["type"] == "http.response.body" and message.get("more_body")
                if goes_on and time.monotonic() - checked > RECHECK_S:
                    if await run_in_threadpool(self._lost_its_token, scope):
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
                        work.cancel()
                        return
                    checked = time.monotonic()
                await send(message)

            try:
                await self.app(scope, counted, guarded)
            finally:
                self.held_bytes -= held

    def _lost_its_token(self, scope: Scope) -> bool:
        return security.needs_token(self.daemon.store, self.host) and not self._has_token(scope)

    def _has_token(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and security.check(self.daemon.store, secret.strip()):
            return True
        session = security.session_of(scope, self.tls)
        return bool(session and security.check(self.daemon.store, session, "session"))

    def _refuse(self, scope: Scope) -> tuple[Any, ...] | None:
        """Return the refusal of a request (the arguments of `refused`); None if it may pass."""
        headers = Headers(scope=scope)
        path = scope["path"]
        host = headers.get("host", "")
        # Another page can point its own name at this address (DNS rebinding) to be of the same
        # origin.
        local = security.is_loopback(self.host)
        if security.host_name(host) is None or (
            local and not security.is_own_name(host, self.host)
        ):
            return (
                421,
                "the server does not have this name",
                "localhost",
                host[:200],
                "open http://127.0.0.1",
            )
        # For every method: a GET from another page must not act or tell either. Links to the page
        # work.
        if not security.same_origin(host, headers) and not (
            scope["method"] in SAFE and self._is_visit(path, headers)
        ):
            return (
                403,
                "the request comes from another page",
                f"origin {host}",
                headers.get("origin", "")[:200],
            )
        if scope["method"] not in SAFE:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            length = headers.get("content-length", "0")
            is_form = kind == FORM and path == FORM_PATH
            if is_form and "authorization" not in headers:
                hint = "Authorization: Bearer TOKEN; any word will do if the server needs no token"
                return (403, "a form without an Authorization header",
                        "the header, which another page cannot send", "none", hint)  # fmt: skip
            if (
                not is_form
                and kind not in TYPES
                and (kind or length != "0" or "transfer-encoding" in headers)
            ):
                return (
                    415,
                    "the body has an unsupported type",
                    " or ".join(TYPES),
                    kind[:100] or "none",
                )
        # Before the token is checked: a refused body is never read.
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length) > _limit(scope):
            return 413, "the body is too large", f"at most {_limit(scope)} bytes", length[:30]
        needs_token = (path.startswith("/v1/") and path not in OPEN) or path in ("/metrics", "/v1")
        if needs_token and security.needs_token(self.daemon.store, self.host):
            return self._check_token(scope, headers)
        return None

    @staticmethod
    def _is_visit(path: str, headers: Headers) -> bool:
        """Return True if somebody follows a link to the page, which is the same for everybody."""
        asked = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
        return (
            asked == ("navigate", "document") and not path.startswith("/v1") and path != "/metrics"
        )

    def _check_token(self, scope: Scope, headers: Headers) -> tuple[Any, ...] | None:
        if self._has_token(scope):
            return None
        address = (scope.get("client") or ("unknown", 0))[0]
        secret = headers.get("authorization", "").partition(" ")[2]
        session = security.session_of(scope, self.tls)
        # Behind a proxy all clients have one address: one with wrong tokens must not lock out
        # another.
        if refusal := self.tries.refusal(address):
            return refusal
        if secret or session:
            self.tries.failed(address)
        message = "this server needs a token"
        if secret or session:
            message = "unknown token"
        hint = "`ondevice serve token` makes one; send it as Authorization: Bearer TOKEN"
        if not security.has_tokens(self.daemon.store):
            message = security.NONE_LEFT
            hint = "`ondevice serve token` on the server's machine makes a new one"
        return (
            401,
            message,
            "a token",
            "another" if secret or session else "none",
            hint,
            {"WWW-Authenticate": "Bearer"},
        )

    def _add_headers(self, scope: Scope, message: MutableMapping[str, Any]) -> None:
        headers = MutableHeaders(scope=message)
        for name, value in HEADERS.items():
            headers[name] = value
        if self.tls:
            headers["Strict-Transport-Security"] = "max-age=31536000"
        headers.setdefault(
            "Cache-Control", "no-store" if scope["path"].startswith("/v1") else "no-cache"
        )


def _limit(scope: Scope) -> int:
    part = scope["method"] == "PUT" and scope["path"].startswith("/v1/uploads/")
    if part or (scope["method"] == "POST" and scope["path"] in TABLES):
        return PART_BYTES
    if scope["method"] == "POST" and scope["path"] == FORM_PATH:
        return FILE_BYTES
    return BODY_BYTES
