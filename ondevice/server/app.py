"""The HTTP application: routes under /v1, errors as JSON, the page beside them."""

from __future__ import annotations

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from ondevice.errors import (
    ArtifactError,
    BusyError,
    ConfigError,
    DataError,
    DoesNotFitError,
    MissingPackageError,
    ModelError,
    OndeviceError,
    StorageError,
    TrainingError,
)
from ondevice.server.daemon import Daemon
from ondevice.server.routes import adapters, data, jobs, system, uploads
from ondevice.server.schemas import ErrorAnswer
from ondevice.server.store import MissingError

_log = logging.getLogger(__name__)
PAGE = Path(__file__).with_name("page")
STATUS: dict[type[OndeviceError], int] = {
    MissingError: 404,
    BusyError: 409,
    ConfigError: 422,
    DataError: 422,
    ModelError: 422,
    ArtifactError: 422,
    DoesNotFitError: 422,
    MissingPackageError: 422,
    TrainingError: 422,
    StorageError: 413,
}
"""Which status an error of the user has; another of ours is 400. All say what to do."""
MESSAGES = {404: "there is nothing here", 405: "this cannot be done here", 413: "the body is too large"}


def create_app(daemon: Daemon | None = None, life: Any = None) -> FastAPI:
    """The application; without a daemon only its OpenAPI document can be asked for.

    Args:
        life: starts and stops the daemon (ASGI's lifespan).
    """
    app = FastAPI(
        title="ondevice",
        version=version("ondevice-train"),
        summary="Fine-tune language models on this machine",
        description="Every answer from 400 on is an `ErrorAnswer`. Where a token was made, every request but "
        "GET /v1/health and POST /v1/session needs it, as `Authorization: Bearer TOKEN`, or the session's cookie.",
        openapi_url="/v1/openapi.json",
        lifespan=life,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorAnswer, "description": "Refused; the answer says why and what to try."}},
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.daemon = daemon
    for module in (system, uploads, data, jobs, adapters):
        app.include_router(module.router)
    app.add_exception_handler(OndeviceError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain)
    app.add_exception_handler(Exception, _bug)
    if PAGE.is_dir():
        app.mount("/", StaticFiles(directory=PAGE, html=True), name="page")
    return app


def openapi() -> str:
    """The OpenAPI document, as docs/reference/openapi.json has it."""
    return json.dumps(create_app().openapi(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def error_answer(error: OndeviceError) -> dict[str, Any]:
    """An error as the API says it."""
    values = error.to_dict()
    public = (kind for kind in type(error).__mro__ if kind.__module__ == OndeviceError.__module__)
    values["error"] = next(public).__name__
    values["hint"] = values.pop("try")
    del values["exit_code"]
    problems = getattr(error, "problems", None)
    return values | ({"problems": problems[:100]} if problems else {})


async def _ours(request: Request, error: Exception) -> Response:
    if not isinstance(error, OndeviceError):
        raise error
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 400)
    return _json(status, error_answer(error))


async def _invalid(request: Request, error: Exception) -> Response:
    first = error.errors()[0] if isinstance(error, RequestValidationError) and error.errors() else {}
    place = ".".join(str(part) for part in first.get("loc", ()))
    received = first.get("input")
    text = received if isinstance(received, int | float | bool | type(None)) else str(received)[:200]
    return _json(
        422,
        {
            "error": "ConfigError",
            "message": f"'{place}': {first.get('msg', 'cannot be read')}",
            "expected": str(first.get("msg", "")),
            "received": text if not isinstance(text, float) else str(text),
            "hint": "GET /v1/openapi.json describes every field",
        },
    )


async def _plain(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    message = MESSAGES.get(status, "the request was refused")
    answer = {"error": "Refused", "message": message, "expected": None, "received": None, "hint": None}
    return JSONResponse(answer, status, headers)


async def _bug(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = "the server stumbled; its log has the details"
    return _json(500, {"error": "Bug", "message": message, "expected": None, "received": None, "hint": None})


def _json(status: int, values: dict[str, Any]) -> Response:
    """JSON that is always valid: half a surrogate pair, which a client may send, becomes a question mark."""
    content = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, status, media_type="application/json")
