"""The messages of a secure sum's four stages, JSON with bytes in base 64; both ends check them
here.

A request names a stage. Objects name devices by their number, in decimal digits.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from ondevice.core.untrusted import Refused, parse_json
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.keys import MOST_KEY_BYTES, MOST_SIGNATURE_BYTES
from ondevice.fleet.messages import MOST_NUMBERS
from ondevice.fleet.replies import MOST_STAGE_BYTES, Shape, checked

MOST_NEIGHBOURS = 64
MOST_SHARE_BYTES = 1024
MOST_SEALED_BYTES = 4096


def _bytes(value: Any) -> Any:
    if isinstance(value, bytes):  # JSON has none: it comes from here
        return value
    if not isinstance(value, str):
        raise ValueError("not base 64")
    return base64.b64decode(value, validate=True)


def _number(value: Any) -> Any:
    if type(value) is int:
        return value
    if not (
        isinstance(value, str)
        and value.isascii()
        and value.isdigit()
        and str(int(value[:20])) == value
    ):
        raise ValueError("not a device's number")
    return int(value)


Base64 = Annotated[
    bytes, BeforeValidator(_bytes), PlainSerializer(lambda data: base64.b64encode(data).decode())
]
Public = Annotated[Base64, Field(min_length=1, max_length=MOST_KEY_BYTES)]
Share = Annotated[Base64, Field(min_length=1, max_length=MOST_SHARE_BYTES)]
Sealed = Annotated[Base64, Field(min_length=1, max_length=MOST_SEALED_BYTES)]
Number = Annotated[int, BeforeValidator(_number), Field(ge=0, lt=1 << 64), PlainSerializer(str)]
Peers = Annotated[
    frozenset[Annotated[int, Field(ge=0, lt=1 << 64, strict=True)]],
    Field(max_length=MOST_NEIGHBOURS, strict=False),
    PlainSerializer(sorted),
]


class Stage(BaseModel):
    """A request or a reply of a stage."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    def to_bytes(self) -> bytes:
        """Return the message as it travels."""
        return self.model_dump_json().encode()


class Keys(Stage):
    """A device's keys of one round.

    Attributes:
        mask_key, share_key: public keys, with which a neighbour agrees on a mask and on a key for
            shares.
        promise: SHA-256 of the seed of the device's own mask; a rebuilt seed is held against it.
        signer: the device's own public key (DER).
        signature: of all that and of the round, by that key.
    """

    mask_key: Public
    share_key: Public
    promise: Annotated[Base64, Field(min_length=32, max_length=32)]
    signer: Public
    signature: Annotated[Base64, Field(min_length=1, max_length=MOST_SIGNATURE_BYTES)]

    def secrets(self) -> tuple[bytes, ...]:
        """Return the values that no two devices have in common."""
        return self.mask_key, self.share_key, self.promise, self.signer


class Shares(Stage):
    """Shares of a device's secrets, encrypted for each neighbour."""

    shares: dict[Number, Sealed] = Field(max_length=MOST_NEIGHBOURS)


class Masked(Stage):
    """A device's masked vector.

    Attributes:
        without: neighbours whose shares could not be read; the vector has no mask with them.
    """

    masked: Annotated[Base64, Field(max_length=8 * (MOST_NUMBERS + 2))]
    without: Peers = frozenset()


class Revealed(Stage):
    """Shares of the seeds of neighbours whose vectors came, and of the keys of those that went
    away."""

    seeds: dict[Number, Share] = Field(max_length=MOST_NEIGHBOURS)
    keys: dict[Number, Share] = Field(max_length=MOST_NEIGHBOURS)


class AskKeys(Stage):
    """Begin a secure sum."""

    stage: Literal["keys"] = "keys"


class AskShares(Stage):
    """The keys of a device's neighbours and its own."""

    stage: Literal["shares"] = "shares"
    peers: dict[Number, Keys] = Field(max_length=MOST_NEIGHBOURS)


class AskMasked(Stage):
    """The shares that neighbours made for a device."""

    stage: Literal["mask"] = "mask"
    shares: dict[Number, Sealed] = Field(max_length=MOST_NEIGHBOURS)


class AskRevealed(Stage):
    """The neighbours whose vectors came, and those that went away."""

    stage: Literal["reveal"] = "reveal"
    alive: Peers
    gone: Peers


Ask = AskKeys | AskShares | AskMasked | AskRevealed
REQUESTS: dict[str, type[Stage]] = {
    "keys": AskKeys,
    "shares": AskShares,
    "mask": AskMasked,
    "reveal": AskRevealed,
}


def read(kind: type[Shape], data: bytes) -> Shape:
    """Read a stage's message.

    Raises:
        Refusal: it is damaged, too large, or of another form.
    """
    return checked(kind, _object(data))


def read_request(data: bytes) -> Ask:
    """Read a server's request; raises as `read`."""
    values = _object(data)
    kind = REQUESTS.get(str(values.get("stage")))
    if kind is None:
        raise Refusal(Code.MALFORMED, "not a stage of a secure sum", expected=", ".join(REQUESTS))
    return checked(kind, values)  # type: ignore[return-value]


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, bytes) or len(data) > MOST_STAGE_BYTES:
        raise Refusal(
            Code.MALFORMED,
            "not a message of a secure sum",
            expected=f"at most {MOST_STAGE_BYTES} bytes",
        )
    try:
        values = parse_json(data, most_bytes=MOST_STAGE_BYTES)
    except Refused:
        values = None
    if not isinstance(values, dict):
        raise Refusal(Code.MALFORMED, "not a message of a secure sum", expected="a JSON object")
    return values
