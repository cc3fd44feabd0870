"""Images in rows: files next to the data, or bytes; each is a run of token ids of its own.

A picture's tokens are ids that no vocabulary has: they say which picture it is, by its content, and
which of its tokens. So a batch of ids is all that a model needs to find the pictures of its rows,
and rows with other pictures have other ids.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ondevice.core.errors import DataError, MissingPackageError, ModelError
from ondevice.core.untrusted import Refused, inside, read_plain
from ondevice.data.rows import BadRow, describe

MARK = "\U0001fffe"
"""Stands for a picture in the text of a turn: a noncharacter, which no text has."""
FIRST_ID = 1 << 61
"""Ids from here on are tokens of pictures."""
MOST_TOKENS = 1 << 20
"""Of one picture: the digits of an id below its picture's number."""
MOST_BYTES = 64 << 20
MOST_PIXELS = 64_000_000
"""A file of a few kB can hold gigabytes of one colour."""
KINDS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
FIELD = "images"


def as_marks(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return ids that a tokenizer can decode: pictures' tokens as the tokenizer's mark of images."""
    if max(ids, default=0) < FIRST_ID:
        return list(ids)
    mark = tokenizer.pictures.mark_id(tokenizer)
    return [mark if token >= FIRST_ID else token for token in ids]


def picture_of(token: int) -> int:
    """Return the number of the picture that a token is of."""
    return (token - FIRST_ID) // MOST_TOKENS


@dataclass(frozen=True)
class Picture:
    """A picture of a row.

    Attributes:
        number: the beginning of its content's SHA-256.
        content: its file, or its bytes.
        ids: what stands for it in a row: marks of the tokenizer, and ids from `FIRST_ID` on.
    """

    number: int
    content: Path | bytes
    ids: tuple[int, ...]


class Pictures:
    """The pictures of a run, by their numbers.

    Args:
        load: returns transformers' processor, with an image processor.
        token: the id that the model's configuration has for images; None if it names none.
    """

    def __init__(self, load: Callable[[], Any], token: int | None = None) -> None:
        self._load = load
        self._token = token
        self._known: dict[int, Picture] = {}

    @cached_property
    def processor(self) -> Any:
        """transformers' processor of images and text."""
        return self._load()

    @property
    def any(self) -> bool:
        """True if a row had a picture."""
        return bool(self._known)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The pictures of the rows so far."""
        return tuple(self._known)

    def mark_id(self, tokenizer: Any) -> int:
        """Return the token that stands for a picture before it is read.

        Raises:
            ModelError: the tokenizer does not have it.
        """
        token = self.processor.image_token
        number = tokenizer.get_vocab().get(token)
        if number is None or number != (self._token or number):
            place = f" with the id {self._token}" if self._token else ""
            raise ModelError(
                "the tokenizer lacks the token for images",
                expected=f"{token!r}{place}, as the processor and config.json have it",
                received=f"{len(tokenizer)} tokens, and {number} as its id",
                hint="copy the tokenizer's files again; rows without images need no such token",
            )
        return number

    def read(self, values: Sequence[Any], data: str, tokenizer: Any) -> list[Picture]:
        """Read the pictures of a row.

        Args:
            values: of the row's `images`.
            data: the row's file; paths are relative to its folder, and stay in it.

        Raises:
            BadRow: a picture cannot be read, or may not.
            ModelError: as `mark_id`.
            MissingPackageError: Pillow, or a package of the processor, is not installed.
        """
        mark = self.mark_id(tokenizer)
        folder = Path(data).parent
        return [
            self._read(value, f"{FIELD}.{place}", folder, mark)
            for place, value in enumerate(values)
        ]

    def _read(self, value: Any, where: str, folder: Path, mark: int) -> Picture:
        content = _content(value, where, folder)
        try:
            data = _bytes(content)
            image = opened(data)
        except (Refused, OSError, ValueError) as error:
            raise BadRow(where, f"is not a picture that can be read: {error}") from None
        number = int.from_bytes(hashlib.sha256(data).digest()[:5], "big")
        if number not in self._known:
            try:
                own = self._process(image)["input_ids"]
            except Exception as error:  # whatever a processor raises about a shape
                first = (str(error).splitlines() or [""])[0]
                reason = f"{image.width} x {image.height}: {type(error).__name__}: {first}"
                raise BadRow(where, f"the model's processor cannot read it, {reason}") from None
            ids: list[int] = []
            count = 0
            for token in own.reshape(-1).tolist():
                if token == mark:
                    token = FIRST_ID + number * MOST_TOKENS + count
                    count += 1
                ids.append(token)
            if not 0 < count < MOST_TOKENS:
                raise BadRow(where, f"expected a picture of some tokens, received {count}")
            self._known[number] = Picture(number, content, tuple(ids))
        return self._known[number]

    def inputs(self, number: int) -> dict[str, Any]:
        """Return what the processor makes of a picture, arrays of numpy by their names.

        Raises:
            DataError: the picture is missing, or its file has changed since the row was read.
        """
        return self._process(opened(self.content(number)[1]))

    def content(self, number: int) -> tuple[Path | bytes, bytes]:
        """Return a picture's file or bytes as the row has them, and its bytes.

        Raises:
            DataError: as `inputs`.
        """
        if number not in self._known:
            raise DataError(
                "a row has tokens of a picture that was not read",
                expected="ids of the vocabulary, and pictures as images",
                received=f"picture {number}",
            )
        content = self._known[number].content
        try:
            data = _bytes(content)
        except (Refused, OSError) as error:
            raise DataError(f"picture {content} cannot be read again", received=error) from None
        if int.from_bytes(hashlib.sha256(data).digest()[:5], "big") != number:
            raise DataError(
                f"picture {content} has changed since its row was read", hint="start again"
            )
        return content, data

    def _process(self, image: Any) -> dict[str, Any]:
        return dict(
            self.processor(
                images=[image],
                text=self.processor.image_token,
                return_tensors="np",
                add_special_tokens=False,
            )
        )


def _content(value: Any, where: str, folder: Path) -> Path | bytes:
    """Return a picture's file or bytes; a dictionary has either, as data sets store them."""
    if isinstance(value, dict):
        data = value.get("bytes")
        if isinstance(data, str):
            try:
                data = base64.b64decode(data, validate=True)
            except binascii.Error:
                raise BadRow(where, "expected base64 of a picture's bytes") from None
        value = data or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise BadRow(where, f"expected a picture's path or bytes, received {describe(value)}")
    if "://" in value or value.startswith("data:"):
        raise BadRow(where, "expected a file next to the data, or bytes; addresses are not fetched")
    try:
        return inside(folder, value)
    except Refused as error:
        raise BadRow(where, f"expected a path in the data's folder: {error}") from None


def _bytes(content: Path | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    return read_plain(content, MOST_BYTES)


def opened(data: bytes) -> Any:
    """Decode a picture's bytes: Pillow's image, upright, in three colours.

    Raises:
        Refused: it has too many pixels.
        OSError, ValueError: Pillow cannot read it.
        MissingPackageError: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise MissingPackageError(
            "images need the package 'pillow'", hint="pip install 'ondevice-train[images]'"
        ) from None
    try:
        image = Image.open(io.BytesIO(data), formats=KINDS)
    except Image.DecompressionBombError:
        raise Refused(f"it has more than {MOST_PIXELS:,} pixels") from None
    if image.width * image.height > MOST_PIXELS:
        raise Refused(f"it has {image.width * image.height:,} pixels, more than {MOST_PIXELS:,}")
    return ImageOps.exif_transpose(image).convert("RGB")


def placed(turns: Sequence[Any], values: Any) -> tuple[Any, ...]:
    """Return turns with a mark for each picture of a row; those without a place come first.

    Raises:
        BadRow: turns have marks for another number of pictures.
    """
    marks = sum(turn[1].count(MARK) for turn in turns)
    if not isinstance(values, list):
        raise BadRow(FIELD, f"expected a list of pictures, received {describe(values)}")
    if marks == 0 and values:
        first = next(n for n, turn in enumerate(turns) if turn[0] == "user")
        role, content, *rest = turns[first]
        turn = (role, MARK * len(values) + content, *rest)
        return (*turns[:first], turn, *turns[first + 1 :])
    if marks != len(values):
        reason = f"the turns have places for {marks}, and the row has {len(values)}"
        raise BadRow(FIELD, f"expected as many pictures as places: {reason}")
    return tuple(turns)


def in_parts(content: str) -> list[dict[str, str]]:
    """Return a turn's content as parts, a part for each picture."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts
