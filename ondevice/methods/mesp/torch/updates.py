"""The trained pairs, and what is done with a gradient the moment it is there: SGD, AdamW, or accumulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.errors import CheckpointError
from ondevice.methods.mesp.pairs import initial_tensors, shapes

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.pairs import Pair

MOMENTS = ("exp_avg", "exp_avg_sq")
_OPS: Any = torch  # what torch.optim itself calls


class Updates:
    """Every pair's A and B in float32, AdamW's moments, and the gradients of micro-batches where there are several."""

    def __init__(self, pairs: tuple[Pair, ...], config: MespConfig, seed: int, device: torch.device) -> None:
        self.config, self.device = config, device
        self.pairs = {(pair.layer, pair.target): pair for pair in pairs}
        self.tensors = {name: torch.from_numpy(v).to(device) for name, v in initial_tensors(pairs, seed).items()}
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.sums: dict[str, Tensor] = {}
        self.done = 0
        self.waiting: list[tuple[str, Tensor]] = []
        self.learning_rate, self.accumulate = 0.0, False

    def begin(self, learning_rate: float, accumulate: bool) -> None:
        """A step starts; with `accumulate` its gradients are summed until `end`, else each is applied and dropped."""
        self.learning_rate, self.accumulate = learning_rate, accumulate
        self.number = torch.tensor(float(self.done + 1), device=self.device)

    def apply(self, pair: Pair, ga: Tensor, gb: Tensor) -> None:
        """Use both gradients, float32 in the shapes of A and B.

        On a GPU the pairs of a block are updated together (`flush`): their gradients are small, launches are not.
        """
        for name, gradient in ((pair.a_name, ga), (pair.b_name, gb)):
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
        waiting, self.waiting = self.waiting, []
        if not waiting:
            return
        values, gradients = [self.tensors[name] for name, _ in waiting], [gradient for _, gradient in waiting]
        config, rate = self.config, self.learning_rate
        if config.optimizer == "sgd":
            _OPS._foreach_mul_(values, 1.0 - rate * config.weight_decay)
            _OPS._foreach_add_(values, gradients, alpha=-rate)
            return
        for name, _ in waiting:
            if name not in self.moments:
                self.moments[name] = (torch.zeros_like(self.tensors[name]), torch.zeros_like(self.tensors[name]))
        m, v = ([self.moments[name][which] for name, _ in waiting] for which in (0, 1))
        options = {"beta1": config.beta1, "beta2": config.beta2, "weight_decay": config.weight_decay}
        steps = [self.number] * len(values)
        _OPS._fused_adamw_(
            values, gradients, m, v, [], steps, lr=rate, eps=config.eps, amsgrad=False, maximize=False, **options
        )

    def end(self) -> None:
        """The step is over: sums are applied and dropped."""
        self.waiting, self.sums = [*self.waiting, *self.sums.items()], {}
        self.flush()
        self.done += 1

    def state(self) -> dict[str, np.ndarray]:
        """Pairs and moments, float32, and the number of steps."""
        result = self.arrays()
        for name, moments in self.moments.items():
            for moment, value in zip(MOMENTS, moments):
                result[f"{moment}/{name}"] = value.cpu().numpy().copy()
        result["optimizer_step"] = np.array([self.done], dtype=np.int64)
        return result

    def arrays(self) -> dict[str, np.ndarray]:
        """Every A and B by PEFT's name."""
        return {name: value.detach().cpu().numpy().copy() for name, value in self.tensors.items()}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave; nothing is changed if something does not fit.

        Raises:
            CheckpointError: naming the first tensor that is missing or of another shape.
        """
        if "optimizer_step" not in state:
            raise CheckpointError("the checkpoint lacks optimizer_step", hint="resume from an older checkpoint")
        done = int(state["optimizer_step"][0])
        wanted = {name: shape for pair in self.pairs.values() for name, shape in shapes(pair).items()}
        named = list(wanted)
        if self.config.optimizer == "adamw" and done:
            named += [f"{moment}/{name}" for moment in MOMENTS for name in wanted]
        for name in named:
            value, shape = state.get(name), wanted[name.rpartition("/")[2]]
            if value is None or value.shape != shape:
                raise CheckpointError(
                    f"the checkpoint is not of this run: {name}",
                    expected=list(shape),
                    received=None if value is None else list(value.shape),
                )
        self.take({name: state[name] for name in wanted})
        self.done, self.moments = done, {}
        if len(named) > len(wanted):
            for name in wanted:
                m, v = (torch.from_numpy(state[f"{moment}/{name}"].copy()).to(self.device) for moment in MOMENTS)
                self.moments[name] = (m, v)

    @torch.no_grad()
    def take(self, arrays: dict[str, np.ndarray]) -> None:
        """Copy arrays of the right shapes into A and B."""
        for name, value in arrays.items():
            self.tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)))
