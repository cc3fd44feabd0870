"""What a block's forward pass hands to its backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Kept:
    """What a block's forward pass hands to its backward pass, in addition to the block's input.

    Attributes:
        attention: keep attention's output and its log-sum-exp.
        mlp: keep gate and up.
        projections: keep q, k, v and the block's middle.
        tensors: what was kept, by name.
    """

    attention: bool = False
    mlp: bool = False
    projections: bool = False
    tensors: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str) -> Any:
        """Return what was kept, and let it go; None if it was not."""
        return self.tensors.pop(name, None)
