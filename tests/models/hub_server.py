"""A server on this machine that speaks the hub's routes for one repository: files, tokens, broken downloads."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "some/tiny"


class Hub(ThreadingHTTPServer):
    """Serves the files of `folder`.

    Attributes:
        token: without which nothing is given; `gated` says that the model is there but wants its terms accepted, and
            `accepted` that the token's account did so.
        cuts: bytes of weights after which a connection ends, one for each request.
        ranges: the `Range` of every request for a file's bytes, by name.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.gated, self.accepted = folder, False, True
        self.token: str | None = None
        self.cuts: list[int] = []
        self.ranges: dict[str, list[str | None]] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _send(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, headers, json.dumps({"error": message}).encode())

    def _answer(self, with_body: bool) -> None:
        hub: Any = self.server
        path = self.path.split("?")[0]
        known = hub.token is None or self.headers.get("Authorization") == f"Bearer {hub.token}"
        ours = path.startswith((f"/{NAME}/", f"/api/models/{NAME}"))
        if not ours or not (known or hub.gated):
            return self._refuse(401, "RepoNotFound", "Repository not found")
        if not known:
            return self._refuse(401, "GatedRepo", "Access to the model is restricted")
        if hub.gated and not hub.accepted:
            return self._refuse(403, "GatedRepo", "Your request is awaiting a review")
        parts = path.strip("/").split("/")
        listed = parts[0] == "api"
        tree = "tree" in parts
        if (parts[parts.index("tree" if tree else "revision") + 1] if listed else parts[3]) not in (
            "main",
            COMMIT,
        ):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        if listed:
            names = sorted(one.name for one in hub.folder.iterdir())
            if tree:
                sizes = [{"type": "file", "path": name, "size": (hub.folder / name).stat().st_size, "oid": name}
                         for name in names]  # fmt: skip
                return self._send(
                    200, {"Content-Type": "application/json"}, json.dumps(sizes).encode()
                )
            info = {
                "id": NAME,
                "sha": COMMIT,
                "siblings": [{"rfilename": name} for name in names],
                "tags": [],
            }
            return self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())
        return self._file("/".join(parts[4:]), with_body)

    def _file(self, name: str, with_body: bool) -> None:
        hub: Any = self.server
        if not (hub.folder / name).is_file():
            return self._refuse(404, "EntryNotFound", "Entry not found")
        content, asked = (hub.folder / name).read_bytes(), self.headers.get("Range")
        start = int(asked.split("=")[1].split("-")[0]) if asked else 0
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT,
                   "X-Linked-Size": str(len(content)), "Content-Length": str(len(content) - start)}  # fmt: skip
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        if with_body:
            hub.ranges.setdefault(name, []).append(asked)
            if hub.cuts and name.endswith(".safetensors"):
                body, self.close_connection = body[: hub.cuts.pop(0)], True
        self._send(206 if start else 200, headers, body)
