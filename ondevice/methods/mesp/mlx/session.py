"""A MeSP session in MLX: on a Mac's GPU, or on the CPU of any system."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.core.dims import MoeDims
from ondevice.core.errors import CheckpointError, ConfigError, ModelError
from ondevice.core.session import MOMENTS, OPTIMIZER_STEP, Session, StepResult, Weigh
from ondevice.data.prompt_tree import branch_rows
from ondevice.methods.mesp.check import IN_MLX, check_mlx_experts, check_mlx_settings
from ondevice.methods.mesp.config import GROUP_SIZE
from ondevice.methods.mesp.lora import (
    LoraParameters,
    check_adapter,
    check_not_partially_updated,
    check_state,
    initial_tensors,
    lora_parameters,
)
from ondevice.methods.mesp.mlx.cached import answer_prompt
from ondevice.methods.mesp.mlx.model import Functions, Model, Scale
from ondevice.methods.mesp.mlx.settings import Settings, read_rope
from ondevice.methods.mesp.mlx.weights import (
    Source,
    Weights,
    open_weights,
    resident_weights,
    streamed_folder,
)

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import ModelFiles


class Optimizer:
    """The moments of all matrices and the number of the step; the arithmetic is the stages `sgd`
    and `adamw`."""

    def __init__(self, config: MespConfig, functions: Functions) -> None:
        self.config = config
        self.functions = functions
        self.steps = 0
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
        arrays = {
            f"{key}/{name}": array
            for name, both in self.moments.items()
            for key, array in zip(MOMENTS, both)
        }
        if self.steps:
            arrays[OPTIMIZER_STEP] = mx.array([self.steps], dtype=mx.int64)
        return arrays

    def load_state(self, state: dict[str, np.ndarray], names: list[str]) -> None:
        """Take back what `state` gave.

        Raises:
            CheckpointError: a moment is missing.
        """
        self.moments = {}
        self.steps = 0
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
        self.model = model
        self.parameters = parameters
        self.config = config
        self.source = source
        self.backend = "mlx-gpu" if mx.default_device().type == mx.DeviceType.gpu else "mlx-cpu"
        self.optimizer = Optimizer(config, model.interpreter.functions)
        part = model.settings.dims.traits.part
        self.names = {
            (lora.layer, part(lora.target)): (lora.a_name, lora.b_name) for lora in parameters
        }
        self.partially_updated = False

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step over the batch, `micro_batch_size` rows at once; see
        `Session.step`."""
        labelled = int((labels[:, 1:] >= 0).sum())
        rows = self.config.micro_batch_size or len(ids)
        scales = [1 / max(labelled, 1)] * -(-len(ids) // rows)
        total = self._step(ids, labels, scales, learning_rate)
        loss = total / labelled if labelled else float("nan")
        return StepResult(loss, (loss,))

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step on weighted rows; see `Weighing`.

        A step in several parts computes all rows' likelihoods before the first part.
        """
        losses: list[float] = []

        def weighed(nll: np.ndarray) -> np.ndarray:
            loss, weights = weigh(nll)
            losses.append(loss)
            return weights

        rows = self.config.micro_batch_size or len(ids)
        scales: list[Scale] = [weighed]
        if rows < len(ids):
            parts = [slice(low, low + rows) for low in range(0, len(ids), rows)]
            found = [self.evaluate(ids[part], labels[part])[0] for part in parts]
            weights = weighed(np.concatenate(found).astype(np.float64))
            scales = [weights[part] for part in parts]
        self._step(ids, labels, scales, learning_rate)
        return StepResult(losses[0], (losses[0],))

    def _step(
        self, ids: np.ndarray, labels: np.ndarray, scales: Sequence[Scale], learning_rate: float
    ) -> float:
        """Update with the gradients of all rows, each micro-batch's with its own scale; return the
        summed loss."""
        check_not_partially_updated(self.partially_updated)
        rows = self.config.micro_batch_size or len(ids)
        limit = self.config.max_grad_norm
        self.partially_updated = True
        self.optimizer.begin(learning_rate)
        collects = rows < len(ids) or limit is not None
        collected: dict[tuple[int, str], list[Any]] = {}

        def on_gradient(layer: int, target: str, *gradients: Any) -> None:
            if not collects:
                self._update(layer, target, *gradients)
                return
            total = collected.setdefault((layer, target), [*gradients])
            if total[0] is not gradients[0]:
                total[:] = [x + y for x, y in zip(total, gradients)]
            mx.eval(total)

        loss = 0.0
        for low, part in zip(range(0, len(ids), rows), scales, strict=True):
            some = ids[low : low + rows], labels[low : low + rows]
            loss += self.model.forward_backward(*some, part, on_gradient)
        scale = _clip_scale(collected.values(), limit)
        for (layer, target), gradients in collected.items():
            if scale != 1.0:
                gradients = [scale * value for value in gradients]
            self._update(layer, target, *gradients)
        self.partially_updated = False
        return loss

    def _update(self, layer: int, target: str, *gradients: Any) -> None:
        changed = []
        for key, name, gradient in zip(self._keys(target), self.names[layer, target], gradients):
            matrix = self.optimizer.update(name, self.model.adapter[layer][key], gradient)
            self.model.adapter[layer][key] = matrix
            changed += [matrix, *self.optimizer.moments.get(name, [])]
        mx.eval(changed)

    def _keys(self, target: str) -> tuple[str, str]:
        return f"{target}.A", f"{target}.B"

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        return self.model.row_nll(ids, labels)

    def takes_branches(self, length_tokens: int) -> bool:
        """Return whether the stages are Python's; see `Branching.takes_branches`."""
        return self.model.written is None

    def evaluate_branches(
        self,
        ids: np.ndarray,
        position_ids: np.ndarray,
        branches: np.ndarray,
        sources: np.ndarray,
        labels: np.ndarray,
    ) -> np.ndarray:
        """Compute the labels' losses; see `Branching.evaluate_branches`."""
        return self.model.branches_nll(ids, branch_rows(branches), sources, labels)

    def answer_prompt(
        self, prompt: Sequence[int], samplers: Sequence[Any], most_tokens: int
    ) -> list[list[int]]:
        """Return an answer of each sampler; see `Answering`."""
        check_not_partially_updated(self.partially_updated)
        return answer_prompt(self.model, prompt, samplers, most_tokens)

    def _places(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the name of each A and B, its layer's dictionary, and its key there."""
        for (layer, target), names in self.names.items():
            for name, key in zip(names, self._keys(target)):
                yield name, self.model.adapter[layer], key

    def _tensors(self) -> dict[str, np.ndarray]:
        return {name: np.array(of[key], dtype=np.float32) for name, of, key in self._places()}

    def _load_tensors(self, tensors: dict[str, np.ndarray]) -> None:
        for name, of, key in self._places():
            of[key] = mx.array(tensors[name].astype(np.float32, copy=False))
        mx.eval(self.model.adapter)

    def state(self) -> dict[str, np.ndarray]:
        """Return A and B, the optimizer's moments and its step, under the names that the torch
        session has for them."""
        check_not_partially_updated(self.partially_updated)
        moments = self.optimizer.state()
        return self._tensors() | {name: np.array(array) for name, array in moments.items()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        shapes = {name: shape for lora in self.parameters for name, shape in lora.shapes.items()}
        check_state(state, shapes)
        self.optimizer.load_state(state, [*shapes])
        self._load_tensors(state)
        self.partially_updated = False

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        config = self.config
        tensors = self._tensors()
        return Adapter(tensors, config.rank, config.alpha, targets_of(tensors), self.source)

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`; it must have the same rank, alpha and linear layers."""
        dims = self.model.settings.dims
        self._load_tensors(check_adapter(adapter, self.parameters, self.config, dims))

    def close(self) -> None:
        """Let the weights and their files go."""
        self.model.weights.close()
        mx.clear_cache()


def _clip_scale(gradients: Iterable[list[Any]], limit: float | None) -> float:
    """Return the factor that brings all gradients together to a norm of at most `limit`."""
    if limit is None:
        return 1.0
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
    check_mlx_settings(config)
    parameters = lora_parameters(files.dims, files.family, config, IN_MLX, "mesp in MLX")
    settings = settings_of(files, config)
    model = Model(settings, _weights(files, config, settings), loss_tiles=config.loss_tiles,
                  loss_chunk_tokens=config.loss_chunk_tokens)  # fmt: skip
    session = MlxSession(model, parameters, config, files.source.source)
    session._load_tensors(initial_tensors(parameters, seed))
    return session


def settings_of(files: ModelFiles, config: MespConfig) -> Settings:
    """Return a run's shape, from its model and its method.

    Raises:
        ConfigError: another packing than the files have, or sizes that cannot be packed.
        ModelError: a mixture of experts that MLX cannot run.
    """
    metal = mx.default_device().type == mx.DeviceType.gpu
    bits, group_size = files.packed or (config.bits, GROUP_SIZE)
    if files.packed and config.bits not in (None, bits):
        raise ConfigError(
            f"{files.source.source} is packed already",
            expected=f"method.bits: null, or the {bits} that it has",
            received=config.bits,
        )
    part = files.dims.traits.part
    settings = Settings(
        dims=files.dims,
        target_modules=tuple(dict.fromkeys(part(one.target) for one in files.dims.adapted(config))),
        scale=config.scale,
        rope=read_rope(files.config, files.dims),
        bits=bits,
        group_size=group_size,
        dtype=files.dtype,
        product="quantized" if metal or files.dtype == "float32" else "dequantized",
        mlp_tiles=config.mlp_tiles,
        **_experts(files, config),
    )
    settings.check()
    return settings


def _experts(files: ModelFiles, config: MespConfig) -> dict[str, Any]:
    """Return a run's settings of a mixture of experts; none for another model.

    Raises:
        ConfigError: an adapter on experts.
        ModelError: weights that another program has packed.
    """
    dims = files.dims
    if not isinstance(dims, MoeDims):
        return {}
    check_mlx_experts(dims, config)
    if files.packed:
        raise ModelError(
            f"{files.source.source} is a mixture of experts that is packed already",
            expected="its published weights, with method.bits",
            received="packed weights",
        )
    return {
        "active_experts": dims.active_experts,
        "shared": dims.shared_intermediate > 0,
    }


def _weights(files: ModelFiles, config: MespConfig, settings: Settings) -> Weights:
    source = Source(files.folder, settings, files.family)
    try:
        if config.weight_placement == "resident":
            return resident_weights(source.blocks(), settings)
        folder = streamed_folder(files, settings, source)
    finally:
        source.close()
    return open_weights(folder, settings)
