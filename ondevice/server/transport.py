"""Requests to a daemon over HTTP with the standard library, and the errors in responses."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from ondevice.core import errors
from ondevice.core.errors import ConfigError, DeviceError, OndeviceError

DEFAULT_URL = "http://127.0.0.1:8765"
TIMEOUT_S = 330.0


class RefusedError(OndeviceError):
    """The daemon refused a request; `status` is HTTP's, `problems` lists bad rows."""

    status = 0
    problems: tuple[dict[str, Any], ...] = ()


class Transport:
    """Requests of a client, each over a separate connection."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, ca: str | Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        self.url = url or os.environ.get("ONDEVICE_URL") or DEFAULT_URL
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "not a valid address of a daemon", expected=DEFAULT_URL, received=self.url
            )
        self._host = parts.hostname
        self._port = parts.port
        self._tls = parts.scheme == "https"
        self._token = token or os.environ.get("ONDEVICE_TOKEN") or ""
        self._context = (
            ssl.create_default_context(cafile=None if ca is None else str(ca))
            if self._tls
            else None
        )
        self.timeout_s = timeout_s

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Send one request; a `body` that is not bytes is sent as JSON. Return the JSON of the
        response.

        Raises:
            RefusedError: the daemon refuses it.
            DeviceError: the daemon does not respond.
        """
        return json.loads(self._send(method, path, body, query, headers))

    def _send(self, *request: Any) -> bytes:
        with self._answer(*request) as response:
            return response.read()

    def _server_sent(
        self, path: str, query: dict[str, Any]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the events of a stream, each with its id."""
        with self._answer("GET", path, query=query) as response:
            number = 0
            data = ""
            for line in response:
                text = line.decode().rstrip("\n")
                if text.startswith("id: "):
                    number = int(text[4:])
                elif text.startswith("data: "):
                    data = text[6:]
                elif not text and data:
                    yield number, json.loads(data)
                    data = ""

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: Any = None,
        query: dict[str, Any] | None = None,
        more: dict[str, str] | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, let the caller read its response, and close the connection.

        Raises:
            RefusedError: the daemon refuses it.
            DeviceError: the daemon does not respond, or stops during its response.
        """
        connection = self._connect()
        try:
            headers = {
                **(more or {}),
                **({"Authorization": f"Bearer {self._token}"} if self._token else {}),
            }
            if isinstance(body, bytes):
                headers["Content-Type"] = "application/octet-stream"
            elif body is not None:
                headers["Content-Type"], body = "application/json", json.dumps(body).encode()
            parameters = {key: value for key, value in (query or {}).items() if value is not None}
            connection.request(
                method,
                path + (f"?{urlencode(parameters, doseq=True)}" if parameters else ""),
                body,
                headers,
            )
            response = connection.getresponse()
            if response.status >= 400:
                raise refusal(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise DeviceError(
                f"the daemon at {self.url} does not respond",
                expected="a daemon",
                received=str(error) or type(error).__name__,
                hint="start it with `ondevice serve`, or name another with --url",
            ) from None
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self._context is not None:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self.timeout_s, context=self._context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self.timeout_s)


def refusal(status: int, content: bytes) -> RefusedError:
    """Rebuild the error in a response, with the exit code of the same error on the command line."""
    values: dict[str, Any]
    try:
        values = json.loads(content)
        if isinstance(values.get("error"), dict):  # in OpenAI's format
            values = values["error"]
            values["error"] = values.get("code")
        values["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        values = {
            "message": f"the daemon responded with {status}",
            "received": content[:200].decode(errors="replace"),
        }
    error = RefusedError(
        values["message"],
        expected=values.get("expected"),
        received=values.get("received"),
        hint=values.get("hint"),
    )
    kind = getattr(errors, str(values.get("error")), ConfigError)
    error.exit_code = 2
    if isinstance(kind, type) and issubclass(kind, OndeviceError):
        error.exit_code = kind.exit_code
    error.status = status
    error.problems = tuple(values.get("problems") or ())
    return error
