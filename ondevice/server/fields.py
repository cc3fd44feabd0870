"""Fields of bodies that refuse quickly: a body can have hundreds of thousands of wrong items, and
each one's error would take time in the event loop, which serves everybody."""

from __future__ import annotations

from typing import Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticKnownError

AT_ONCE = Field(fail_fast=True)
"""Of a list that is refused at its first wrong item."""


def at_most(items: int) -> BeforeValidator:
    """Return a validator that refuses a larger object before its values are read."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > items:
            context = {"field_type": "Object", "max_length": items, "actual_length": len(value)}
            raise PydanticKnownError("too_long", context)
        return value

    return BeforeValidator(check)
