"""Errors as responses: the status of each kind, and a body in the format of the path's clients."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from ondevice.core.errors import (
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
from ondevice.core.wrong_values import Problem, problems_of
from ondevice.server.engine.fair import QueueFullError
from ondevice.server.openai import error_body, error_fields, error_for, is_openai
from ondevice.server.predict import NoTaskError
from ondevice.server.routes import json_response, refused
from ondevice.server.routes.asking import LEFT, ClientLeft
from ondevice.server.store import MissingError
from ondevice.server.upload_requests import IncompleteError
from ondevice.server.words import error_for_api

if TYPE_CHECKING:
    from fastapi import FastAPI

_log = logging.getLogger(__name__)
MOST_PROBLEMS = 5
"""Mistakes of a body that a message names."""
STATUS: dict[type[OndeviceError], int] = {
    MissingError: 404,
    BusyError: 409,
    NoTaskError: 409,
    IncompleteError: 409,
    ConfigError: 422,
    DataError: 422,
    ModelError: 422,
    ArtifactError: 422,
    DoesNotFitError: 422,
    MissingPackageError: 422,
    TrainingError: 422,
    StorageError: 507,
}
"""HTTP status of each error; 400 for all others. Each message says what to try."""
MESSAGES = {
    400: "the body cannot be read: JSON has to be in UTF-8, and not deeply nested",
    404: "no such path",
    405: "this method is not allowed here",
    413: "the body is too large",
    503: "too many large requests at once; try again in a minute",
}


def add_handlers(app: FastAPI) -> None:
    """Make every exception of a route a response."""
    app.add_exception_handler(OndeviceError, refuse_error)
    app.add_exception_handler(ClientLeft, close_left)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(HTTPException, refuse_request)
    app.add_exception_handler(Exception, report_bug)


async def refuse_error(request: Request, error: Exception) -> Response:
    """Refuse a request with an error that says what to try."""
    if not isinstance(error, OndeviceError):
        raise error
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 400)
    response = error_response(request, status, error_for_api(error_fields(error)))
    if isinstance(error, QueueFullError):
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response


def error_response(request: Request, status: int, values: dict[str, Any]) -> Response:
    """Build the response to an error, in the format that the path's clients read."""
    return json_response(status, error_for(request.url.path, status, values))


async def close_left(request: Request, error: Exception) -> Response:
    """End a request whose client has left; nobody receives the response."""
    return Response(status_code=LEFT)


async def refuse_body(request: Request, error: Exception) -> Response:
    """Refuse a body or a parameter that the schema excludes."""
    values: dict[str, Any] = {"error": "ConfigError", "message": "the request cannot be read"}
    if isinstance(error, RequestValidationError):
        found = _problems(request, error)
        values["message"] = "; ".join(map(str, found[:MOST_PROBLEMS]))
        values["expected"], values["received"] = found[0].expected, found[0].received
    values["hint"] = "GET /v1/openapi.json describes every field"
    return error_response(request, 422, values)


def _problems(request: Request, error: RequestValidationError) -> list[Problem]:
    """Return the mistakes of a request, each at its place in the body, the query or the path."""
    documents = {
        "body": error.body,
        "query": dict(request.query_params),
        "path": request.path_params,
        "header": dict(request.headers),
    }
    found: list[Problem] = []
    for part in dict.fromkeys(item["loc"][0] for item in error.errors()):
        items = [item for item in error.errors() if item["loc"][0] == part]
        inner = [{**item, "loc": item["loc"][1:]} for item in items]
        for problem in problems_of(inner, documents.get(part)):
            if not problem.path:
                problem = replace(problem, message=f"the {part} of the request")
            found.append(problem)
    return found


async def refuse_request(request: Request, error: Exception) -> Response:
    """Refuse a request that no route takes."""
    status = 500
    if isinstance(error, HTTPException):
        status = error.status_code
    headers = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
    path = request.url.path
    if status in (404, 405) and path.startswith("/v1/") and (allowed := _methods(request)):
        status = 405
        headers["Allow"] = ", ".join(sorted(allowed))
    message = MESSAGES.get(status, "the request was refused")
    if status == 404 and path.startswith("/v1/") and not is_openai(path):
        values = {"error": "Refused", "message": message, "hint": "GET /v1/openapi.json lists them"}
        return json_response(404, error_body(404, values, missing="not_found"), headers)
    return refused(status, message, headers=headers, path=path)


def _methods(request: Request) -> set[str]:
    """Return the methods that a path takes; a literal path comes before one with an id in it."""
    routes = [route for route in request.app.state.routes
              if route.matches(request.scope)[0] is not Match.NONE]  # fmt: skip
    fewest = min((route.path.count("{") for route in routes), default=0)
    return {verb for route in routes if route.path.count("{") == fewest for verb in route.methods}


async def report_bug(request: Request, error: Exception) -> Response:
    """Report an error of ours, whose traceback goes to the log."""
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = "an internal error; the daemon's log has the details"
    values = {"error": "Bug", "message": message, "expected": None, "received": None, "hint": None}
    return error_response(request, 500, values)
