"""The session of MeSP in torch: a step and its optimizer, an evaluation, the adapter, and a state
that resumes bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.core.errors import CheckpointError, ConfigError, DataError
from ondevice.core.session import MOMENTS, OPTIMIZER_STEP, PackingSession, StepResult
from ondevice.methods.mesp.lora import (
    IN_TORCH,
    LoraParameters,
    check_adapter,
    check_not_partially_updated,
    check_state,
    initial_tensors,
    lora_parameters,
)
from ondevice.methods.mesp.torch.checkpointed import CheckpointedModel, checkpointed_parameters
from ondevice.methods.mesp.torch.model import Model, Resident, labelled
from ondevice.methods.mesp.torch.streamed import Streamed
from ondevice.models import ModelFiles
from ondevice.nn.memory import memory_errors
from ondevice.runtime_ops.layer_adam import AdamStep, torch_steps

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel

_OPS: Any = torch  # what torch.optim itself calls


class Optimizer:
    """SGD or AdamW on every A and B, float32, with AdamW's moments, and the summed gradients of
    several micro-batches."""

    def __init__(
        self,
        parameters: tuple[LoraParameters, ...],
        config: MespConfig,
        seed: int,
        device: torch.device,
    ) -> None:
        self.config = config
        self.device = device
        self.parameters = {(lora.layer, lora.target): lora for lora in parameters}
        self.tensors = {
            name: torch.from_numpy(v).to(device)
            for name, v in initial_tensors(parameters, seed).items()
        }
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.sums: dict[str, Tensor] = {}
        self.done = 0
        self.waiting: list[tuple[str, Tensor]] = []
        self.learning_rate = 0.0
        self.accumulate = False

    def begin(self, learning_rate: float, accumulate: bool) -> None:
        """Begin a step; with `accumulate` its gradients are summed until `end`, else each is
        applied and dropped."""
        self.learning_rate = learning_rate
        self.accumulate = accumulate

    def apply(self, parameters: LoraParameters, ga: Tensor, gb: Tensor) -> None:
        """Use both gradients, float32 in the shapes of A and B.

        On a GPU the matrices of a block are updated together (`flush`): their gradients are small,
        launches are not.
        """
        for name, gradient in ((parameters.a_name, ga), (parameters.b_name, gb)):
            if not self.accumulate:
                self.waiting.append((name, gradient.contiguous()))
            elif name in self.sums:
                self.sums[name].add_(gradient)
            else:
                self.sums[name] = gradient.contiguous()
        if self.device.type == "cpu":
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Update what waits."""
        waiting = self.waiting
        self.waiting = []
        if not waiting:
            return
        values = [self.tensors[name] for name, _ in waiting]
        gradients = [gradient for _, gradient in waiting]
        config = self.config
        rate = self.learning_rate
        if config.optimizer == "sgd":
            _OPS._foreach_mul_(values, 1.0 - rate * config.weight_decay)
            _OPS._foreach_add_(values, gradients, alpha=-rate)
            return
        for (name, _), value in zip(waiting, values):
            if name not in self.moments:
                self.moments[name] = torch.zeros_like(value), torch.zeros_like(value)
        m, v = ([self.moments[name][which] for name, _ in waiting] for which in (0, 1))
        torch_steps(
            values,
            gradients,
            m,
            v,
            AdamStep(
                rate, config.beta1, config.beta2, config.eps, config.weight_decay, self.done + 1
            ),
        )

    def end(self) -> None:
        """End the step: sums are clipped, applied and dropped."""
        limit = self.config.max_grad_norm
        if limit is not None and self.sums:
            norm = torch.stack([sums.square().sum() for sums in self.sums.values()]).sum().sqrt()
            _OPS._foreach_mul_(
                list(self.sums.values()), (limit / (norm + 1e-6)).clamp(max=1.0)
            )  # as in torch's
        self.waiting = [*self.waiting, *self.sums.items()]
        self.sums = {}
        self.flush()
        self.done += 1

    def state(self) -> dict[str, np.ndarray]:
        """Return A, B and moments, float32, and the number of steps."""
        result = self.arrays()
        for name, moments in self.moments.items():
            for moment, value in zip(MOMENTS, moments):
                result[f"{moment}/{name}"] = value.cpu().numpy().copy()
        result[OPTIMIZER_STEP] = np.array([self.done], dtype=np.int64)
        return result

    def arrays(self) -> dict[str, np.ndarray]:
        """Return every A and B by PEFT's name."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.tensors.items()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave; nothing is changed if something does not fit.

        Raises:
            CheckpointError: naming the first tensor that is missing or of another shape.
        """
        if OPTIMIZER_STEP not in state:
            raise CheckpointError(
                "the checkpoint lacks optimizer_step", hint="resume from an older checkpoint"
            )
        done = int(state[OPTIMIZER_STEP][0])
        shapes = {
            name: shape for lora in self.parameters.values() for name, shape in lora.shapes.items()
        }
        moments = bool(self.config.optimizer == "adamw" and done)
        check_state(state, shapes)
        if moments:
            check_state(
                state,
                {f"{moment}/{name}": shape for moment in MOMENTS for name, shape in shapes.items()},
            )
        self.assign({name: state[name] for name in shapes})
        self.done = done
        self.moments = {}
        if moments:
            for name in shapes:
                m, v = (
                    torch.from_numpy(state[f"{moment}/{name}"].copy()).to(self.device)
                    for moment in MOMENTS
                )
                self.moments[name] = (m, v)

    @torch.no_grad()
    def assign(self, arrays: dict[str, np.ndarray]) -> None:
        """Copy arrays of the right shapes into A and B."""
        for name, value in arrays.items():
            self.tensors[name].copy_(
                torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))
            )


HINT = (
    "method.micro_batch_size: 1, method.mlp_chunk_tokens: 1024, method.activations: host, "
    "method.weight_placement: streamed, shorter rows; the run's last checkpoint is unharmed"
)


class MespSession(PackingSession):
    """Exact gradients of every A and B, one block at a time; see `Session`."""

    batch_size = eval_batch_size = None
    lengths_tokens = None
    generator_backend = "none"

    def __init__(
        self, model: LoadedModel | ModelFiles, config: MespConfig, seed: int, device: str | None
    ) -> None:
        self.loaded = model
        self.config = config
        self.model: Model | CheckpointedModel
        with memory_errors("the model", HINT):
            if not isinstance(model, ModelFiles) and model.dims.whole:
                self._open_unknown(model, seed, device)
            else:
                self._open_known(model, seed, device)
        self.backend = f"torch-{self.device.type}"
        self.partially_updated = False

    def _open_known(self, model: LoadedModel | ModelFiles, seed: int, device: str | None) -> None:
        config = self.config
        family = model.family if isinstance(model, ModelFiles) else type(model.family)
        parameters = lora_parameters(
            model.dims, family, config, IN_TORCH, "mesp with streamed weights"
        )
        if isinstance(model, ModelFiles):
            self.device = torch.device(device or "cpu")
            self.weights: Any = Streamed(model, self.device, config.bits)
        else:
            self.device = torch.device(device) if device else model.family.head_weight.device
            self.weights = Resident(model, self.device, config.bits)
        self.optimizer = Optimizer(parameters, config, seed, self.device)
        self.model = Model(self.weights, self.optimizer, config)

    def _open_unknown(self, model: LoadedModel, seed: int, device: str | None) -> None:
        module: Any = model.model
        self.device = torch.device(device) if device else model.family.head_weight.device
        module.to(self.device)
        parameters = checkpointed_parameters(model, self.config)
        self.optimizer = Optimizer(parameters, self.config, seed, self.device)
        self.model = CheckpointedModel(model, self.optimizer, self.config)
        self.weights = self.model

    def step_placed(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run one optimizer step on all rows, `method.micro_batch_size` of them at once; see
        `PackingSession`."""
        check_not_partially_updated(self.partially_updated)
        ids_BT, labels_BT = self._tensors(ids, labels)
        places_BT = None if position_ids is None else torch.from_numpy(position_ids).to(self.device)
        rows = self.config.micro_batch_size or len(ids_BT)
        count = labelled(labels_BT)
        clips = self.config.max_grad_norm is not None
        self.optimizer.begin(learning_rate, accumulate=clips or rows < len(ids_BT))
        self.partially_updated = True
        with memory_errors(f"a step of {rows} rows of {ids_BT.shape[1]} tokens", HINT):
            total = torch.zeros((), device=self.device)
            for low in range(0, len(ids_BT), rows):
                chunk = slice(low, low + rows)
                places = None if places_BT is None else places_BT[chunk]
                total += self.model.forward_backward(
                    ids_BT[chunk], labels_BT[chunk], 1.0 / max(1, count), places
                )
            self.optimizer.end()
            value = float(total) / max(1, count)
        self.partially_updated = False
        return StepResult(value, (value,))

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        ids_BT, labels_BT = self._tensors(ids, labels)
        with memory_errors(f"an evaluation of {len(ids)} rows of {ids.shape[1]} tokens", HINT):
            nll = self.model.row_nll(ids_BT, labels_BT)
        return nll.cpu().numpy(), (labels[:, 1:] >= 0).sum(1).astype(np.int64)

    def state(self) -> dict[str, np.ndarray]:
        """Return A, B, moments and the number of steps; the same names on every backend."""
        check_not_partially_updated(self.partially_updated)
        return self.optimizer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        self.optimizer.load(state)
        self.partially_updated = False

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        config = self.config
        arrays = self.optimizer.arrays()
        return Adapter(
            arrays, config.rank, config.alpha, targets_of(arrays), self.loaded.source.source
        )

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`; it must have the same rank, alpha and linear layers."""
        self.optimizer.assign(
            check_adapter(adapter, tuple(self.optimizer.parameters.values()), self.config)
        )

    def close(self) -> None:
        """End the reading of files."""
        self.weights.close()

    def _tensors(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        largest = int(ids.max(initial=0))
        if largest >= self.loaded.dims.vocab:
            raise DataError(
                f"token {largest} is not in the model's vocabulary",
                expected=f"ids below {self.loaded.dims.vocab}",
                received=largest,
                hint="the tokenizer is another model's: encode the rows with this model's own",
            )
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        return ids_BT, labels_BT


def open_session(
    model: LoadedModel | ModelFiles, config: MespConfig, seed: int, device: str | None = None
) -> MespSession:
    """See `MethodSpec.open_session`; `model` is `ModelFiles` for weights that are streamed.

    Raises:
        ConfigError: a loaded model if `method.weight_placement` is streamed.
    """
    if config.weight_placement == "streamed" and not isinstance(model, ModelFiles):
        raise ConfigError(
            "streamed weights are read from files",
            expected="ondevice.models.open_model(...)",
            received="a model that is in memory",
            hint="method.weight_placement: resident",
        )
    return MespSession(model, config, seed, device)
