"""Bytes of torch tensors that live at once on the CPU, counted operation by operation: the same figure every time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Storages that were made inside the context and are still there; `peak` is the most at once.

    Temporaries inside one operation are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {
            id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id_of(leaf) not in self.known | before:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def id_of(tensor: torch.Tensor) -> int:
    """Of its storage."""
    return tensor.untyped_storage()._cdata
