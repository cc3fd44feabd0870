"""The routes of /v1, one file a subject, and what they share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Request

from ondevice.server.daemon import Daemon


def daemon_of(request: Request) -> Daemon:
    """The daemon that answers."""
    return request.app.state.daemon


Serving = Annotated[Daemon, Depends(daemon_of)]
Id = Annotated[str, Path(pattern="^[a-z0-9][a-z0-9._-]{0,63}$", description="An id that the server gave.")]
