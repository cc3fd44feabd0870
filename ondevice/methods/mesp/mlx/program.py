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

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ArtifactError
from ondevice.core.manifest import Manifest, ProgramMethod
from ondevice.core.program import StagesProgram
from ondevice.core.session import ProgramSession
from ondevice.core.untrusted import read_object, well_formed
from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.mesp.lora import (
    IN_MLX,
    LoraParameters,
    check_family,
    initial_tensors,
    lora_parameters,
)
from ondevice.methods.mesp.mlx import functions as recorded
from ondevice.methods.mesp.mlx.instructions import (
    ANY_LENGTH,
    BY_LENGTH,
    Instruction,
    Operand,
    update,
)
from ondevice.methods.mesp.mlx.model import Model
from ondevice.methods.mesp.mlx.session import MlxSession, check_config, settings_of
from ondevice.methods.mesp.mlx.settings import Rope, Settings, matrix_parts
from ondevice.methods.mesp.mlx.weight_files import load_weights, open_weights, write_weights
from ondevice.methods.mesp.mlx.weights import Source
from ondevice.models import ModelFiles, family_classes

if TYPE_CHECKING:
    import numpy as np

    from ondevice.core.config import ExportConfig
    from ondevice.core.session import StepResult

WEIGHTS = "weights"
FORMAT = 2


def program(
    model: Model, config: MespConfig, parameters: tuple[LoraParameters, ...], functions: dict[str, Any],
    batch_size: int, lengths_tokens: tuple[int, ...], mlx_version: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the program's whole description; see docs/methods/mesp.md for what a host does with
    it."""
    # As data, to the last bound of a tile: the C++ and Swift hosts interpret this list and know no
    # method.
    settings = model.settings
    return {
        "format": FORMAT,
        "mlx_version": mlx_version,
        "layers": settings.dims.layers,
        "hidden": settings.dims.hidden,
        "tied": settings.dims.tied,
        "parts": list(matrix_parts(settings.bits)),
        "dtype": settings.dtype,
        "settings": {name: value for name, value in asdict(settings).items() if name != "dims"},
        "loss_tiles": [list(tile) for tile in model.tiles],
        "batch_size": batch_size,
        "optimizer": {
            name: getattr(config, name)
            for name in ("beta1", "beta2", "eps", "weight_decay", "learning_rate")
        }
        | {"name": config.optimizer},
        "lora_parameters": [
            {"layer": lora.layer, "target": lora.target, "A": lora.a_name, "B": lora.b_name}
            for lora in parameters
        ],
        "functions": functions,
        "instructions": {name: listed(model.listed(name)) for name in ANY_LENGTH},
        "lengths": {
            str(length): {
                "loss_rows": recorded.chunk_tokens(config, batch_size, length),
                **{name: listed(model.listed(name, length)) for name in BY_LENGTH},
            }
            for length in lengths_tokens
        },
    }


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


def written(program: dict[str, Any]) -> dict[tuple[str, int], list[Instruction]]:
    """Return what `listed` wrote, by name and length."""
    by_name = {(name, 0): program["instructions"][name] for name in ANY_LENGTH}
    for length, one in program["lengths"].items():
        by_name |= {(name, int(length)): one[name] for name in BY_LENGTH}
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
        check_config(config)
        check_family(files.dims, IN_MLX, "mesp in MLX")
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
    recording = recorded.record(session.model, config, export.batch_size, lengths)
    listed = recorded.export_functions(recording, functions)
    (folder / WEIGHTS).mkdir()
    source = Source(files.folder, session.model.settings, files.family.linear_parents)
    write_weights(source, folder / WEIGHTS)
    source.close()
    described = program(
        session.model,
        config,
        session.parameters,
        listed,
        export.batch_size,
        lengths,
        version("mlx"),
    )
    (folder / "program.json").write_text(json.dumps(described) + "\n", encoding="utf-8")
    return recorded.ports(recording)


class MlxProgramSession(ProgramSession, MlxSession):
    """Runs an artifact's program; batches are int64 [batch_size, one of lengths_tokens]. No stage
    is Python's own.

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
            tiles = [(int(low), int(high)) for low, high in self.program["loss_tiles"]]
            lists = written(self.program)
            self.loss_rows = {
                int(length): int(one["loss_rows"])
                for length, one in self.program["lengths"].items()
            }
        streamed = config.weight_placement == "streamed" if streamed is None else streamed
        read = open_weights if streamed else load_weights
        weights = read(folder / WEIGHTS, dims.layers, tied=dims.tied, bits=settings.bits)
        model = Model(settings, weights, functions=functions, written=lists, fixed_chunks=True)
        model.tiles = tiles
        parameters = lora_parameters(dims, family_classes()[dims.family], config, IN_MLX)
        super().__init__(model, parameters, config, manifest.model.source)
        self.manifest, self.seed = manifest, manifest.generator.seed
        self.batch_size = self.eval_batch_size = manifest.batch_size
        self.lengths_tokens = tuple(sorted(manifest.lengths_tokens))
        self._load_tensors(initial_tensors(parameters, self.seed))

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step; see `Session.step`."""
        self._bucket(ids)
        return super().step(ids, labels, step, learning_rate)

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
    # Older programs have `store_h`; their own instructions say what is stored.
    others = ("rope", "target_modules", "store_h")
    rest = {name: value for name, value in listed.items() if name not in others}
    rope: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in listed["rope"].items()
    }
    return Settings(
        dims=dims, target_modules=tuple(listed["target_modules"]), rope=Rope(**rope), **rest
    )


STAGES = StagesProgram(problems, write, MlxProgramSession)
