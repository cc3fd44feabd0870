"""Walks a schedule: gives each stage its arrays, computes where the schedule says so, and drops what is dead."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import mlx.core as mx

from ondevice.methods.mesp.mlx.schedule import Call, Ref
from ondevice.methods.mesp.mlx.weights import part

Update = Callable[[str, Any, Any], None]
"""Takes the target, and the gradients of A [rank, inputs] and of B [outputs, rank]."""


class Functions(Protocol):
    """The stages: Python's, or those of an artifact."""

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """The outputs of `stage` by name."""
        ...


class BlockWeights(Protocol):
    """One block's frozen arrays by their names in the schedule."""

    def get(self, ref: Ref) -> Any:
        """An array or a range of it; read from its file where that is where it is."""
        ...

    def drop(self, name: str) -> None:
        """Nothing uses it in this pass any more."""
        ...


class Machine:
    """Runs calls.

    Args:
        functions: the stages.
        evaluate: compute at the schedule's places; False leaves a whole pass to one evaluation.
        clear: give back what MLX's allocator keeps after every evaluation.
    """

    def __init__(self, functions: Functions, *, evaluate: bool = True, clear: bool = True) -> None:
        self.functions, self.evaluate, self.clear = functions, evaluate, clear

    def run(
        self,
        calls: list[Call],
        given: dict[str, Any],
        weights: BlockWeights,
        adapter: Mapping[str, Any],
        update: Update | None = None,
    ) -> dict[str, Any]:
        """Run `calls` over one block.

        Args:
            given: the arrays that the schedule begins with; taken over and emptied.
            adapter: A and B by target: `q_proj.A`.
            update: called with each pair's gradients.

        Returns:
            What the schedule leaves.
        """
        held, pending = given, []
        for call in calls:
            if call.stage == "update":
                pair = (held.pop(call.inputs[side].name) for side in ("dA", "dB"))
                if update is not None:
                    update(call.outputs["target"], *pair)
                continue
            arrays = {name: _find(ref, held, weights, adapter) for name, ref in call.inputs.items()}
            made = self.functions.call(call.stage, arrays)
            arrays.clear()
            held.update({name: made.pop(output) for output, name in call.outputs.items()})
            made.clear()
            pending += call.outputs.values()
            for name in call.free:
                if held.pop(name, None) is None:
                    weights.drop(name)
            if call.evaluate and self.evaluate:
                mx.eval([held[name] for name in pending if name in held])
                pending = []
                if self.clear:
                    clear_cache()
        return held


def _find(ref: Ref, held: dict[str, Any], weights: BlockWeights, adapter: Mapping[str, Any]) -> Any:
    found = held if ref.name in held else adapter if ref.name in adapter else None
    return weights.get(ref) if found is None else part(found[ref.name], ref)


def clear_cache() -> None:
    """Give what MLX's allocator keeps back to the system."""
    mx.clear_cache()


def trim() -> None:
    """Give what glibc keeps back to the system; nothing elsewhere."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        except (OSError, AttributeError):
            pass
