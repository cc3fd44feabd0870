"""Graphs by the shape of a batch, and the lengths that batches are padded to: few shapes serve all
lengths.

Graphs share their temporary memory, since one runs at a time. The memory is that of the largest
shape: when a larger one comes, all graphs are dropped and made again, so that smaller ones lie in
its memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ondevice.core.session import IGNORE
from ondevice.offload.graphs import CudaRecord, Record

log = logging.getLogger(__name__)
TOKENS = 8192
"""Tokens of a batch that get graphs, at most."""
PRODUCTS = 750 * 10**9
"""Products of a block's forward pass, at most, over all tokens, if memory is scarce: graphs have
memory of their own, and the launches of more all but hide behind the kernels."""
SHAPES = 24
"""Shapes that get graphs; batches of other shapes run without."""
WARM = 1
"""Steps of a shape before its graphs: libraries choose their kernels."""
BUCKETS = 8
"""Lengths between a power of two and the next one that batches are padded to."""
SHORTEST = 32
Passes = TypeVar("Passes")
T = TypeVar("T")


def most_tokens(block_parameters: int) -> int:
    """Return how many tokens of a batch get graphs, at most, if memory is scarce."""
    return min(TOKENS, PRODUCTS // block_parameters)


def bucket(rows: int, length_tokens: int) -> int:
    """Return the length that such a batch is padded to, so that few shapes serve all lengths."""
    if rows * length_tokens > TOKENS:
        return length_tokens
    step = max(SHORTEST, (1 << (length_tokens - 1).bit_length()) // (2 * BUCKETS))
    padded = -(-length_tokens // step) * step
    return padded if rows * padded <= TOKENS else length_tokens


def padded(
    ids: np.ndarray, labels: np.ndarray, rows: int | None, longest_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 [B, T] ids and labels at the length of their bucket; padding has no label.

    It is the same with graphs and without, so that the bits are those of every other setting.

    Args:
        rows: computed at once, at most; None is all.
        longest_tokens: that the model takes; where a bucket is longer, nothing is padded.
    """
    length = ids.shape[1]
    wanted = bucket(min(len(ids), rows or len(ids)), length)
    if wanted > longest_tokens:
        return ids, labels
    more = ((0, 0), (0, wanted - length))
    return np.pad(ids, more), np.pad(labels, more, constant_values=IGNORE)


def empty_cache() -> None:
    """Give back the GPU's memory that garbage holds and that the allocator keeps: graphs take memory of
    their own, and small tensors of a run that failed lie in large blocks, which nobody else then gets."""
    gc.collect()
    torch.cuda.empty_cache()


class ShapeGraphs(Generic[Passes]):
    """Graphs by shape.

    Attributes:
        record: makes graphs; None once they have failed.
        tokens: of a batch that gets graphs, at most.
        made: of each shape that has graphs.
    """

    def __init__(self, record: Record | CudaRecord | None, tokens: int = TOKENS) -> None:
        self.record = record
        self.tokens = tokens
        self.runs: dict[torch.Size, int] = {}
        self.made: dict[torch.Size, Passes] = {}
        self.memory: Tensor | None = None
        self.told: set[str] = set()

    def of_shape(self, shape: torch.Size, make: Callable[[Record], Passes]) -> Passes | None:
        """Return the graphs of this shape, which are made if it has run before; None if it has
        none."""
        if shape in self.made:
            return self.made[shape]
        self.runs[shape] = self.runs.get(shape, 0) + 1
        enough = (
            self.runs[shape] > WARM and len(self.made) < SHAPES and shape.numel() <= self.tokens
        )
        if self.record is None or not enough:
            return None
        if shape.numel() > max((s.numel() for s in self.made), default=shape.numel()):
            self.release()
        try:
            self.made[shape] = make(self.record)
        except torch.OutOfMemoryError:
            self.end("no memory for CUDA graphs of {} x {} tokens".format(*shape))
            return None
        except RuntimeError as error:
            self.end(f"CUDA graphs cannot hold the passes ({_cause(error)})")
            return None
        return self.made[shape]

    def release(self) -> None:
        """Drop all graphs and give back their memory; they are made again when they are used."""
        self.made = {}
        self.memory = None
        if isinstance(self.record, CudaRecord):
            self.record = self.record.again()

    def end(self, reason: str) -> None:
        """Make no more graphs, and log why."""
        log.warning("%s: steps run without", reason)
        self.record = None

    def beside(self) -> AbstractContextManager[None]:
        """Return a context for what runs without a graph; see `CudaRecord.beside`."""
        if isinstance(self.record, CudaRecord):
            return self.record.beside()
        return nullcontext()

    def with_room(self, run: Callable[[], T]) -> T:
        """Return what `run` does; if it lacks memory, once more without graphs."""
        with self.beside():
            try:
                return run()
            except torch.OutOfMemoryError:
                if not self.made:
                    raise
            self.release()
            self.end("no memory for CUDA graphs and what runs next to them")
        empty_cache()
        return run()

    def tell(self, reason: str) -> None:
        """Log once why steps run without graphs."""
        if reason not in self.told:
            self.told.add(reason)
            log.info("steps run without CUDA graphs: %s", reason)

    def carrier(self, tokens: int, like: Tensor) -> Tensor:
        """Return [tokens, D] in the width, precision and place of `like` [.., D]: memory of the
        largest shape, of which smaller ones take a part."""
        if self.memory is None or self.memory.shape[0] < tokens:
            self.memory = like.new_empty((tokens, like.shape[-1]))
        return self.memory[:tokens]


def _cause(error: BaseException) -> str:
    """Return the first line of the error that others followed."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0]
