"""The routes of /v1, one file a subject, and the dependencies and answers that they share."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import Depends, Path, Request
from fastapi.responses import Response

from ondevice.server.daemon import Daemon


def daemon_of(request: Request) -> Daemon:
    """Return the daemon that serves the request."""
    return request.app.state.daemon


Serving = Annotated[Daemon, Depends(daemon_of)]
Id = Annotated[str, Path(pattern="^[a-z0-9][a-z0-9._-]{0,63}$", description="An id that the server gave.")]


def json_answer(status: int, values: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    """Encode JSON that is always valid: half a surrogate pair, which a client may send, becomes a question mark."""
    content = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, status, headers, media_type="application/json")


def refused(
    status: int, message: str, expected: Any = None, received: Any = None, hint: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:  # fmt: skip
    """Answer a request that is refused before it reaches an error of ours; the fields of `ErrorAnswer`."""
    values = {"error": "Refused", "message": message, "expected": expected, "received": received, "hint": hint}
    return json_answer(status, values, headers)
