"""Base of first-order sessions: backpropagation, AdamW, and a state that resumes bit for bit.

AdamW is torch's for float32 parameters, and has float32 masters for bfloat16 ones.

A bfloat16 weight has eight bits: at a usual rate most of a step is less than half of its last
place, and rounded away. So such a weight has another 16 bits that make it a float32 number (`split`
in `runtime_ops.adam_state`), and its moments are float32. It moves as a float32 weight does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import CheckpointError
from ondevice.core.method import has_triton
from ondevice.core.session import MOMENTS, OPTIMIZER_STEP, PackingSession, StepResult, Weigh
from ondevice.methods import model_loss
from ondevice.methods.precision import refuse_float16
from ondevice.models.save import save_loaded
from ondevice.runtime_ops.adam_state import HostState, Moments, merge, split_
from ondevice.runtime_ops.layer_adam import (
    AdamStep,
    available,
    device_adam,
    torch_split_step,
    torch_steps,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.models import LoadedModel

Parameters = dict[str, torch.nn.Parameter]


class AdamW(Protocol):
    """AdamW over parameters whose gradients are there."""

    count: int
    """Steps that are done."""

    def step(self, learning_rate: float) -> None:
        """Apply one step to every parameter."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """Return parameters by name and moments by `moment/name`, float32 copies on the host."""
        ...

    def load(self, arrays: dict[str, np.ndarray], count: int | None) -> None:
        """Restore what `arrays` gave after `count` steps; None: parameters without moments."""
        ...


def open_adamw(parameters: Parameters, weight_decay: float) -> list[AdamW]:
    """Return the optimizers of some parameters: one for each precision that there is.

    Raises:
        ConfigError: parameters in float16, whose range is too small for gradients and moments.
    """
    if any(parameter.dtype == torch.float16 for parameter in parameters.values()):
        refuse_float16()
    wide = {}
    narrow = {}
    for name, parameter in parameters.items():
        (narrow if parameter.dtype == torch.bfloat16 else wide)[name] = parameter
    optimizers: list[AdamW] = []
    if wide or not narrow:
        optimizers.append(TorchAdamW(wide, weight_decay))
    if narrow:
        optimizers.append(MasterAdamW(narrow, weight_decay))
    return optimizers


class TorchAdamW:
    """AdamW in the parameters' own precision, with the bits of `torch.optim.AdamW(fused=True)`."""

    def __init__(self, parameters: Parameters, weight_decay: float) -> None:
        self.parameters = parameters
        self.weight_decay = weight_decay
        self.count = 0
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self.count += 1
        adam = AdamStep(learning_rate, weight_decay=self.weight_decay, step=self.count)
        groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, parameter in self.parameters.items():
            groups.setdefault((parameter.device, parameter.dtype), []).append(name)
            if name not in self.moments:
                self.moments[name] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        for names in groups.values():
            parameters: list[Tensor] = [self.parameters[name] for name in names]
            # A step follows a backward pass, so every parameter has a gradient.
            gradients: Any = [parameter.grad for parameter in parameters]
            m, v = ([self.moments[name][which] for name in names] for which in (0, 1))
            torch_steps(parameters, gradients, m, v, adam)

    def arrays(self) -> dict[str, np.ndarray]:
        result = {}
        for name, parameter in self.parameters.items():
            result[name] = parameter.detach().float().cpu().numpy().copy()
            for moment, value in zip(MOMENTS, self.moments.get(name, ())):
                result[f"{moment}/{name}"] = value.float().cpu().numpy().copy()
        return result

    def load(self, arrays: dict[str, np.ndarray], count: int | None) -> None:
        model_loss.load_parameters(self.parameters, arrays)
        if count is None:
            return
        self.count = count
        for name, parameter in self.parameters.items():
            m, v = (torch.from_numpy(_moment(arrays, moment, name).copy()) for moment in MOMENTS)
            self.moments[name] = m.to(parameter), v.to(parameter)


class MasterAdamW:
    """AdamW with float32 masters and moments of bfloat16 parameters; the masters' upper halves are
    the parameters."""

    def __init__(self, parameters: Parameters, weight_decay: float) -> None:
        self.parameters = parameters
        self.weight_decay = weight_decay
        self.count = 0
        self.states = {name: _state(parameter) for name, parameter in parameters.items()}

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self.count += 1
        adam = AdamStep(learning_rate, weight_decay=self.weight_decay, step=self.count)
        for name, state in self.states.items():
            gradient = self.parameters[name].grad
            assert gradient is not None  # noqa: S101  the session gives each parameter one
            flat = gradient.contiguous().view(-1)
            if has_kernel(flat):
                device_adam(flat, state, adam, None, torch.get_num_threads())
            else:
                torch_split_step(flat, state, adam)

    def arrays(self) -> dict[str, np.ndarray]:
        result = {}
        for name, parameter in self.parameters.items():
            on_host = _moved(self.states[name], "cpu")
            assert on_host.high is not None and on_host.low is not None  # noqa: S101  a split state
            shape = tuple(parameter.shape)
            result[name] = merge(on_host.high, on_host.low, on_host.moments).view(shape).numpy()
            if self.count:
                values = (
                    on_host.moments.m.clone(),
                    on_host.moments.v.abs(),
                )  # v's sign belongs to the master
                result |= {
                    f"{moment}/{name}": value.view(shape).numpy()
                    for moment, value in zip(MOMENTS, values)
                }
        return result

    @torch.no_grad()
    def load(self, arrays: dict[str, np.ndarray], count: int | None) -> None:
        model_loss.load_parameters(self.parameters, arrays)  # refuses what does not fit
        self.count = count or 0
        for name, state in self.states.items():
            on_host = _moved(state, "cpu")
            assert on_host.high is not None and on_host.low is not None  # noqa: S101  a split state
            for moment, target in zip(MOMENTS, (on_host.moments.m, on_host.moments.v)):
                stored = (
                    None
                    if count is None
                    else torch.from_numpy(_moment(arrays, moment, name).copy())
                )
                target.zero_() if stored is None else target.copy_(stored.view(-1))
            master = torch.from_numpy(arrays[name].copy()).float().view(-1)
            split_(master, on_host.high, on_host.low, on_host.moments)
            for target, value in zip(_tensors(state), _tensors(on_host)):
                target.copy_(value)


def has_kernel(tensor: Tensor) -> bool:
    """Return True if the compiled step runs on a tensor's device: with a compiler on a CPU, with
    Triton on a GPU."""
    if tensor.device.type == "cpu":
        return available()
    return has_triton(tensor.device.type)


def _state(parameter: torch.nn.Parameter) -> HostState:
    """Return the state before the first step: the master is the parameter."""
    device = parameter.device
    high = parameter.detach().view(-1)  # the parameter's own memory
    low = torch.zeros(high.numel(), dtype=torch.int16, device=device)
    moments = Moments("float32", *(torch.zeros(high.numel(), device=device) for _ in MOMENTS))
    return HostState(None, high, low, moments)


def _tensors(state: HostState) -> tuple[Tensor, ...]:
    assert state.high is not None and state.low is not None  # noqa: S101  a split state
    return state.high, state.low, state.moments.m, state.moments.v


def _moved(state: HostState, device: str) -> HostState:
    high, low, m, v = (tensor.to(device) for tensor in _tensors(state))
    return HostState(None, high, low, Moments("float32", m, v))


def _moment(arrays: dict[str, np.ndarray], moment: str, name: str) -> np.ndarray:
    value = arrays.get(f"{moment}/{name}")
    if value is None:
        raise CheckpointError(
            f"the checkpoint lacks {moment} of {name}", hint="resume from an older checkpoint"
        )
    return value


class AdamWSession(model_loss.PlainEvaluation, PackingSession):
    """AdamW over `parameters`; the model's own layers run, with the tiled cross-entropy."""

    def __init__(
        self, loaded: LoadedModel, parameters: dict[str, torch.nn.Parameter], config: Any
    ) -> None:
        self.loaded = loaded
        self.family = loaded.family
        self.config = config
        self.loss_tiles = config.loss_tiles
        self.answers = config.answers
        self.parameters = parameters
        self.device = loaded.family.head_weight.device
        self.backend = f"torch-{self.device.type}"
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self.optimizers = open_adamw(parameters, config.weight_decay)

    def step_placed(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Forward, backward, AdamW, `micro_batch_size` rows at once; see `PackingSession`."""
        value = self.backpropagate(ids, labels, position_ids)
        self._update(learning_rate)
        return StepResult(float(value), (float(value),))

    def backpropagate(
        self, ids: np.ndarray, labels: np.ndarray, position_ids: np.ndarray | None
    ) -> Tensor:
        """Add to the parameters' gradients those of the mean loss, float32 [], and return it."""
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        places_BT = None if position_ids is None else torch.from_numpy(position_ids).to(self.device)
        rows = self.config.micro_batch_size or len(ids_BT)
        # Of the whole batch, so that a token counts the same in whichever part of it.
        count = (labels_BT[:, 1:] >= 0).sum().float()
        value = torch.zeros((), device=self.device)
        for part in range(0, len(ids_BT), rows):
            some = slice(part, part + rows)
            places = None if places_BT is None else places_BT[some]
            hidden_BTD = self.hidden(ids_BT[some], places)
            nll, _ = model_loss.hidden_nll(hidden_BTD, labels_BT[some], self.labels_nll)
            loss = nll.sum() / count
            loss.backward()
            value += loss.detach()
        return value

    def hidden(self, ids_BT: Tensor, position_ids_BT: Tensor | None) -> Tensor:
        """Return the last hidden states [B, T, D]; see `Family.hidden`."""
        return self.family.hidden(ids_BT, position_ids=position_ids_BT)

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Backpropagate weighted rows, `micro_batch_size` at once; see `Weighing`.

        Weights need all rows' likelihoods: a step in several parts computes them first.
        """
        rows = self.config.micro_batch_size or len(ids)
        loss = 0.0
        weights = None
        if rows < len(ids):
            loss, weights = weigh(model_loss.nll_in_parts(self.evaluate, ids, labels, rows))
        for part in range(0, len(ids), rows):
            some = slice(part, part + rows)
            ids_RT, labels_RT = (
                torch.from_numpy(array[some]).to(self.device) for array in (ids, labels)
            )
            nll_R, _ = model_loss.row_nll(
                self.family, ids_RT, labels_RT, self.loss_tiles, self.answers
            )
            if weights is None:
                loss, weights = weigh(nll_R.detach().double().cpu().numpy())
            (nll_R * torch.from_numpy(weights[some]).to(nll_R)).sum().backward()
        self._update(learning_rate)
        return StepResult(loss, (loss,))

    def writing(self) -> AbstractContextManager[LoadedModel]:
        """Give the model, whose own parameters or layers are trained; see `Writing`."""
        return nullcontext(self.loaded)

    def _update(self, learning_rate: float) -> None:
        """Apply the gradients that were summed up, and drop them."""
        limit = self.config.max_grad_norm
        for parameter in self.parameters.values():
            if (
                parameter.grad is None
            ):  # an expert without a token: without a gradient AdamW would count other steps
                parameter.grad = torch.zeros_like(parameter)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), limit)
        for optimizer in self.optimizers:
            optimizer.step(learning_rate)
        for parameter in self.parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, np.ndarray]:
        """Return trained parameters (the masters of bfloat16 ones) and AdamW's moments, float32,
        and the step."""
        result: dict[str, np.ndarray] = {}
        for optimizer in self.optimizers:
            result |= optimizer.arrays()
        if (count := self.optimizers[0].count) > 0:
            result[OPTIMIZER_STEP] = np.array([count], dtype=np.int64)
        return result

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave."""
        count = int(state[OPTIMIZER_STEP][0]) if OPTIMIZER_STEP in state else None
        for optimizer in self.optimizers:
            optimizer.load(state, count)

    def save_model(self, folder: Path) -> None:
        """Write the trained model as transformers loads it, with its tokenizer."""
        save_loaded(self.loaded, folder)


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> AdamWSession:
    """Open a session that trains all parameters; the model is computed on its own device."""
    return AdamWSession(loaded, dict(loaded.model.named_parameters()), config)
