"""A session that trains with an artifact's MLX functions: no stage is computed by Python's own."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.errors import ArtifactError, MissingPackageError

try:
    import mlx.core as mx
except ImportError:
    raise MissingPackageError("mlx is not installed", hint="pip install 'ondevice-train[mlx]'") from None

from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.mesp.mlx.model import Model
from ondevice.methods.mesp.mlx.session import MlxSession
from ondevice.methods.mesp.mlx.settings import Rope, Settings
from ondevice.methods.mesp.mlx.weights import Weights
from ondevice.methods.mesp.pairs import initial_tensors, pairs_of
from ondevice.models import ModelDims, families

if TYPE_CHECKING:
    import numpy as np

    from ondevice.artifact.manifest import Manifest
    from ondevice.methods.session import StepResult

WEIGHTS = "weights"
FUNCTIONS = {"cpu": "functions", "gpu": "functions-gpu"}


class ImportedFunctions:
    """Stages from `.mlxfn` files.

    Args:
        folder: of the files.
        listed: file and outputs of each stage, from `program.json`.
    """

    def __init__(self, folder: Path, listed: dict[str, Any]) -> None:
        self.folder, self.listed = folder, listed
        self.loaded = {stage: import_function(folder / entry["file"]) for stage, entry in listed.items()}

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """The outputs of `stage` by name.

        Raises:
            ArtifactError: there is no trace for these shapes.
        """
        entry = self.listed[stage]
        try:
            found = self.loaded[stage](**arrays)
        except (ValueError, RuntimeError) as error:
            raise ArtifactError(
                f"{self.folder / entry['file']}: the function cannot be called", received=str(error).splitlines()[0]
            ) from None
        return dict(zip(entry["outputs"], found))


def import_function(path: Path) -> Any:
    """A function from its file.

    Raises:
        ArtifactError: it is missing, torn, or was written by another version of MLX.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            written = file.read(length).decode("ascii") if 0 < length < 32 else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read", received=str(error), hint="copy the artifact again") from None
    if written != version("mlx"):
        raise ArtifactError(
            f"{path} is of another version of MLX",
            expected=f"{version('mlx')}, which is installed here",
            received=written or "no version",
            hint=f"export the model again, or pip install mlx=={written}" if written else "export the model again",
        )
    try:
        return mx.import_function(str(path))
    except (ValueError, RuntimeError) as error:
        raise ArtifactError(f"{path} is torn", received=str(error), hint="copy the artifact again") from None


class MlxProgramSession(MlxSession):
    """Runs an artifact's program; batches are int64 [batch_size, one of lengths_tokens].

    Args:
        folder: the artifact.
        manifest: its checked manifest.
        streamed: read the weights from their files block by block.
    """

    def __init__(self, folder: Path, manifest: Manifest, streamed: bool | None = None) -> None:
        folder = Path(folder)
        self.program = json.loads((folder / manifest.program).read_text(encoding="utf-8"))
        config = MespConfig.parse(manifest.method, "manifest.json: method")
        dims, listed = ModelDims(**manifest.model.dims), dict(self.program["settings"])
        rope = listed.pop("rope")
        wavelengths = rope["wavelengths"] and tuple(rope["wavelengths"])
        settings = Settings(
            dims=dims,
            targets=tuple(listed.pop("targets")),
            rope=Rope(rope["theta"], rope["scale"], wavelengths),
            **listed,
        )
        kind = "gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"
        place = folder / FUNCTIONS[kind]
        if not place.is_dir():
            raise ArtifactError(
                f"{folder} has no functions for this device",
                expected=FUNCTIONS[kind],
                received="no such folder",
                hint="export the model again on this machine",
            )
        streamed = config.weights == "streamed" if streamed is None else streamed
        read = Weights.in_files if streamed else Weights.from_files
        weights = read(folder / WEIGHTS, dims.layers, tied=dims.tied, bits=settings.bits)
        model = Model(
            settings, weights, functions=ImportedFunctions(place, self.program["functions"]), fixed_chunks=True
        )
        model.tiles = [(low, high) for low, high in self.program["loss_tiles"]]
        pairs = pairs_of(dims, families()[dims.family], config)
        super().__init__(model, pairs, config, manifest.model.source)
        self.manifest, self.seed = manifest, manifest.generator.seed
        self.batch_size = self.eval_batch_size = manifest.batch_size
        self.lengths_tokens = tuple(sorted(manifest.lengths_tokens))
        self._load_tensors(initial_tensors(pairs, self.seed))

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One optimizer step; see `Session.step`."""
        self._bucket(ids)
        return super().step(ids, labels, step, learning_rate)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
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
        self.model.chunk_tokens = self.program["lengths"][str(length)]["loss_rows"]
