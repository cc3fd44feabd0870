"""The update of every A and B."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import CheckpointError
from ondevice.core.session import MOMENTS, OPTIMIZER_STEP
from ondevice.methods.mesp.lora import LoraParameters, check_state, initial_tensors
from ondevice.runtime_ops.layer_adam import AdamStep, torch_steps

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig

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
        self.copies: dict[str, Tensor] = {}
        self.learning_rate = 0.0
        self.accumulate = False

    def begin(self, learning_rate: float, accumulate: bool) -> None:
        """Begin a step; with `accumulate` its gradients are summed until `end`, else each is
        applied and dropped."""
        self.learning_rate = learning_rate
        self.accumulate = accumulate

    @torch.no_grad()
    def rounded(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return every A and B in `dtype`, as they are now; the copies have one place in memory."""
        if dtype == torch.float32:
            return self.tensors
        if not self.copies:
            self.copies = {n: torch.empty_like(v, dtype=dtype) for n, v in self.tensors.items()}
        _OPS._foreach_copy_(list(self.copies.values()), list(self.tensors.values()))
        return self.copies

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
