"""The boundary for replies: closed shapes of numbers and codes.

A device checks its reply here before it leaves, so none of its text can leave. A server checks the
same shapes before it uses a field, so no reply can crash it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.messages import MOST_NUMBERS

MOST_FILE_BYTES = 1 << 30
"""Of a subspace or an adapter."""
MOST_STAGE_BYTES = 1 << 20
"""Of one stage of a secure sum: its largest, a masked vector, has 8 bytes a number in base 64."""
MOST_CHARTER_BYTES = 1 << 20
MOST_ROWS = (1 << 32) - 1

Place = Annotated[int, Field(ge=0, lt=1 << 32)]
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Device = Annotated[int, Field(ge=0, lt=1 << 64)]
Shape = TypeVar("Shape", bound=BaseModel)


class Reply(BaseModel):
    """A reply of a device; `KEY` is the field that tells its shape."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Request(Reply):
    """A message of a server, with any of its fields; an adapter always comes with a charter."""

    charter: bytes | None = Field(default=None, max_length=MOST_CHARTER_BYTES)
    events: list[bytes] = []
    frozen: list[bytes] = []
    task: bytes | None = None
    subspace: Literal[True] | None = None
    secure: bytes | None = None
    adapter: bytes | None = Field(default=None, max_length=MOST_FILE_BYTES)
    round: Annotated[int, Field(ge=0, lt=1 << 32)] | None = None
    last: bool = False
    over: bool = False

    @model_validator(mode="after")
    def _whole(self) -> Request:
        if self.adapter is not None and (
            self.charter is None or (self.round is None and not self.last)
        ):
            raise ValueError("an adapter comes with its charter and its round")
        return self


class Failed(Reply):
    """The device refused or failed; see `codes`."""

    error: Code = Field(strict=False)
    about: Device | None = None


class Replied(Reply):
    """A device's numbers; see `messages.TaskReply`."""

    answer: bytes = Field(max_length=38 + 2 * MOST_NUMBERS)


class Staged(Reply):
    """A stage of a secure sum; see `stages`."""

    secure: bytes = Field(max_length=MOST_STAGE_BYTES)


class Subspace(Reply):
    """A subspace; see `frozen.Frozen`."""

    frozen: bytes = Field(max_length=MOST_FILE_BYTES)
    place: Place


class Trained(Reply):
    """A first-order device's adapter, as the bytes of a safetensors file."""

    adapter: bytes = Field(max_length=MOST_FILE_BYTES)
    rows: Rows
    loss: Finite


class Followed(Reply):
    """The device has followed the log up to `place`, and holds a state of this hash."""

    digest: bytes = Field(min_length=32, max_length=32)
    place: Place


class Held(Reply):
    """A first-order device holds an adapter of this hash."""

    digest: str = Field(pattern="^[0-9a-f]{64}$")


class Greeted(Reply):
    """The device has taken the charter, and the first `place` events."""

    place: Place
    gives_subspace: Literal[True] | None = None


KINDS: tuple[tuple[str, type[Reply]], ...] = (
    ("error", Failed),
    ("answer", Replied),
    ("secure", Staged),
    ("frozen", Subspace),
    ("adapter", Trained),
    ("digest", Followed),
    ("place", Greeted),
)


def reply_of(record: Any) -> Reply:
    """Return a device's reply.

    Raises:
        Refusal: it is of no shape that a device may send; the reply itself is not quoted.
    """
    if isinstance(record, Mapping):
        for key, kind in KINDS:
            if key in record:
                if kind is Followed and "place" not in record:
                    kind = Held
                return checked(kind, dict(record))
    raise Refusal(
        Code.MALFORMED, "the reply has no known field", expected=", ".join(key for key, _ in KINDS)
    )


def checked(kind: type[Shape], record: Mapping[str, Any]) -> Shape:
    """Return a message of a shape.

    Raises:
        Refusal: with the names of wrong fields, not their values.
    """
    try:
        return kind.model_validate(record)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, ValidationError):
            places = error.errors(include_input=False, include_url=False)
        else:
            places = []
        fields = sorted(
            {
                str(place["loc"][0])
                for place in places
                if place["type"] != "extra_forbidden" and place["loc"]
            }
        )
        raise Refusal(
            Code.MALFORMED,
            "a message has the wrong form",
            expected=kind.__name__,
            received=f"wrong or missing: {', '.join(fields) or 'unknown fields'}",
        ) from None


def sent(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply as it leaves a device: only fields of a known shape.

    Raises:
        Refusal: it is of no known shape.
    """
    values = reply_of(reply).model_dump(exclude_none=True)
    return {
        name: str(value) if isinstance(value, Code) else value for name, value in values.items()
    }
