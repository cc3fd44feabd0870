"""The engine's work in this process: ask it, and read every message."""

from __future__ import annotations

from typing import Any

from ondevice.core.errors import OndeviceError
from ondevice.server.engine import model
from ondevice.server.engine.process import Work
from ondevice.server.helper import rebuild_error


class Asked:
    """Requests of one `Work`, with what it has sent of each."""

    def __init__(self) -> None:
        self.sent: dict[int, list[dict[str, Any]]] = {}
        self.work = Work(self)  # type: ignore[arg-type]
        model._forget()

    def send(self, reply: dict[str, Any]) -> None:
        self.sent.setdefault(reply["id"], []).append(reply)

    def begin(self, number: int, call: str = "complete", **arguments: Any) -> None:
        """Begin a request with a number."""
        place = {"model": None, "artifact": None, "adapter": None, "job": None}
        self.work.take({"id": number, "call": call, "arguments": place | arguments})

    def finish(self) -> None:
        """Work until nothing is left."""
        while not self.work.is_idle:
            self.work.step()

    def parts(self, **arguments: Any) -> list[dict[str, Any]]:
        """Return the parts of a completion; raise its error."""
        number = len(self.sent)
        self.begin(number, **arguments)
        self.finish()
        *parts, last = self.sent[number]
        if "error" in last:
            raise self.error(number)
        return [reply["part"] for reply in parts]

    def text(self, **arguments: Any) -> str:
        """Return the text of a completion."""
        return "".join(part.get("text", "") for part in self.parts(**arguments))

    def error(self, number: int) -> OndeviceError:
        """Return the error that ended a request."""
        return rebuild_error(self.sent[number][-1]["error"])
