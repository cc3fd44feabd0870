"""Flower's grid in this process: what was sent waits until somebody asks for replies."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest


def name_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages name the run that Flower's own process would be in."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


class LocalGrid:
    """A grid whose devices are what `reply` says; None is a device that never replies."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.nodes = list(nodes)
        self.waiting: dict[str, Any] = {}
        self.count = 0

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def reply(self, node: int, content: Any) -> dict[str, Any] | None:
        raise NotImplementedError

    def ready(self, node: int, content: Any) -> bool:
        """Whether a device has its reply by now."""
        return True

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        first = self.count
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = str(self.count)
            self.waiting[str(self.count)] = message
        return [str(number + 1) for number in range(first, self.count)]

    def pull_messages(self, numbers: Iterable[str]) -> list[Any]:
        replies = []
        for name in numbers:
            message = self.waiting.get(name)
            if message is None or not self.ready(message.metadata.dst_node_id, message.content):
                continue
            del self.waiting[name]
            content = self.reply(message.metadata.dst_node_id, message.content)
            metadata = SimpleNamespace(
                src_node_id=message.metadata.dst_node_id, reply_to_message_id=name
            )
            if content is not None:
                replies.append(
                    SimpleNamespace(metadata=metadata, has_error=lambda: False, content=content)
                )
        return replies
