"""Repeated work as CUDA graphs: one launch instead of a hundred.

A graph repeats the same kernels on the same memory. So inputs and outputs have fixed memory, and a
`state` names everything else that the work depends on. If the state changes, the work runs without
a graph, and a new graph is made.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

WARM = 2
"""Runs before a graph is made: libraries choose their kernels, and unrepeated work needs no
graph."""
SHAPES = 4
"""Shapes of the first input that get graphs; work of other shapes runs without one."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work that has run before, does not do it, and gives what does it again."""
Compute = Callable[..., tuple[Tensor, ...]]

_BROKEN: list[torch.cuda.CUDAGraph] = []
"""Graphs that could not be ended, which PyTorch's allocator goes on asking about its blocks."""


@cache
def _stream(device: torch.device, thread: int) -> torch.cuda.Stream:
    """Return the stream of a thread's graphs: libraries keep a workspace for each stream."""
    return torch.cuda.Stream(device)


class CudaRecord:
    """Makes graphs of a CUDA device. They share their temporary memory: one runs at a time. Whoever
    takes a graph keeps alive the older tensors that it reads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = _stream(device, threading.get_ident())
        self.pool = torch.cuda.graph_pool_handle()
        tensor = torch.zeros(1, device=device)

        def add() -> None:
            tensor.add_(tensor + 1)

        self.first = self(add)  # a pool ends with its last graph

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), _no_collection():
            graph.capture_begin(
                pool=self.pool, capture_error_mode="thread_local"
            )  # other threads go on
            try:
                run()
            finally:
                _BROKEN.append(graph)
                graph.capture_end()
                _BROKEN.remove(graph)
        return graph.replay

    def again(self) -> CudaRecord:
        """Return a record with temporary memory of its own; this one's is free when its graphs
        are gone."""
        return CudaRecord(self.device)

    def beside(self) -> AbstractContextManager[None]:
        """Run the work of a block on the stream of the graphs: a library's workspace is one for
        each stream. Work before and after the block waits as usual."""
        return _on(self.stream, self.device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python from collecting garbage: a graph among it, of a session that has ended, would be
    destroyed, and CUDA then ends the capture that goes on."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _on(stream: torch.cuda.Stream, device: torch.device) -> Iterator[None]:
    """Run the work of a block on a stream. It holds no graph, so that graphs which are dropped
    within the block give their memory back."""
    here = torch.cuda.current_stream(device)
    stream.wait_stream(here)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        here.wait_stream(stream)


def recorder(device: torch.device) -> CudaRecord | None:
    """Return the recorder of graphs for a device; None if it has none."""
    if device.type == "cuda":
        return CudaRecord(device)
    return None


@dataclass
class _Known:
    """Work of one name and shape: its runs in this state, then its graph, inputs and outputs.

    `compute` keeps alive everything that the graph needs."""

    state: tuple[Any, ...]
    runs: int = 0
    replay: Callable[[], None] | None = None
    compute: Compute | None = None
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()


class Graphs:
    """Work by name; without a `record`, and while `paused`, it runs without graphs.

    Attributes:
        made: graphs so far.
    """

    def __init__(self, record: Record | None) -> None:
        self.record = record
        self.paused = False
        self.made = 0
        self.known: dict[tuple[Any, ...], _Known] = {}
        self.memory: dict[tuple[Any, ...], Tensor] = {}
        self.shapes: set[torch.Size] = set()

    def run(
        self,
        name: tuple[Any, ...],
        state: tuple[Any, ...] | None,
        inputs: tuple[Tensor, ...],
        compute: Compute,
    ) -> tuple[Tensor, ...]:
        """Run `compute(*inputs)`: tensors that are the caller's own.

        Args:
            state: addresses and numbers that `compute` reads in addition to its inputs; None: they
                vary.
        """
        if self.record is None or state is None or self.paused:
            return compute(*inputs)
        shapes = tuple(x.shape for x in inputs)
        known = self.known.get((*name, shapes))
        if known is None or known.state != state:
            known = self.known[(*name, shapes)] = _Known(state)
        if known.replay is None:
            outputs = compute(*inputs)
            known.runs = known.runs + 1
            if known.runs > WARM and (
                not shapes or shapes[0] in self.shapes or len(self.shapes) < SHAPES
            ):
                self._make(self.record, known, inputs, outputs, compute)
            return outputs
        for target, source in zip(known.inputs, inputs, strict=True):
            target.copy_(source)
        known.replay()
        return tuple(out.clone() for out in known.outputs)

    def _make(
        self,
        record: Record,
        known: _Known,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        compute: Compute,
    ) -> None:
        if inputs:
            self.shapes.add(inputs[0].shape)
        known.inputs = self._kept("in", inputs)
        known.outputs = self._kept("out", outputs)
        known.compute = compute

        def run() -> None:
            for target, value in zip(known.outputs, compute(*known.inputs), strict=True):
                target.copy_(value)

        known.replay = record(run)
        self.made = self.made + 1

    def _kept(self, side: str, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Memory that all work with such tensors uses, one after the other."""
        buffers = []
        for number, x in enumerate(like):
            key = side, number, x.shape, x.dtype, x.device
            if key not in self.memory:
                self.memory[key] = torch.empty_like(
                    x, memory_format=torch.contiguous_format, requires_grad=False
                )
            buffers.append(self.memory[key])
        return tuple(buffers)
