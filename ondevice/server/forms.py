"""Forms with a file (`multipart/form-data`, RFC 7578), split while their bytes arrive.

OpenAI's clients upload a file as a form. The file goes to the disk piece by piece, so that its size
does not matter to the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from ondevice.core.errors import ConfigError

MOST_PARTS = 50
_HEADER_BYTES = 8192


@dataclass(frozen=True)
class Piece:
    """Some bytes of a field.

    Attributes:
        name: of the field.
        filename: of its file; None for a text.
    """

    name: str
    filename: str | None
    content: bytes


class FormReader:
    """Splits a form into the pieces of its fields.

    Args:
        content_type: the header of the request.

    Attributes:
        ended: True after the form's last line.

    Raises:
        ConfigError: the header names no boundary.
    """

    def __init__(self, content_type: str) -> None:
        header = Message()
        header["content-type"] = content_type
        boundary = header.get_boundary("")
        if header.get_content_type() != "multipart/form-data" or not 0 < len(boundary) <= 70:
            raise ConfigError(
                "not a form", expected="multipart/form-data", received=content_type[:100] or "none"
            )
        self._line = b"\r\n--" + boundary.encode("utf-8", "replace")
        self._buffer = bytearray(b"\r\n")  # the first boundary has no line before it
        self._state = "before"
        self._parts = 0
        self._name = ""
        self._filename: str | None = None
        self.ended = False

    def feed(self, content: bytes) -> Iterator[Piece]:
        """Take the next bytes; yield pieces of fields, an empty one at a field's start.

        Raises:
            ConfigError: this is not a form.
        """
        self._buffer += content
        while not self.ended:
            if self._state in ("before", "inside"):
                found = self._buffer.find(self._line)
                # A boundary may be cut between two pieces: as many bytes stay.
                end = found
                if found < 0:
                    end = max(0, len(self._buffer) - len(self._line) + 1)
                if self._state == "inside" and end:
                    yield Piece(self._name, self._filename, bytes(self._buffer[:end]))
                del self._buffer[:end]
                if found < 0:
                    return
                del self._buffer[: len(self._line)]
                self._state = "after"
            elif self._state == "after":
                if len(self._buffer) < 2:
                    return
                mark = bytes(self._buffer[:2])
                if mark not in (b"--", b"\r\n"):
                    raise ConfigError("the form is damaged", expected="the end of a line")
                del self._buffer[:2]
                self.ended = mark == b"--"
                self._state = "headers"
            else:
                end = self._buffer.find(b"\r\n\r\n")
                if end > _HEADER_BYTES or (end < 0 and len(self._buffer) > _HEADER_BYTES):
                    raise ConfigError("the form is damaged", expected="short headers")
                if end < 0:
                    return
                self._open(bytes(self._buffer[: end + 4]))
                del self._buffer[: end + 4]
                yield Piece(self._name, self._filename, b"")
                self._state = "inside"

    def _open(self, lines: bytes) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise ConfigError(
                "too many fields", expected=f"at most {MOST_PARTS}", received=self._parts
            )
        headers = HeaderParser().parsestr(lines.decode("utf-8", "replace"))
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise ConfigError("the form is damaged", expected="a name for every field")
        self._name = name
        self._filename = headers.get_filename()
