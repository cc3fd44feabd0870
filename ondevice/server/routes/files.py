"""OpenAI's files: conversations to train on, which are data sets of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, BinaryIO

from anyio import CancelScope
from fastapi import APIRouter, Query, Request
from fastapi import Path as InPath
from fastapi.responses import Response, StreamingResponse

from ondevice.core.errors import ConfigError, DataError
from ondevice.server import openai_files as files
from ondevice.server import uploads
from ondevice.server.daemon import Daemon
from ondevice.server.forms import FormReader
from ondevice.server.openai import REFUSALS
from ondevice.server.routes import MOST, Serving
from ondevice.server.routes.data import remove_dataset
from ondevice.server.routes.uploads import PIECE_BYTES
from ondevice.server.upload_requests import BadRowsError

router = APIRouter(prefix="/v1/files", tags=["files"], responses=REFUSALS)
FIELD_CHARACTERS = 1000
FileId = Annotated[str, InPath(max_length=64, description="An id of GET /v1/files.")]


@router.post(
    "",
    response_model=files.File,
    openapi_extra={
        "requestBody": {
            "required": True,
            "description": "A form with `purpose` (fine-tune) and `file` (JSON lines, each a "
            f"conversation), at most {files.FILE_BYTES} bytes.",
            "content": {
                "multipart/form-data": {
                    "schema": {
                        "type": "object",
                        "required": ["purpose", "file"],
                        "properties": {
                            "purpose": {"type": "string", "enum": [files.PURPOSE]},
                            "file": {"type": "string", "format": "binary"},
                        },
                    }
                }
            },
        }
    },
)
async def create_file(daemon: Serving, request: Request) -> dict[str, Any]:
    """Upload conversations, which are checked at once; the lines that are wrong are named.

    A form needs an `Authorization` header, also if the daemon needs no token: another page can send
    a form, but not this header.
    """
    size = int(request.headers.get("content-length", "0"))
    if not size:
        raise ConfigError("a form of unknown size", expected="the header Content-Length")
    reader = FormReader(request.headers.get("content-type", ""))
    arriving = _Arriving(daemon, size)
    try:
        async for chunk in request.stream():
            for piece in reader.feed(chunk):
                await arriving.take(piece.name, piece.filename, piece.content)
        if not reader.ended:
            raise ConfigError("the form is incomplete", expected="its last line")
        return await arriving.finish()
    finally:
        if arriving.upload:  # unless it is a data set by now
            with CancelScope(shield=True):
                await daemon.pools.files.run(uploads.remove, daemon.store, arriving.upload)


class _Arriving:
    """A form's fields, and the upload that its file fills."""

    def __init__(self, daemon: Daemon, size: int) -> None:
        self.daemon = daemon
        self.size = size
        self.fields: dict[str, str] = {}
        self.upload = ""
        self.name = ""
        self._held = bytearray()
        self._offset = 0

    async def take(self, name: str, filename: str | None, content: bytes) -> None:
        """Take a piece of a field."""
        if filename is None or name != "file":
            text = self.fields.get(name, "") + content.decode("utf-8", "replace")
            if len(text) > FIELD_CHARACTERS:
                expected = f"at most {FIELD_CHARACTERS} characters"
                raise ConfigError(f"'{name[:80]}' is too long", expected=expected)
            self.fields[name] = text
            return
        if not content:
            if self.upload:
                raise ConfigError("two files", expected="one file", received="two or more")
            self.name = files.checked_name(filename)
            request = uploads.UploadRequest(kind="dataset", name=self.name, bytes=self.size)
            made = await self.daemon.pools.files.run(uploads.create, self.daemon.store, request)
            self.upload = made["id"]
            return
        self._held += content
        if len(self._held) >= PIECE_BYTES:
            await self._write()

    async def finish(self) -> dict[str, Any]:
        """Check the file, and return it as a data set."""
        files.check_fields(self.fields)
        if not self.upload:
            raise ConfigError("the form has no file", expected="the field 'file'", received="none")
        await self._write()
        return await self.daemon.pools.rows.run(self._place)

    def _place(self) -> dict[str, Any]:
        store = self.daemon.store
        uploads.end_early(store, self.upload)

        def check(call: str, **arguments: Any) -> Any:
            checked = self.daemon.check(call, **arguments)
            if checked["format"] != "chat" and checked["rows"]:
                raise DataError(
                    f"{self.name}: the rows are not conversations",
                    expected=files.EXAMPLE,
                    received=f"rows of the format {checked['format']}",
                    hint="POST /v1/uploads takes other rows",
                )
            return checked

        try:
            placed = uploads.finish(store, self.upload, check)
        except BadRowsError as error:
            error.hint = "correct these lines and upload the file again"
            raise
        return files.get(store, placed["id"])

    async def _write(self) -> None:
        if self._held:
            content = bytes(self._held)
            run = self.daemon.pools.files.run
            await run(uploads.write, self.daemon.store, self.upload, self._offset, content)
            self._offset += len(content)
            self._held.clear()


@router.get("", response_model=files.FileList)
def list_files(
    daemon: Serving,
    limit: Annotated[int, Query(ge=1, le=10_000)] = MOST,
    after: Annotated[str | None, Query(max_length=64)] = None,
    order: files.Order = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> dict[str, Any]:
    """Return the daemon's data sets of conversations, the newest first."""
    if purpose not in (None, files.PURPOSE):
        return {"data": []}
    return files.list_files(daemon.store, limit, after, order)


@router.get("/{file}", response_model=files.File)
def get_file(daemon: Serving, file: FileId) -> dict[str, Any]:
    """Return one file."""
    return files.get(daemon.store, file)


@router.get(
    "/{file}/content",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The file."}},
)
async def file_content(daemon: Serving, file: FileId) -> Response:
    """Return the bytes of a file."""
    path = await daemon.pools.files.run(files.path_of, daemon.store, file)
    content = await daemon.pools.files.run(path.open, "rb")
    size = str(path.stat().st_size)
    return StreamingResponse(
        _pieces(content), media_type="application/octet-stream", headers={"Content-Length": size}
    )


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


@router.delete("/{file}", response_model=files.DeletedFile)
def delete_file(daemon: Serving, file: FileId) -> dict[str, Any]:
    """Delete a file that no waiting or running job uses."""
    files.get(daemon.store, file)
    remove_dataset(daemon, file)
    return {"id": file}
