"""Errors in OpenAI's format, for the paths that OpenAI's clients use."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel

from ondevice.core.errors import OndeviceError
from ondevice.server.schemas import ErrorResponse

_FIELD = re.compile(r"'(?:(?:body|query|path)\.)?([A-Za-z_]\w*)[^']*'")
"""The field that begins an error's message."""


class Refusal(ErrorResponse):
    """An `ErrorResponse` in OpenAI's format."""

    type: Literal["invalid_request_error", "server_error"]
    code: str
    param: str | None = None
    """The field that is refused."""


class RefusalResponse(BaseModel):
    """The body of a refused request."""

    error: Refusal


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": RefusalResponse, "description": "Refused, in OpenAI's format."},
    "507": {"model": RefusalResponse, "description": "Not enough space on the disk."},
}
"""The responses of all paths in OpenAI's format."""
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/feedback",
    "/v1/files",
    "/v1/fine_tuning",
    "/v1/models",
    "/v1/predict",
    "/v1/responses",
)
"""Paths whose errors have OpenAI's format, with all paths below them. So has a path that is not
there, which a client of OpenAI may have guessed."""


def error_fields(error: OndeviceError) -> dict[str, Any]:
    """Convert an error to the fields of `ErrorResponse`."""
    values = error.to_dict()
    public = (kind for kind in type(error).__mro__ if kind.__module__ == OndeviceError.__module__)
    values["error"] = next(public).__name__
    values["hint"] = values.pop("try")
    del values["exit_code"]
    if problems := getattr(error, "problems", None):
        values["problems"] = problems[:100]
    return values


def error_body(
    status: int, values: dict[str, Any], missing: str = "model_not_found"
) -> dict[str, Any]:
    """Convert an `ErrorResponse` to OpenAI's format; `missing` is the code of a status 404."""
    kind = "invalid_request_error"
    if status >= 500:
        kind = "server_error"
    code = missing
    if status != 404:
        code = values["error"]
    parts = [str(values["message"])]
    for word in ("expected", "received"):
        if values.get(word) is not None:
            parts.append(f"{word}: {values[word]}")
    if values.get("hint"):
        parts.append(f"try: {values['hint']}")
    param = None
    if field := _FIELD.match(str(values["message"])):
        param = field[1]
    own = {"message": "; ".join(parts), "type": kind, "code": code, "param": param}
    return {"error": {**values, **own}}


def is_openai(path: str) -> bool:
    """Return whether a path is one of `PATHS` or below one."""
    return path in PATHS or path.startswith(tuple(f"{start}/" for start in PATHS))


def error_for(path: str, status: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return an `ErrorResponse` in the format that the clients of a path read."""
    if not is_openai(path):
        return values
    missing = "model_not_found"
    if path.startswith(("/v1/feedback", "/v1/files", "/v1/fine_tuning")):
        missing = "not_found"
    return error_body(status, values, missing)
