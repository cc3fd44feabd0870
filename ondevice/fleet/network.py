"""The one network interface of a fleet's server: Flower's Fleet API, for devices.

Flower's SuperLink serves two more APIs on the same port, and admits everybody to them: Control
starts apps on the server and on every device, Runtime hands tasks to processes. Neither exists
here. The rounds run in this process (`grid`), so nothing has to be started over a network.
"""

from __future__ import annotations

import logging
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.error import http_error_translator
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.responses import JSONResponse, Response

from ondevice.core.errors import FleetError
from ondevice.fleet.link import Link

MOST_BYTES = 32 << 20
"""Largest request: Flower cuts tensors into pieces of 20 MiB."""
START_S = 30.0
PATHS = frozenset(route.path for route in router.routes)  # type: ignore[attr-defined]


def fleet_api(messages: LinkStateFactory, keys: frozenset[bytes] | None) -> Gate:
    """Return the ASGI app: Flower's Fleet routes behind the gate.

    Args:
        messages: gives the store in which they wait.
        keys: public keys of the devices that may connect, PEM; None if anybody may, with any key.
    """
    middleware = [
        Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
        Middleware(ProtobufTranslationMiddleware),
        Middleware(NodeAuthMiddleware),
        Middleware(BaseHTTPMiddleware, dispatch=_own_replies),
    ]
    app = FastAPI(middleware=middleware, openapi_url=None, docs_url=None, redoc_url=None)
    app.state.linkstate_factory = messages
    app.state.enable_supernode_auth = keys is not None
    app.include_router(router)
    return Gate(app, keys)


class Gate:
    """Lets a request through if it is for the Fleet API, of a known device, and of a bounded size.

    All of this is in the request's head: a stranger's body is never read.
    """

    def __init__(self, app: Any, keys: frozenset[bytes] | None) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope)
        await (self.app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Any) -> Response | None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in PATHS:
            return _refused(404, "only a fleet's devices are served here")
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        key = _proven_key(headers)
        if key is None or (self.keys is not None and key not in self.keys):
            return _refused(401, "this device is not registered")
        length = headers.get("content-length", b"")
        if not length.isdigit():
            return _refused(411, "the request has no content length")
        if len(length) > len(str(MOST_BYTES)) or int(length) > MOST_BYTES:
            return _refused(413, f"expected at most {MOST_BYTES} bytes")
        return None


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"detail": why}, status, {"connection": "close"})


def _proven_key(headers: dict[str, bytes]) -> bytes | None:
    """Return the public key whose owner signed the request's time; None if nobody did."""
    try:
        key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
        signed_at = headers[TIMESTAMP_HEADER]
        age_s = (now() - datetime.fromisoformat(signed_at.decode("ascii"))).total_seconds()
        is_signed = verify_signature(bytes_to_public_key(key), signed_at, signature)
    except (KeyError, ValueError, TypeError, AttributeError):  # or a key of another kind
        return None
    is_new = -SYSTEM_TIME_TOLERANCE < age_s < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
    if is_signed and is_new:
        return key
    return None


async def _own_replies(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Refuse a reply in another device's name: Flower checks only who pushes it."""
    pushed: Any = getattr(request.state, "protobuf_request", None)
    if isinstance(pushed, PushMessagesRequest):
        senders = {message.metadata.src_node_id for message in pushed.messages_list}
        if senders != {pushed.node.node_id}:
            raise HTTPException(403, "a device must reply in its own name")
    return await call_next(request)


@contextmanager
def listening(link: Link, app: Gate) -> Iterator[None]:
    """Serve devices at the link's address, in a thread, until the context ends.

    Raises:
        FleetError: the address cannot be used.
    """
    config = uvicorn.Config(
        app,
        host=link.host,
        port=link.port,
        ssl_certfile=None if link.insecure else link.file("server.pem"),
        ssl_keyfile=None if link.insecure else link.file("server.key"),
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    server = uvicorn.Server(config)

    def run() -> None:
        with suppress(SystemExit):  # uvicorn's, if it cannot listen
            server.run()

    thread = threading.Thread(target=run, name="fleet-network", daemon=True)
    thread.start()
    try:
        until = time.monotonic() + START_S
        while not server.started:
            if not thread.is_alive() or time.monotonic() > until:
                raise FleetError(
                    f"cannot listen at {link.address}",
                    hint="another program may use it; server.log in the fleet's folder says why",
                )
            time.sleep(0.05)
        yield
    finally:
        server.should_exit = True
        thread.join(START_S)


@contextmanager
def logged(path: Path) -> Iterator[None]:
    """Write what the network and the rounds log to a file, and not to the terminal."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    loggers = [logging.getLogger(name) for name in ("flwr", "uvicorn", "ondevice.fleet")]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    for logger in loggers:
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
        handler.close()
