"""A request to the model, as its route sees it: parts that arrive, an end, and `cancel`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ondevice.core.errors import BusyError, OndeviceError

PLACE = ("model", "artifact", "adapter", "precise")
"""Arguments that say where the model is."""
TOGETHER = {"complete": PLACE, "predict": (*PLACE, "folder", "task")}
"""Arguments that calls have in common which run together."""
MOST_UNREAD = 1 << 17
"""Most values of one request that wait for a reader: parts, and probabilities in them. Each takes
some 400 bytes."""


def probabilities(tokens: Iterable[Mapping[str, Any]]) -> int:
    """Return how many probabilities tokens report: their own, and those of alternatives."""
    return sum(1 + len(token["top_logprobs"]) for token in tokens)


def values_of(part: dict[str, Any]) -> int:
    """Return how many values a part has: itself, and the probabilities of its tokens."""
    return 1 + probabilities([*part.get("prompt", ()), *part.get("tokens", ())])


@dataclass
class Unread:
    """Values of the answers to one request that wait for its reader."""

    count: int = 0


class Answer:
    """An answer on its way; only the event loop that made it reads it.

    Args:
        client: whose request it is.
        call: what the process runs: `complete` or `predict`.
        arguments: of the call; requests with the same ones of `TOGETHER` run together, unless
            `one_at_a_time` is among them, as for texts of an artifact's program.
        leave: called once, when nobody reads the answer any more.
        unread: of the request; beyond `MOST_UNREAD` the answer ends with an error.

    Attributes:
        value: the call's return value, once all parts were read.
    """

    def __init__(
        self,
        client: str,
        call: str,
        arguments: dict[str, Any],
        leave: Callable[[Answer], None],
        unread: Unread | None = None,
    ) -> None:
        self.client = client
        self.call = call
        self.one_at_a_time = bool(arguments.get("one_at_a_time"))
        self.arguments = {name: one for name, one in arguments.items() if name != "one_at_a_time"}
        self.place = [call, *(arguments.get(name) for name in TOGETHER[call])]
        self.value: Any = None
        self.number = 0
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[dict[str, Any] | OndeviceError] = asyncio.Queue()
        self._is_over = False
        self._is_cut = False
        self._unread = unread or Unread()

    def put(self, message: dict[str, Any] | OndeviceError) -> None:
        """Pass on a part, the value, or an error; any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._arrived, message)
        except RuntimeError:  # the loop is closed: the daemon stops
            return

    def _arrived(self, message: dict[str, Any] | OndeviceError) -> None:
        """Keep a message for the reader, unless too many values wait already."""
        if self._is_cut:
            return
        if isinstance(message, dict) and "part" in message:
            self._unread.count += values_of(message["part"])
        if self._unread.count > MOST_UNREAD:
            self._is_cut = True
            self._leave(self)
            message = BusyError(
                "the client reads more slowly than the model answers",
                expected=f"at most {MOST_UNREAD} tokens and probabilities that wait for the client",
                received=self._unread.count,
                hint="read the stream as it comes, or ask for fewer logprobs",
            )
        self._messages.put_nowait(message)

    async def next(self) -> Any:
        """Wait for the next part; return None after the last one.

        Raises:
            OndeviceError: the call raised it, or its process died.
        """
        if self._is_over:
            return None
        message = await self._messages.get()
        if isinstance(message, OndeviceError):
            self._is_over = True
            raise message
        if "value" in message:
            self._is_over = True
            self.value = message["value"]
            return None
        self._unread.count -= values_of(message["part"])
        return message["part"]

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (part := await self.next()) is not None:
            yield part

    def cancel(self) -> None:
        """End the answer, because nobody reads it any more; after its end this does nothing."""
        if not self._is_over:
            self._is_over = True
            self._messages.put_nowait({"value": None})  # for a reader that waits for a part
            self._leave(self)
