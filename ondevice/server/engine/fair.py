"""A queue that is fair to clients: each client's requests in their order, the clients in turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ondevice.core.errors import BusyError

T = TypeVar("T")


class QueueFullError(BusyError):
    """The queue is full.

    Attributes:
        retry_after_s: seconds until there may be room.
    """

    retry_after_s = 1


class FairQueue(Generic[T]):
    """Waiting requests by client.

    Args:
        most: requests of all clients.
        most_of_one: requests of one client.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self.most = most
        self.most_of_one = most_of_one
        self._clients: OrderedDict[str, deque[T]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return (item for own in self._clients.values() for item in own)

    def check_room(self, client: str, count: int) -> None:
        """Raise QueueFullError unless `count` more requests of a client can wait."""
        own = len(self._clients.get(client, ()))
        if self._count + count > self.most or own + count > self.most_of_one:
            raise QueueFullError(
                "the queue of requests to the model is full",
                expected=f"at most {self.most} waiting requests, {self.most_of_one} of one client",
                received=f"{self._count} waiting, {own} of this client, and {count} more",
                hint="try again after the seconds in Retry-After",
            )

    def add(self, client: str, item: T) -> None:
        """Add a client's request after its others."""
        self._clients.setdefault(client, deque()).append(item)
        self._count += 1

    def remove(self, client: str, item: T) -> bool:
        """Remove a request; return False if it does not wait."""
        own = self._clients.get(client)
        if own is None or item not in own:
            return False
        own.remove(item)
        self._removed(client)
        return True

    def find(self, may_start: Callable[[str], bool], fits: Callable[[T], bool]) -> str | None:
        """Return the client whose first request is the next to start; None if none may start now.

        Args:
            may_start: whether another request of a client may start now; if not, it is skipped.
            fits: whether a request may start now; if not, all others wait with it, so that those
                which fit cannot keep it waiting for ever.
        """
        for client, own in self._clients.items():
            if may_start(client):
                if fits(own[0]):
                    return client
                return None
        return None

    def take(self, client: str) -> T:
        """Take a client's first request; the client goes behind the others."""
        item = self._clients[client].popleft()
        self._clients.move_to_end(client)
        self._removed(client)
        return item

    def _removed(self, client: str) -> None:
        self._count -= 1
        if not self._clients[client]:
            del self._clients[client]
