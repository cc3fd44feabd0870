"""The routes of /v1, one file per subject, and their common dependencies and responses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from fastapi.responses import Response

from ondevice.server.daemon import Daemon
from ondevice.server.openai import error_for


async def daemon_of(request: Request) -> Daemon:
    """Return the daemon of a request. It is async because a plain function would take a thread."""
    return request.app.state.daemon


Serving = Annotated[Daemon, Depends(daemon_of)]
Id = Annotated[
    str, Path(pattern="^[a-z0-9][a-z0-9._-]{0,63}$", description="An id from the server.")
]


MOST = 1000
Limit = Annotated[
    int, Query(ge=1, le=MOST, description='Most entries; `Link: <...>; rel="next"` names the rest.')
]
AFTER = "Only entries after this id, the last one seen."
After = Annotated[str | None, Query(max_length=64, description=AFTER)]


def name_next(
    found: Sequence[Any], more: bool, limit: int, request: Request, response: Response
) -> None:
    """Name the next page of a list in the header `Link`, if there are `more` entries."""
    if more:
        last = found[-1].id if hasattr(found[-1], "id") else found[-1]["id"]
        following = request.url.include_query_params(limit=limit, after=last)
        response.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'


def json_response(
    status: int, values: dict[str, Any], headers: dict[str, str] | None = None
) -> Response:
    """Encode JSON that is always valid: half a surrogate pair becomes a question mark."""
    content = json.dumps(values, ensure_ascii=False).encode("utf-8", "replace")
    return Response(content, status, headers, media_type="application/json")


def refused(
    status: int, message: str, expected: Any = None, received: Any = None, hint: str | None = None,
    headers: dict[str, str] | None = None, path: str = "",
) -> Response:  # fmt: skip
    """Build the response to a request that is refused before a route runs; `path` is the request's."""
    values = {
        "error": "Refused",
        "message": message,
        "expected": expected,
        "received": received,
        "hint": hint,
    }
    return json_response(status, error_for(path, status, values), headers)
