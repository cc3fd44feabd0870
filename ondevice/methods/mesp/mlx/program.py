"""MeSP's step as a program for MLX: stages as functions, and everything else that a host needs to
train as data.

The data is `program.json`, so that a host has no formula and no layer in it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ArtifactError
from ondevice.core.manifest import Manifest, ProgramMethod, TensorPort
from ondevice.core.program import StagesProgram
from ondevice.core.session import ProgramSession
from ondevice.core.untrusted import read_object, well_formed
from ondevice.methods.mesp.check import IN_MLX, check_family, check_mlx_settings
from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.mesp.lora import initial_tensors, lora_parameters
from ondevice.methods.mesp.mlx.instructions import ANY_LENGTH, BY_LENGTH, LAYER_INPUT_LIST
from ondevice.methods.mesp.mlx.mixers import Instruction, Operand, update
from ondevice.methods.mesp.mlx.model import Functions, Model
from ondevice.methods.mesp.mlx.session import MlxSession, Optimizer, settings_of
from ondevice.methods.mesp.mlx.settings import Rope, Settings, matrix_parts
from ondevice.methods.mesp.mlx.weights import (
    Source,
    Weights,
    load_weights,
    open_weights,
    write_weights,
)
from ondevice.models import ModelFiles, family_classes
from ondevice.models.families.base import in_checkpoint

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig
    from ondevice.core.session import StepResult, Weigh

WEIGHTS = "weights"
FORMAT = 2
HANDS_ON = 3
"""The format if blocks read more than the residual stream, which older hosts do not give them."""
Arrays = tuple[tuple[str, tuple[int, ...], Any], ...]
"""Name, shape and dtype of arrays, by name."""


def _described(arrays: dict[str, Any]) -> Arrays:
    return tuple((name, tuple(arrays[name].shape), arrays[name].dtype) for name in sorted(arrays))


class Recording:
    """Python's stages, which note what they are called with.

    Shapes cannot be left open (MLX refuses it for rotary embeddings, slices and masks), so a step
    of each length bucket is run once on random numbers, and what every stage was called with is
    exported.

    Attributes:
        traces: by stage, its outputs for each kind of inputs.
    """

    def __init__(self, stages: Functions) -> None:
        self.stages = stages
        self.traces: dict[str, dict[Arrays, Arrays]] = {}

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Run `stage` and note its inputs and outputs."""
        inputs = _described(arrays)
        results = self.stages.call(stage, dict(arrays))
        self.traces.setdefault(stage, {})[inputs] = _described(results)
        return results

    def export(self, folder: Path) -> dict[str, Any]:
        """Write `STAGE.mlxfn` for every stage, which all layers share: weights are inputs, and
        every shape is a trace. Return file and outputs by stage, as `program.json` lists them."""
        folder.mkdir(parents=True)
        listed = {}
        for stage, traces in sorted(self.traces.items()):
            outputs = next(iter(traces.values()))  # the same names for all inputs
            names = [name for name, _, _ in outputs]

            def run(stage: str = stage, names: list[str] = names, **arrays: Any) -> list[Any]:
                results = self.stages.call(stage, arrays)
                return [results[name] for name in names]

            with mx.exporter(str(folder / f"{stage}.mlxfn"), run) as exporter:
                for trace in traces:
                    exporter(**{name: mx.zeros(shape, dtype=dtype) for name, shape, dtype in trace})
            listed[stage] = {"file": f"{stage}.mlxfn", "outputs": names}
        return listed

    def ports(self) -> dict[str, ProgramMethod]:
        """Return every trace of every stage with its inputs and outputs, for the manifest."""
        methods = {}
        for stage, traces in sorted(self.traces.items()):
            for number, (inputs, outputs) in enumerate(traces.items()):
                name = f"{stage}#{number}" if len(traces) > 1 else stage
                methods[name] = ProgramMethod(
                    inputs=_ports(inputs), outputs=_ports(outputs),
                    planned_bytes=0, ops=(), delegates=0, instructions=0,
                )  # fmt: skip
        return methods


def _ports(arrays: Arrays) -> tuple[TensorPort, ...]:
    return tuple(
        TensorPort(name=name, dtype=str(dtype).removeprefix("mlx.core."), shape=shape)
        for name, shape, dtype in arrays
    )


def record(
    model: Model, config: MespConfig, batch_size: int, lengths_tokens: tuple[int, ...]
) -> Recording:
    """Run one step of each bucket through the first blocks, until every kind was there, the loss
    and the optimizer; nothing of `model` changes."""
    recording = Recording(model.interpreter.functions)
    weights = model.weights
    count = 1 + max(_first_layers(kinds_of(model, lengths_tokens)))
    first = Weights(
        weights.blocks[:count],
        weights.table,
        weights.final,
        tied=weights.tied,
        bits=model.settings.bits,
    )
    block = Model(model.settings, first, functions=recording, fixed_chunks=True)
    block.tiles = model.tiles
    block.adapter = [dict(held) for held in model.adapter[:count]]
    optimizer = Optimizer(config, recording)
    optimizer.begin(config.learning_rate)
    for length in lengths_tokens:
        block.chunk_tokens = chunk_tokens(config, batch_size, length)
        ids = np.zeros((batch_size, length), dtype=np.int64)
        block.forward_backward(ids, ids, 1.0, lambda *_: None)
        block.row_nll(ids, ids)
    for layer, held in enumerate(block.adapter):
        for name, value in held.items():
            mx.eval(optimizer.update(f"{layer}.{name}", value, value))
    return recording


def kinds_of(model: Model, lengths_tokens: tuple[int, ...]) -> list[int]:
    """Return the kind of each layer's block, numbered in the order of the layers: blocks of one kind
    have the same instructions and arrays of the same shapes."""
    numbers: dict[str, int] = {}
    return [
        numbers.setdefault(_kind(model, layer, lengths_tokens), len(numbers))
        for layer in range(model.settings.dims.layers)
    ]


def _kind(model: Model, layer: int, lengths_tokens: tuple[int, ...]) -> str:
    dims = model.settings.dims
    lists = [_of_block(model, length, layer) for length in lengths_tokens]
    linears = [(part, one.inputs, one.outputs) for part, one in dims.block_linears(layer).items()]
    return json.dumps([lists, linears, dims.head_width(layer), dims.key_heads(layer)])


def _first_layers(kinds: list[int]) -> list[int]:
    """List the first layer of each kind."""
    return [kinds.index(number) for number in range(max(kinds) + 1)]


def chunk_tokens(config: MespConfig, batch_size: int, length_tokens: int) -> int:
    """Return the label tokens whose loss a program computes at once."""
    return min(config.loss_chunk_tokens or 128, batch_size * length_tokens)


def program(
    session: MlxSession, functions: dict[str, Any], batch_size: int, lengths_tokens: tuple[int, ...]
) -> dict[str, Any]:
    """Return the program's entire description; see docs/results/mesp.md for what a host does with
    it."""
    # As data, to the last bound of a tile: the C++ and Swift hosts interpret this list and know no
    # method.
    model = session.model
    config = session.config
    settings = model.settings
    traits = settings.dims.traits
    kinds = kinds_of(model, lengths_tokens)
    first = _first_layers(kinds)
    lists = (*ANY_LENGTH, *((LAYER_INPUT_LIST,) if traits.layer_input else ()))
    optimizer = ("beta1", "beta2", "eps", "weight_decay", "learning_rate")
    return {
        "format": HANDS_ON if traits.hands_on else FORMAT,
        "mlx_version": version("mlx"),
        "layers": settings.dims.layers,
        "hidden": settings.dims.hidden,
        "tied": settings.dims.tied,
        "parts": list(matrix_parts(settings.bits)),
        "dtype": settings.dtype,
        "settings": {name: value for name, value in asdict(settings).items() if name != "dims"},
        "loss_tiles": [list(tile) for tile in model.tiles],
        "batch_size": batch_size,
        "optimizer": {name: getattr(config, name) for name in optimizer}
        | {"name": config.optimizer},
        "lora_parameters": [
            {
                "layer": lora.layer,
                "target": traits.part(lora.target),
                "A": lora.a_name,
                "B": lora.b_name,
            }
            for lora in session.parameters
        ],
        "functions": functions,
        "instructions": {name: listed(model.listed(name)) for name in lists},
        "lengths": {
            str(length): {
                "loss_rows": chunk_tokens(config, batch_size, length),
                **_of_block(model, length, first[0]),
                "others": [_of_block(model, length, layer) for layer in first[1:]],
            }
            for length in lengths_tokens
        },
        "kinds": kinds,
        "key_layers": list(traits.key_layers),
    }


def _of_block(model: Model, length_tokens: int, layer: int) -> dict[str, Any]:
    return {name: listed(model.listed(name, length_tokens, layer)) for name in BY_LENGTH}


def listed(instructions: list[Instruction]) -> list[dict[str, Any]]:
    """Return instructions as JSON: an input is [the function's name of it, its name in the block,
    axis, start, stop], axis -1 for all of it; `free` is dead after it."""
    entries: list[dict[str, Any]] = []
    for instruction in instructions:
        if instruction.stage == "update":
            entries.append({"update": instruction.outputs["target"]})
            continue
        inputs = [
            [name, operand.name, operand.axis, operand.start, operand.stop]
            for name, operand in instruction.inputs.items()
        ]
        outputs = [[name, place] for name, place in instruction.outputs.items()]
        entries.append({"function": instruction.stage, "inputs": inputs, "outputs": outputs,
                        "evaluate": instruction.evaluate, "free": list(instruction.free)})  # fmt: skip
    return entries


def written(program: dict[str, Any]) -> dict[tuple[str, int, int], list[Instruction]]:
    """Return what `listed` wrote, by name, length and kind of block (older programs have one)."""
    by_name = {(name, 0, 0): entries for name, entries in program["instructions"].items()}
    for length, one in program["lengths"].items():
        for kind, lists in enumerate((one, *one.get("others", ()))):
            by_name |= {(name, int(length), kind): lists[name] for name in BY_LENGTH}
    return {key: [_instruction(entry) for entry in entries] for key, entries in by_name.items()}


def _instruction(entry: dict[str, Any]) -> Instruction:
    if "update" in entry:
        return update(entry["update"])
    inputs = {name: Operand(*operand) for name, *operand in entry["inputs"]}
    outputs = dict(entry["outputs"])
    return Instruction(entry["function"], inputs, outputs, entry["evaluate"], tuple(entry["free"]))


def problems(files: ModelFiles | None, config: MespConfig) -> list[str]:
    """Return settings that a program does not have.

    Raises:
        OndeviceError: a setting that the model's files stand against.
    """
    problems = []
    if config.max_grad_norm is not None:
        problems.append("max_grad_norm: a program updates each block as its gradients are known")
    if config.micro_batch_size is not None:
        problems.append("micro_batch_size: a program computes export.batch_size rows at once")
    if files is not None:
        check_mlx_settings(config)
        check_family(files.dims, IN_MLX, "a program of mesp in MLX")
        settings_of(files, config)
    return problems


def write(
    session: MlxSession,
    files: ModelFiles,
    config: MespConfig,
    export: ExportConfig,
    folder: Path,
    functions: Path,
) -> dict[str, ProgramMethod]:
    """See `StagesProgram.write`."""
    lengths = tuple(sorted(export.lengths_tokens))
    recording = record(session.model, config, export.batch_size, lengths)
    described = program(session, recording.export(functions), export.batch_size, lengths)
    (folder / WEIGHTS).mkdir()
    source = Source(files.folder, session.model.settings, files.family)
    write_weights(source, folder / WEIGHTS)
    source.close()
    (folder / "program.json").write_text(json.dumps(described) + "\n", encoding="utf-8")
    return recording.ports()


class MlxProgramSession(ProgramSession, MlxSession):
    """Runs an artifact's program; batches are int64 [batch_size, one of lengths_tokens]. No stage
    of a step is Python's own; those that write answers are (`cached.Reader`).

    Args:
        folder: the artifact.
        manifest: its checked manifest.
        functions: `call(stage, arrays)` runs a stage.
        streamed: read the weights from their files block by block; None: as the method's settings
            say.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, functions: Any, streamed: bool | None = None
    ) -> None:
        folder = Path(folder)
        path = folder / manifest.program
        self.program = read_object(path, ArtifactError, hint="copy the artifact again")
        config = MespConfig.parse(manifest.method, "manifest.json: method")
        dims = ModelDims.from_manifest(manifest.model.dims)
        with well_formed(path, ArtifactError, hint="copy the artifact again"):
            settings = _settings(self.program["settings"], dims)
            blocks = str(self.program["lora_parameters"][0]["A"]).partition(".layers.")[0]
            tiles = [(int(low), int(high)) for low, high in self.program["loss_tiles"]]
            lists = written(self.program)
            kinds = [int(kind) for kind in self.program.get("kinds", [0] * dims.layers)]
            self.loss_rows = {
                int(length): int(one["loss_rows"])
                for length, one in self.program["lengths"].items()
            }
        if streamed is None:
            streamed = config.weight_placement == "streamed"
        read = open_weights if streamed else load_weights
        weights = read(folder / WEIGHTS, settings)
        model = Model(settings, weights, functions=functions, written=lists, kinds=kinds,
                      fixed_chunks=True)  # fmt: skip
        model.tiles = tiles
        family = in_checkpoint(family_classes()[dims.family], f"{blocks}.layers")
        parameters = lora_parameters(dims, family, config, IN_MLX)
        super().__init__(model, parameters, config, manifest.model.source)
        self.manifest = manifest
        self.seed = manifest.generator.seed
        self.batch_size = self.eval_batch_size = manifest.batch_size
        self.lengths_tokens = tuple(sorted(manifest.lengths_tokens))
        self._load_tensors(initial_tensors(parameters, self.seed))

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step; see `Session.step`."""
        self._bucket(ids)
        return super().step(ids, labels, step, learning_rate)

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step on weighted rows; see `Weighing`."""
        self._bucket(ids)
        return super().weighted_step(ids, labels, weigh, step, learning_rate)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        self._bucket(ids)
        return super().evaluate(ids, labels)

    def _bucket(self, ids: np.ndarray) -> None:
        rows, length = ids.shape
        if rows != self.batch_size or length not in self.lengths_tokens:
            raise ArtifactError(
                "the program has no functions for this batch",
                expected=f"{self.batch_size} rows of {' or '.join(map(str, self.lengths_tokens))} tokens",
                received=f"{rows} rows of {length} tokens",
            )
        self.model.chunk_tokens = self.loss_rows[length]


def _settings(listed: dict[str, Any], dims: ModelDims) -> Settings:
    """Read what `program` wrote of the settings."""

    def values(written: dict[str, Any]) -> dict[str, Any]:
        return {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in written.items()
        }

    # Older programs have `store_h`; they store h as their own instructions say.
    rest = {name: value for name, value in listed.items() if name not in ("rope", "store_h")}
    return Settings(dims=dims, rope=Rope(**values(listed["rope"])), **values(rest))


STAGES = StagesProgram(problems, write, MlxProgramSession)
