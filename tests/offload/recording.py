"""A CUDA graph's part on a CPU: every kernel of some work, on the memory that it had, done again without its Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Places and names of the arguments that an operator writes to."""
    schema = enumerate(func._schema.arguments)
    return [
        (number, one.name)
        for number, one in schema
        if one.alias_info is not None and one.alias_info.is_write
    ]


class Recording(TorchDispatchMode):
    """Notes calls; what they change is put back by `undo`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for number, name in _written(func):
            target = args[number] if number < len(args) else kwargs.get(name)
            self.before += [
                (x.detach(), x.detach().clone())
                for x in tree_leaves(target)
                if isinstance(x, Tensor)
            ]
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for target, value in reversed(self.before):
            target.copy_(value)
        self.before = []

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.detach().copy_(new)


def record(run: Callable[[], None]) -> Callable[[], None]:
    """See `ondevice.offload.graphs.Record`."""
    recording = Recording()
    with recording:
        run()
    recording.undo()
    return recording.replay
