"""What every room answers with: errors, and that something is done."""

from __future__ import annotations

from typing import Any, Literal

from ondevice.core.config import Documented
from ondevice.data.rows import RowProblem


class ResponseBody(Documented):
    """The base of all responses."""


class ErrorResponse(ResponseBody):
    """The body of a response with a status of 400 or more."""

    error: str
    """Class of the error; see the reference of errors."""
    message: str
    expected: Any = None
    received: Any = None
    hint: str | None = None
    problems: list[RowProblem] | None = None
    """The first hundred bad rows of a data set."""


class Done(ResponseBody):
    """It is done."""

    ok: Literal[True] = True
