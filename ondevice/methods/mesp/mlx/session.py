"""A MeSP session in MLX: on a Mac's GPU, or on the CPU of any system."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ondevice.artifact.adapter import Adapter
from ondevice.core.dims import MoeDims
from ondevice.core.errors import CheckpointError, ConfigError, ModelError
from ondevice.core.session import MOMENTS, OPTIMIZER_STEP, Session, StepResult
from ondevice.methods.mesp.config import GROUP_SIZE
from ondevice.methods.mesp.lora import (
    IN_MLX,
    LoraParameters,
    check_adapter,
    check_not_partially_updated,
    check_state,
    initial_tensors,
    lora_parameters,
)
from ondevice.methods.mesp.mlx.model import Model
from ondevice.methods.mesp.mlx.settings import Settings, read_rope
from ondevice.methods.mesp.mlx.weight_files import open_weights, streamed_folder
from ondevice.methods.mesp.mlx.weights import Source, Weights, read_weights
from ondevice.models.sources.resolve import read_config

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.mlx.model import Functions
    from ondevice.models import ModelFiles


class Optimizer:
    """The moments of all matrices and the number of the step; the arithmetic is the stages `sgd`
    and `adamw`."""

    def __init__(self, config: MespConfig, functions: Functions) -> None:
        self.config, self.functions, self.steps = config, functions, 0
        self.moments: dict[str, tuple[Any, Any]] = {}
        self.scalars: dict[str, Any] = {}
        self.constants = mx.array([config.beta1, config.beta2, config.eps], dtype=mx.float32)

    def begin(self, learning_rate: float) -> None:
        """Begin a new step; its scalars are computed in double precision."""
        self.steps += 1
        config = self.config
        scalars = {"rate": learning_rate, "kept": 1 - learning_rate * config.weight_decay}
        if config.optimizer == "adamw":
            scalars["rate"] /= 1 - config.beta1**self.steps
            scalars["root"] = math.sqrt(1 - config.beta2**self.steps)
        self.scalars = {name: mx.array(value, dtype=mx.float32) for name, value in scalars.items()}

    def update(self, name: str, value: Any, gradient: Any) -> Any:
        """Return the new value of a matrix; its gradient may go."""
        inputs = {"value": value, "gradient": gradient, **self.scalars}
        if self.config.optimizer == "sgd":
            return self.functions.call("sgd", inputs)["value"]
        first, second = self.moments.get(name) or (mx.zeros_like(value), mx.zeros_like(value))
        inputs |= {"first": first, "second": second, "constants": self.constants}
        outputs = self.functions.call("adamw", inputs)
        self.moments[name] = (outputs["first"], outputs["second"])
        return outputs["value"]

    def state(self) -> dict[str, Any]:
        """Return moments and the step's number, as arrays of MLX."""
        moments = {
            f"{key}/{name}": array
            for name, both in self.moments.items()
            for key, array in zip(MOMENTS, both)
        }
        return moments | (
            {OPTIMIZER_STEP: mx.array([self.steps], dtype=mx.int64)} if self.steps else {}
        )

    def load_state(self, state: dict[str, np.ndarray], names: list[str]) -> None:
        """Take back what `state` gave.

        Raises:
            CheckpointError: a moment is missing.
        """
        self.moments, self.steps = {}, 0
        if OPTIMIZER_STEP not in state:
            return
        self.steps = int(state[OPTIMIZER_STEP][0])
        if self.config.optimizer == "sgd":
            return
        for name in names:
            if any(f"{key}/{name}" not in state for key in MOMENTS):
                raise CheckpointError(
                    f"the checkpoint lacks the moments of {name}", hint="resume from an older one"
                )
            first, second = (mx.array(state[f"{key}/{name}"]) for key in MOMENTS)
            self.moments[name] = (first, second)


class MlxSession(Session):
    """Trains A and B of a run; see `Session`. The weights stay as they are.

    Args:
        model: the frozen model with A and B.
        parameters: of the run.
        config: the method.
        source: what the adapter names as its base model.
    """

    batch_size = eval_batch_size = None
    lengths_tokens = None
    generator_backend = "none"

    def __init__(
        self, model: Model, parameters: tuple[LoraParameters, ...], config: MespConfig, source: str
    ) -> None:
        self.model, self.parameters, self.config, self.source = model, parameters, config, source
        self.backend = "mlx-gpu" if mx.default_device().type == mx.DeviceType.gpu else "mlx-cpu"
        self.optimizer = Optimizer(config, model.interpreter.functions)
        self.names = {(lora.layer, lora.target): (lora.a_name, lora.b_name) for lora in parameters}
        self.partially_updated = False

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step over the batch, `micro_batch_size` rows at once; see
        `Session.step`."""
        check_not_partially_updated(self.partially_updated)
        rows = self.config.micro_batch_size or len(ids)
        labelled = int((labels[:, 1:] >= 0).sum())
        self.partially_updated = True
        self.optimizer.begin(learning_rate)
        limit = self.config.max_grad_norm
        collected: dict[tuple[int, str], list[Any]] | None = (
            {} if rows < len(ids) or limit is not None else None
        )

        def on_gradient(layer: int, target: str, a: Any, b: Any) -> None:
            if collected is None:
                self._update(layer, target, a, b)
                return
            before = collected.get((layer, target))
            gradients = [a, b] if before is None else [x + y for x, y in zip(before, (a, b))]
            mx.eval(gradients)
            collected[layer, target] = gradients

        loss = 0.0
        for low in range(0, len(ids), rows):
            some = ids[low : low + rows], labels[low : low + rows]
            loss += self.model.forward_backward(*some, labelled, on_gradient)
        scale = 1.0 if limit is None else _clip_scale((collected or {}).values(), limit)
        for (layer, target), gradients in (collected or {}).items():
            self._update(
                layer,
                target,
                *(gradients if scale == 1.0 else [scale * value for value in gradients]),
            )
        self.partially_updated = False
        loss = loss / labelled if labelled else float("nan")
        return StepResult(loss, (loss,))

    def _update(self, layer: int, target: str, *gradients: Any) -> None:
        matrices, changed = self.model.adapter[layer], []
        for side, name, gradient in zip("AB", self.names[layer, target], gradients):
            matrices[f"{target}.{side}"] = self.optimizer.update(
                name, matrices[f"{target}.{side}"], gradient
            )
            changed += [matrices[f"{target}.{side}"], *self.optimizer.moments.get(name, [])]
        mx.eval(changed)

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        return self.model.row_nll(ids, labels)

    def _tensors(self) -> dict[str, np.ndarray]:
        tensors = {}
        for (layer, target), (a_name, b_name) in self.names.items():
            for side, name in (("A", a_name), ("B", b_name)):
                tensors[name] = np.array(
                    self.model.adapter[layer][f"{target}.{side}"], dtype=np.float32
                )
        return tensors

    def _load_tensors(self, tensors: dict[str, np.ndarray]) -> None:
        for (layer, target), (a_name, b_name) in self.names.items():
            for side, name in (("A", a_name), ("B", b_name)):
                self.model.adapter[layer][f"{target}.{side}"] = mx.array(
                    tensors[name].astype(np.float32, copy=False)
                )
        mx.eval(self.model.adapter)

    def state(self) -> dict[str, np.ndarray]:
        """Return a and B, the optimizer's moments and its step, under the names that the torch
        session has for them."""
        check_not_partially_updated(self.partially_updated)
        return self._tensors() | {
            name: np.array(array) for name, array in self.optimizer.state().items()
        }

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        check_state(
            state, {name: shape for lora in self.parameters for name, shape in lora.shapes.items()}
        )
        self.optimizer.load_state(state, [name for names in self.names.values() for name in names])
        self._load_tensors(state)
        self.partially_updated = False

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        config = self.config
        return Adapter(
            self._tensors(),
            config.rank,
            config.alpha,
            tuple(sorted(self.model.settings.target_modules)),
            self.source,
        )

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`; it must have the same rank, alpha and linear layers."""
        self._load_tensors(check_adapter(adapter, self.parameters, self.config))

    def close(self) -> None:
        """Let the weights and their files go."""
        self.model.weights.close()
        mx.clear_cache()


def _clip_scale(gradients: Iterable[list[Any]], limit: float) -> float:
    """Return the factor that brings all gradients together to a norm of at most `limit`."""
    squares = [mx.sum(mx.square(value)) for both in gradients for value in both]
    norm = math.sqrt(float(sum(squares, mx.array(0.0))))
    return min(1.0, limit / (norm + 1e-6))  # 1e-6 as in torch's


def open_session(
    files: ModelFiles, config: MespConfig, seed: int, device: str | None = None
) -> MlxSession:
    """See `MethodSpec.open_session`, over a model's files; MLX has one device.

    Raises:
        ConfigError: a setting that is for another backend, or sizes that cannot be packed.
        ModelError: the files are damaged, or the rotary embedding is of another kind.
        StorageError: no space for the files of streamed weights.
    """
    check_config(config)
    parameters = lora_parameters(files.dims, files.family, config, IN_MLX, "mesp in MLX")
    settings = settings_of(files, config)
    model = Model(settings, _weights(files, config, settings), loss_tiles=config.loss_tiles,
                  loss_chunk_tokens=config.loss_chunk_tokens)  # fmt: skip
    session = MlxSession(model, parameters, config, files.source.source)
    session._load_tensors(initial_tensors(parameters, seed))
    return session


def check_config(config: MespConfig) -> None:
    """Refuse settings that are for torch.

    Raises:
        ConfigError: names the setting.
    """
    for name, only in (
        ("activations", "device"),
        ("kernels", "auto"),
        ("mlp_chunk_tokens", None),
        ("answers", ()),
    ):
        if getattr(config, name) != only:
            raise ConfigError(
                f"method.{name}: {getattr(config, name)} is for torch",
                expected=f"{only} with MLX",
                hint="method.mlp_tiles makes the MLP's part smaller"
                if only is None
                else "leave it out",
            )


def settings_of(files: ModelFiles, config: MespConfig) -> Settings:
    """Return a run's shape, from its model and its method."""
    rope = read_rope(read_config(files.folder), files.dims)
    metal = mx.default_device().type == mx.DeviceType.gpu
    bits, group_size = files.packed or (config.bits, GROUP_SIZE)
    if files.packed and config.bits not in (None, bits):
        raise ConfigError(
            f"{files.source.source} is packed already",
            expected=f"method.bits: null, or the {bits} that it has",
            received=config.bits,
        )
    experts = _experts(files, config)
    settings = Settings.of(
        files.dims,
        config,
        rope,
        bits=bits,
        group_size=group_size,
        dtype=files.dtype,
        mlp_tiles=config.mlp_tiles,
        product="quantized" if metal or files.dtype == "float32" else "dequantized",
        **experts,
    )
    settings.check()
    return settings


def _experts(files: ModelFiles, config: MespConfig) -> dict[str, Any]:
    """Return a run's settings of a mixture of experts; none for another model.

    Raises:
        ConfigError: an adapter on experts.
        ModelError: blocks that have no experts among others, or weights that another program has
            packed.
    """
    dims = files.dims
    if not isinstance(dims, MoeDims):
        return {}
    where = f"{files.source.source} is a mixture of experts"
    if any(linear.experts > 1 for linear in dims.adapted(config)):
        raise ConfigError(
            "mesp in MLX puts no pairs on the matrices of experts",
            expected=f"method.target_modules among {', '.join(dims.linear_shapes)}",
            received=", ".join(config.target_modules),
            hint="--backend torch does",
        )
    if dims.dense_layers:
        received = f"none in layers {', '.join(map(str, dims.dense_layers))}"
        message = f"{where}, and MLX runs every block by one list of stages"
        raise ModelError(
            message, expected="experts in every block", received=received, hint="--backend torch"
        )
    if files.packed:
        message = f"{where} that is packed already"
        raise ModelError(
            message,
            expected="its published weights, with method.bits: 4",
            received="packed weights",
        )
    normalised = bool(read_config(files.folder).get("norm_topk_prob", False))
    return {
        "active_experts": dims.active_experts,
        "normalised": normalised,
        "shared": dims.shared_intermediate > 0,
    }


def _weights(files: ModelFiles, config: MespConfig, settings: Settings) -> Weights:
    source = Source(files.folder, settings, files.family.linear_parents)
    try:
        if config.weight_placement == "resident":
            return read_weights(source)
        folder = streamed_folder(files, settings, source)
    finally:
        source.close()
    return open_weights(folder, settings.dims.layers, tied=settings.dims.tied, bits=settings.bits)
