"""`ondevice serve`: the daemon behind uvicorn, until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError, MissingPackageError
from ondevice.server.fleets import Progress
from ondevice.server.security import ensure_guarded, is_loopback, needs_token
from ondevice.server.service import notify, start_log, watchdog_s
from ondevice.server.store import default_store

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ondevice.server.daemon import Daemon
    from ondevice.server.guard import Guard

HOST = "127.0.0.1"
PORT = 8765
_log = logging.getLogger(__name__)
DRAIN_S = 5
LOOK_TICKS = 10
"""Turns of the server's loop, of a tenth of a second, between two checks for late connections."""


def serve(
    store: Path | None = None,
    host: str = HOST,
    port: int = PORT,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    ready: Callable[[str], None] = lambda address: None,
    fleet_progress: Progress = lambda folder: None,
    allow_unknown_fields: bool = False,
    rewards: Sequence[str] = (),
) -> None:
    """Serve a store until SIGTERM or SIGINT; the running job is then saved and queued again.

    Args:
        store: the folder; `default_store` if None.
        host: the address to listen on; any but a loopback address needs a token.
        port: 0 picks a free one.
        tls_cert, tls_key: PEM files; both or none.
        ready: called with the address once the daemon listens.
        fleet_progress: see `Fleets`.
        allow_unknown_fields: ignore fields of completions that nobody knows; else they are refused.
        rewards: functions and programs that a job may name as its reward or its score.

    Raises:
        BusyError: another daemon serves the store.
        ConfigError: no token for this host, one TLS file without the other, or the port is taken.
        MissingPackageError: the `serve` extra is not installed.
    """
    try:
        import uvicorn

        from ondevice.server.connections import HEAD_S, Connection, Crowd, connection_limit
        from ondevice.server.daemon import Daemon
    except ImportError as error:
        raise missing(error) from None
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError(
            "one TLS file is given", expected="--tls-cert and --tls-key", received="one of them"
        )
    for path in filter(None, (tls_cert, tls_key)):
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"{path} cannot be read", expected="a PEM file", hint="check the path and its owner"
            )
    os.umask(0o077)  # only this user can read data and tokens
    daemon = Daemon(store or default_store(), fleet_progress, allow_unknown_fields, rewards)
    ensure_guarded(daemon.store, host)
    start_log(daemon.store.root / "logs")
    if not is_loopback(host) and tls_cert is None:
        _log.warning("listening on %s without TLS: the token can be read on the network", host)
    app = guarded(daemon, host, tls_cert is not None)
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        http=Connection,
        loop="asyncio",
        timeout_graceful_shutdown=DRAIN_S,
        ws="none",
    )

    class Server(uvicorn.Server):
        """Reports that it is ready once it listens, and closes late connections."""

        crowd = Crowd(connection_limit())

        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            self.server_state = self.crowd

        async def on_tick(self, counter: int) -> bool:
            if counter % LOOK_TICKS == 0:
                self.crowd.close_late()
            return await super().on_tick(counter)

        async def startup(self, sockets: list[Any] | None = None) -> None:
            if (
                tls_cert is not None
            ):  # asyncio's default is a minute, before the crowd knows the connection
                loop: Any = asyncio.get_running_loop()
                loop.create_server = partial(loop.create_server, ssl_handshake_timeout=HEAD_S)
            await super().startup(sockets)
            if self.started:
                _ready(ready, daemon, host, address)

    server = Server(config)
    try:
        sock = config.bind_socket()
    except SystemExit:
        raise ConfigError(
            f"{host}:{port} is taken, or is not an address of this machine", hint="--port 0"
        ) from None
    scheme = "http"
    if tls_cert:
        scheme = "https"
    bound = sock.getsockname()[1]
    name = host
    if ":" in host:
        name = f"[{host}]"
    address = f"{scheme}://{name}:{bound}"
    server.run(sockets=[sock])


def guarded(daemon: Daemon, host: str, tls: bool) -> Guard:
    """Build the application behind its guard; it starts and stops the daemon."""
    from ondevice.server.app import create_guarded

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        daemon.hub.open()
        await asyncio.to_thread(daemon.start)
        beat = asyncio.create_task(_heartbeat(daemon))
        try:
            yield
        finally:
            notify("STOPPING=1")
            beat.cancel()
            await asyncio.to_thread(daemon.stop)

    return create_guarded(daemon, host, tls, life)


def missing(error: ImportError) -> MissingPackageError:
    """Build the error for an absent `serve` extra."""
    return MissingPackageError(
        f"the daemon needs a package that is not installed: {error.name}",
        hint="pip install 'ondevice-train[serve]'",
    )


async def _heartbeat(daemon: Daemon) -> None:
    """Notify the service manager while loop and supervisor run; if not, it restarts the daemon."""
    every = watchdog_s()
    if every is None:
        return
    while True:
        if daemon.alive:
            notify("WATCHDOG=1")
        await asyncio.sleep(every / 3)  # one beat may be late without a restart


def _ready(ready: Callable[[str], None], daemon: Daemon, host: str, address: str) -> None:
    guarded = "no token is needed"
    if needs_token(daemon.store, host):
        guarded = "a token is needed"
    _log.info("serving %s on %s, %s", daemon.store.root, address, guarded)
    notify("READY=1", f"STATUS=serving on {address}")
    ready(address)
