"""Each stage as a `.mlxfn` file that all layers share: weights are inputs, and every shape that a
step uses is a trace.

Shapes cannot be left open (MLX refuses it for rotary embeddings, slices and masks), so a step of
each length bucket is run once on random numbers, and what every stage was called with is exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.core.manifest import ProgramMethod, TensorPort
from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.mesp.mlx.model import Model
from ondevice.methods.mesp.mlx.session import Optimizer
from ondevice.methods.mesp.mlx.stages import Stages
from ondevice.methods.mesp.mlx.weights import Weights

Trace = tuple[tuple[str, tuple[int, ...], Any], ...]
"""Name, shape and dtype of each input, by name."""


class Recording:
    """Python's stages, which note what they are called with."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.traces: dict[str, dict[Trace, tuple[tuple[str, tuple[int, ...], Any], ...]]] = {}

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Run `stage` and note its inputs and outputs."""
        key = tuple(
            (name, tuple(arrays[name].shape), arrays[name].dtype) for name in sorted(arrays)
        )
        results = self.stages.call(stage, dict(arrays))
        outputs = tuple(
            (name, tuple(results[name].shape), results[name].dtype) for name in sorted(results)
        )
        self.traces.setdefault(stage, {})[key] = outputs
        return results


def record(
    model: Model, config: MespConfig, batch_size: int, lengths_tokens: tuple[int, ...]
) -> Recording:
    """Run one step of each bucket through the first block, the loss and the optimizer; nothing of
    `model` changes."""
    stages = model.interpreter.functions
    assert isinstance(stages, Stages)  # noqa: S101 - an artifact is not exported again
    recording = Recording(stages)
    weights = model.weights
    short = Weights(
        weights.blocks[:1], weights.table, weights.final, tied=weights.tied, bits=model.settings.bits,
        streamed=weights.streamed,
    )  # fmt: skip
    block_model = Model(
        model.settings, short, loss_tiles=config.loss_tiles, functions=recording, fixed_chunks=True
    )
    block_model.tiles, block_model.adapter = model.tiles, [dict(model.adapter[0])]
    optimizer = Optimizer(config, recording)
    optimizer.begin(config.learning_rate)
    for length in lengths_tokens:
        block_model.chunk_tokens = chunk_tokens(config, batch_size, length)
        ids = np.zeros((batch_size, length), dtype=np.int64)
        x = block_model.embed(ids)
        _, g = block_model.loss(block_model.forward(0, x), ids, ids.size)
        block_model.backward(0, x, g, lambda *_: None)
        block_model.row_nll_of(x, ids)
    for name, value in block_model.adapter[0].items():
        mx.eval(optimizer.update(name, value, value))
    return recording


def chunk_tokens(config: MespConfig, batch_size: int, length_tokens: int) -> int:
    """Return labelled tokens whose loss a program computes at once."""
    return min(config.loss_chunk_tokens or 128, batch_size * length_tokens)


def export_functions(recording: Recording, folder: Path) -> dict[str, Any]:
    """Write `STAGE.mlxfn` for every stage; gives file and outputs by stage, as `program.json` lists
    them."""
    folder.mkdir(parents=True)
    listed = {}
    for stage, traces in sorted(recording.traces.items()):
        outputs = {tuple(name for name, _, _ in trace_outputs) for trace_outputs in traces.values()}
        (names,) = outputs  # a stage gives the same names whatever it takes

        def run(stage: str = stage, names: tuple[str, ...] = names, **arrays: Any) -> list[Any]:
            results = recording.stages.call(stage, arrays)
            return [results[name] for name in names]

        path = folder / f"{stage}.mlxfn"
        with mx.exporter(str(path), run) as exporter:
            for trace in traces:
                exporter(**{name: mx.zeros(shape, dtype=dtype) for name, shape, dtype in trace})
        listed[stage] = {"file": path.name, "outputs": list(names)}
    return listed


def ports(recording: Recording) -> dict[str, ProgramMethod]:
    """Return every trace of every stage with its inputs and outputs, for the manifest."""
    methods = {}
    for stage, traces in sorted(recording.traces.items()):
        for number, (inputs, outputs) in enumerate(traces.items()):
            methods[f"{stage}#{number}" if len(traces) > 1 else stage] = ProgramMethod(
                inputs=tuple(map(_port, inputs)), outputs=tuple(map(_port, outputs)),
                planned_bytes=0, ops=(), delegates=0, instructions=0,
            )  # fmt: skip
    return methods


def _port(entry: tuple[str, tuple[int, ...], Any]) -> TensorPort:
    name, shape, dtype = entry
    return TensorPort(name=name, dtype=str(dtype).removeprefix("mlx.core."), shape=shape)
