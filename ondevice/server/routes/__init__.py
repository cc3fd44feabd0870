"""The routes of /v1, one file a subject, and the dependencies and answers that they share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Path, Query, Request
from fastapi.responses import Response

from ondevice.core.errors import ConfigError
from ondevice.server.daemon import Daemon


async def daemon_of(request: Request) -> Daemon:
    """Return the daemon that serves the request. On the event loop: a plain function would take a thread."""
    return request.app.state.daemon


Serving = Annotated[Daemon, Depends(daemon_of)]
Id = Annotated[str, Path(pattern="^[a-z0-9][a-z0-9._-]{0,63}$", description="An id that the server gave.")]


MOST = 1000
Limit = Annotated[int, Query(ge=1, le=MOST, description='At most so many; `Link: <...>; rel="next"` names the rest.')]
After = Annotated[str | None, Query(max_length=64, description="Only those behind this id, the last that was seen.")]


def page_of(items: Sequence[Any], limit: int, after: str | None, request: Request, response: Response) -> list[Any]:
    """Return the part of a list that was asked for, and name the next part in the header `Link`.

    Args:
        items: rows or jobs with an `id`, in the order of the list.

    Raises:
        ConfigError: `after` is none of them.
    """
    ids = [item.id if hasattr(item, "id") else item["id"] for item in items]
    if after is not None and after not in ids:
        raise ConfigError(f"{after} is not in this list", expected="the last id of the page before", received=after,
                          hint="it may have been deleted: begin without `after`")  # fmt: skip
    first = 0 if after is None else ids.index(after) + 1
    found = list(items[first : first + limit])
    if first + limit < len(items):
        following = request.url.include_query_params(limit=limit, after=ids[first + limit - 1])
        response.headers["Link"] = f'<{following.path}?{following.query}>; rel="next"'
    return found


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
