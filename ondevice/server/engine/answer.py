"""A request to the model, as its route sees it: parts that arrive, an end, and `cancel`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from ondevice.core.errors import OndeviceError

PLACE = ("model", "artifact", "adapter", "precise")
"""Arguments that say where the model is."""


class Answer:
    """An answer on its way; only the event loop that made it reads it.

    Args:
        client: whose request it is.
        call: what the process runs: `complete` or `predict`.
        arguments: of the call; requests with the same `PLACE` can run together.
        leave: called once, when nobody reads the answer any more.

    Attributes:
        value: the call's return value, once all parts were read.
    """

    def __init__(
        self,
        client: str,
        call: str,
        arguments: dict[str, Any],
        leave: Callable[[Answer], None],
    ) -> None:
        self.client = client
        self.call = call
        self.arguments = arguments
        self.place = [arguments.get(name) for name in PLACE]
        self.value: Any = None
        self.number = 0
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[dict[str, Any] | OndeviceError] = asyncio.Queue()
        self._is_over = False

    def put(self, message: dict[str, Any] | OndeviceError) -> None:
        """Pass on a part, the value, or an error; any thread may call this."""
        try:
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)
        except RuntimeError:  # the loop is closed: the daemon stops
            return

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
