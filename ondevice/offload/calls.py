"""One call of a block: its arguments, taken apart so that it can be called again on other tensors."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ondevice.core.errors import ModelError


@dataclass
class Call:
    """One call of a block: its arguments taken apart, and how to call it with other tensors.

    Attributes:
        tensors: those among the arguments, the hidden states first.
        rows, length: of the batch.
        given: the structure of what it returned, and of the dictionaries it was called with.
        kinds: of these dictionaries.
        random: the state of dropout's numbers at the begin of each micro-batch.
    """

    forward: Callable[..., Any]
    leaves: list[Any]
    structure: Any
    rows: int
    length: int = 0
    given: Any = None
    kinds: list[type] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    random: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls, forward: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Call:
        """Take the arguments of a call apart."""
        opened = tuple(map(_open_store, arguments)), {k: _open_store(v) for k, v in named.items()}
        leaves, structure = pytree.tree_flatten(opened)
        for leaf in leaves:
            _check_leaf(leaf)
        call = cls(forward, leaves, structure, 0)
        call.kinds = [type(store) for store in stores(arguments, named)]
        call.places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        call.rows, call.length = call.tensors[0].shape[:2]
        return call

    @property
    def tensors(self) -> list[Tensor]:
        return [self.leaves[at] for at in self.places]

    def forget(self) -> None:
        """Free the tensors: the passes keep them."""
        for at in self.places:
            self.leaves[at] = None

    def run(self, tensors: list[Tensor]) -> list[Any]:
        """Call the block with other tensors; returns the leaves of its results."""
        leaves = list(self.leaves)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        arguments, named = pytree.tree_unflatten(leaves, self.structure)
        kinds = iter(self.kinds)

        def close(value: Any) -> Any:
            return next(kinds)(value) if isinstance(value, MutableMapping) else value

        arguments = tuple(map(close, arguments))
        named = {key: close(value) for key, value in named.items()}
        result = self.forward(*arguments, **named)
        written = [dict(store) for store in stores(arguments, named)]
        left, self.given = pytree.tree_flatten((result, written))
        return left

    def split(self, tensor: Tensor, rows: slice) -> Tensor:
        """Return a micro-batch's part of an argument: one whose length is the batch's, or a
        multiple of it (a row of each head) that is not the length of the rows."""
        count = len(tensor) if tensor.ndim > 1 else 0
        if not count or count % self.rows or (count == self.length and count != self.rows):
            return tensor
        each = count // self.rows
        return tensor[rows.start * each : rows.stop * each]


def stores(arguments: tuple[Any, ...], named: dict[str, Any]) -> list[MutableMapping[Any, Any]]:
    """Return the dictionaries among a call's arguments, which a block may write to."""
    return [value for value in (*arguments, *named.values()) if isinstance(value, MutableMapping)]


def _open_store(value: Any) -> Any:
    """Return a plain dictionary for one of another kind, which hides its tensors."""
    return dict(value) if isinstance(value, MutableMapping) else value


def _check_leaf(leaf: Any) -> None:
    """Refuse an argument that hides a tensor with a gradient: the gradient would be lost."""
    hidden = [] if isinstance(leaf, Tensor) else pytree.tree_leaves(getattr(leaf, "__dict__", {}))
    if any(isinstance(value, Tensor) and value.requires_grad for value in hidden):
        raise ModelError(
            "a block hands on tensors in an object that cannot be followed",
            expected="tensors, or tuples, lists and dictionaries of them",
            received=type(leaf).__name__,
        )
