"""The HTTP application: the API of /v1, its OpenAPI document, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles

from ondevice.core.process import own_version
from ondevice.server import security
from ondevice.server.daemon import Daemon
from ondevice.server.guard import Guard
from ondevice.server.refusals import add_handlers
from ondevice.server.routes import (
    adapters,
    completions,
    conversions,
    data,
    files,
    fine_tuning,
    fleets,
    jobs,
    predict,
    system,
    tables,
    templates,
    thumbs,
    unsupported,
    uploads,
)
from ondevice.server.schemas import ErrorResponse

if TYPE_CHECKING:
    from starlette.types import Scope

PAGE = Path(__file__).with_name("page")
SCHEMES = {
    "token": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token of `ondevice serve token`.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": f"{security.COOKIE}_8765",
        "description": "Session cookie of the page, with the key of POST /v1/session in the header "
        "`X-Ondevice-Key` or the parameter `key`. Its name ends with the port, and starts with "
        "__Host- over TLS.",
    },
}


MODULES = (
    system,
    uploads,
    data,
    templates,
    jobs,
    adapters,
    fleets,
    completions,
    predict,
    tables,
    files,
    fine_tuning,
    unsupported,
    thumbs,
    conversions,
)
"""The routes of /v1, in the order in which they are tried."""


def create_app(daemon: Daemon | None = None, life: Any = None) -> FastAPI:
    """Build the application. Without a daemon it serves only its OpenAPI document.

    Args:
        life: starts and stops the daemon (ASGI's lifespan).
    """
    app = FastAPI(
        title="ondevice",
        version=own_version(),
        summary="Fine-tune language models on this machine",
        description="Every response with a status of 400 or more is an `ErrorResponse`. Once a token "
        "exists, every request but GET /v1/health and POST /v1/session needs one, as "
        "`Authorization: Bearer TOKEN` or as the session's cookie; before that none is needed.",
        openapi_url="/v1/openapi.json",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        responses={
            "4XX": {
                "model": ErrorResponse,
                "description": "Refused; the response says why and what to try.",
            },
            "507": {"model": ErrorResponse, "description": "Not enough space on the disk."},
        },
        generate_unique_id_function=lambda route: route.name,
    )
    plain = app.openapi

    def document() -> dict[str, Any]:
        schema = plain()
        schema.setdefault("components", {})["securitySchemes"] = SCHEMES
        schema["security"] = [{}, *({name: []} for name in SCHEMES)]
        for path, verb in (("/v1/health", "get"), ("/v1/session", "post")):
            schema["paths"][path][verb]["security"] = []
        return schema

    app.openapi = document
    app.state.daemon = daemon
    app.state.routes = [route for module in MODULES for route in module.router.routes]
    for module in MODULES:
        app.include_router(module.router)
    add_handlers(app)
    if PAGE.is_dir():
        page = Page("/", StaticFiles(directory=PAGE, html=True), name="page")
        app.router.routes.append(page)
    return app


class Page(Mount):
    """The page's files, but nothing of the API: there a wrong path or method is refused as such."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Leave /v1 to its routes."""
        if scope["path"].startswith("/v1/"):
            return Match.NONE, {}
        return super().matches(scope)


def create_guarded(daemon: Daemon, host: str, tls: bool, life: Any = None) -> Guard:
    """Build the application behind its guard, as it is served; arguments as those of both."""
    app = create_app(daemon, life)
    app.state.tries = security.Tries()
    app.state.tls = tls
    app.state.host = host
    return Guard(app, daemon, host, tls, app.state.tries)


def openapi() -> str:
    """Return the OpenAPI document, for docs/reference/openapi.json."""
    return json.dumps(create_app().openapi(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
