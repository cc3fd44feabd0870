"""A MeSP session in MLX: on a Mac's GPU, or on the CPU of any system."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ondevice.artifact.adapter import Adapter
from ondevice.errors import CheckpointError, ConfigError
from ondevice.methods.mesp.mlx.baselines import gradients_of
from ondevice.methods.mesp.mlx.load import Source, read_rope, read_weights, write_weights
from ondevice.methods.mesp.mlx.model import Model
from ondevice.methods.mesp.mlx.optimizer import Optimizer
from ondevice.methods.mesp.mlx.settings import GROUP_SIZE, Settings
from ondevice.methods.mesp.mlx.weights import Weights
from ondevice.methods.mesp.pairs import Pair, check_adapter, check_whole, initial_tensors, pairs_of, shapes
from ondevice.methods.session import StepResult
from ondevice.models import cache
from ondevice.models.source import read_config

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import ModelFiles


class MlxSession:
    """Trains the pairs of a run; see `Session`. The weights stay as they are.

    Args:
        model: the frozen model with the pairs' arrays.
        pairs: of the run.
        config: the method.
        source: what the adapter names as its base model.
    """

    batch_size = eval_batch_size = None
    lengths_tokens = None
    generator_backend = "none"

    def __init__(self, model: Model, pairs: tuple[Pair, ...], config: MespConfig, source: str) -> None:
        self.model, self.pairs, self.config, self.source = model, pairs, config, source
        self.backend = "mlx-gpu" if mx.default_device().type == mx.DeviceType.gpu else "mlx-cpu"
        self.optimizer = Optimizer(config, model.machine.functions)
        self.names = {(pair.layer, pair.target): (pair.a_name, pair.b_name) for pair in pairs}
        self.gradients = gradients_of(config)
        self.torn = False

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One optimizer step over the batch, `micro_batch_size` rows at once; see `Session.step`."""
        check_whole(self.torn)
        rows = self.config.micro_batch_size or len(ids)
        labelled = int((labels[:, 1:] >= 0).sum())
        self.torn = True
        self.optimizer.begin(learning_rate)
        collected: dict[tuple[int, str], list[Any]] | None = {} if rows < len(ids) else None

        def take(layer: int, target: str, a: Any, b: Any) -> None:
            if collected is None:
                self._update(layer, target, a, b)
                return
            before = collected.get((layer, target))
            found = [a, b] if before is None else [x + y for x, y in zip(before, (a, b))]
            mx.eval(found)
            collected[layer, target] = found

        loss = 0.0
        for low in range(0, len(ids), rows):
            part = ids[low : low + rows], labels[low : low + rows]
            loss += self.gradients(self.model, *part, labelled, take)
        for (layer, target), pair in (collected or {}).items():
            self._update(layer, target, *pair)
        self.torn = False
        loss = loss / labelled if labelled else float("nan")
        return StepResult(loss, (loss,))

    def _update(self, layer: int, target: str, *gradients: Any) -> None:
        held, changed = self.model.adapter[layer], []
        for side, name, gradient in zip("AB", self.names[layer, target], gradients):
            held[f"{target}.{side}"] = self.optimizer.update(name, held[f"{target}.{side}"], gradient)
            changed += [held[f"{target}.{side}"], *self.optimizer.moments.get(name, [])]
        mx.eval(changed)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        return self.model.row_nll(ids, labels)

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """A first-order step cannot be rebuilt from scalars."""
        raise ConfigError("a first-order run has no projected gradients to replay", hint="resume from its checkpoint")

    def _tensors(self) -> dict[str, np.ndarray]:
        found = {}
        for (layer, target), (a_name, b_name) in self.names.items():
            for side, name in (("A", a_name), ("B", b_name)):
                found[name] = np.array(self.model.adapter[layer][f"{target}.{side}"], dtype=np.float32)
        return found

    def _load_tensors(self, tensors: dict[str, np.ndarray]) -> None:
        for (layer, target), (a_name, b_name) in self.names.items():
            for side, name in (("A", a_name), ("B", b_name)):
                self.model.adapter[layer][f"{target}.{side}"] = mx.array(tensors[name].astype(np.float32, copy=False))
        mx.eval(self.model.adapter)

    def state(self) -> dict[str, np.ndarray]:
        """The pairs, the optimizer's moments and its step, under the names that the torch session has for them."""
        check_whole(self.torn)
        return self._tensors() | {name: np.array(array) for name, array in self.optimizer.state().items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        for pair in self.pairs:
            for name, shape in shapes(pair).items():
                found = state.get(name)
                if found is None or found.shape != shape:
                    raise CheckpointError(
                        f"the checkpoint is not of this run: {name}",
                        expected=list(shape),
                        received=None if found is None else list(found.shape),
                    )
        self.optimizer.load_state(state, [name for names in self.names.values() for name in names])
        self._load_tensors(state)
        self.torn = False

    def adapter(self) -> Adapter:
        """The trained adapter in PEFT's layout."""
        config = self.config
        return Adapter(self._tensors(), config.rank, config.alpha, tuple(sorted(config.targets)), self.source)

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`; it must have the same rank, alpha and linear layers."""
        self._load_tensors(check_adapter(adapter, self.pairs, self.config))

    def close(self) -> None:
        """Let the weights and their files go."""
        self.model.weights.close()
        mx.clear_cache()


def open_session(files: ModelFiles, config: MespConfig, seed: int) -> MlxSession:
    """A session over a model's files.

    Raises:
        ConfigError: a setting that is for another backend, or sizes that cannot be packed.
        ModelError: the files are torn, or the rotary embedding is of another kind.
        StorageError: no space for the files of streamed weights.
    """
    check_config(config)
    settings = settings_of(files, config)
    pairs = pairs_of(files.dims, files.family, config)
    model = Model(settings, _weights(files, config, settings), loss_tiles=config.loss_tiles,
                  loss_chunk_tokens=config.loss_chunk_tokens)  # fmt: skip
    session = MlxSession(model, pairs, config, files.source.source)
    session._load_tensors(initial_tensors(pairs, seed))
    return session


def check_config(config: MespConfig) -> None:
    """Refuse settings that are for torch.

    Raises:
        ConfigError: names the setting.
    """
    for name, only in (("activations", "device"), ("kernels", "auto"), ("mlp_chunk_tokens", None)):
        if getattr(config, name) != only:
            raise ConfigError(
                f"method.{name}: {getattr(config, name)} is for torch",
                expected=f"{only} with MLX",
                hint="method.mlp_tiles makes the MLP's part smaller" if only is None else "leave it out",
            )


def settings_of(files: ModelFiles, config: MespConfig) -> Settings:
    """A run's shape, from its model and its method."""
    rope = read_rope(read_config(files.folder), files.dims, str(files.folder / "config.json"))
    metal = mx.default_device().type == mx.DeviceType.gpu
    bits, group_size = files.packed or (config.bits, GROUP_SIZE)
    if files.packed and config.bits not in (None, bits):
        raise ConfigError(
            f"{files.source.source} is packed already",
            expected=f"method.bits: null, or the {bits} that it has",
            received=config.bits,
        )
    settings = Settings.of(
        files.dims,
        config,
        rope,
        bits=bits,
        group_size=group_size,
        dtype=files.dtype,
        mlp_tiles=config.mlp_tiles,
        product="quantized" if metal or files.dtype == "float32" else "dequantized",
    )
    settings.check()
    return settings


def _weights(files: ModelFiles, config: MespConfig, settings: Settings) -> Weights:
    source = Source(files.folder, settings, files.family.linear_parents)
    try:
        if config.weights == "resident":
            return read_weights(source)
        folder = streamed_folder(files, settings, source)
    finally:
        source.close()
    return Weights.in_files(folder, settings.dims.layers, tied=settings.dims.tied, bits=settings.bits)


def streamed_folder(files: ModelFiles, settings: Settings, source: Source) -> Path:
    """The files of streamed weights in the cache, converted once."""
    form = f"{settings.bits}-bit-{settings.group_size}" if settings.bits else "dense"
    key = f"mlx/{files.source.sha256[:16]}-{settings.dtype}-{form}"

    def build(folder: Path) -> dict[str, Any]:
        write_weights(source, folder)
        return {"sha256": files.source.sha256, "settings": json.dumps([settings.dtype, settings.bits])}

    folder = cache.convert_once(key, files.source.source, build)
    cache.read_record(folder)
    return folder
