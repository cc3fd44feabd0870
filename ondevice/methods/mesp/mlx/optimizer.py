"""SGD and AdamW on one matrix at a time, as `torch.optim` computes them; what is baked in is only their constants."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ondevice.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

    from ondevice.methods.mesp.config import MespConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def sgd(value: Any, gradient: Any, rate: Any, kept: Any) -> tuple[Any]:
    """value kept - rate gradient; all scalars float32 []."""
    return (value * kept - rate * gradient,)


def adamw(
    value: Any, gradient: Any, first: Any, second: Any, rate: Any, kept: Any, root: Any, constants: Any
) -> tuple[Any, Any, Any]:
    """The new value and moments.

    Args:
        rate: learning rate / (1 - beta1^t).
        kept: 1 - learning rate times weight decay.
        root: sqrt(1 - beta2^t).
        constants: beta1, beta2 and eps, float32 [3].
    """
    beta1, beta2, eps = constants[0], constants[1], constants[2]
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * mx.square(gradient)
    return value * kept - rate * (first / (mx.sqrt(second) / root + eps)), first, second


class Optimizer:
    """The moments of all matrices and the number of the step."""

    def __init__(self, config: MespConfig) -> None:
        self.config, self.steps = config, 0
        self.moments: dict[str, list[Any]] = {}
        self.scalars: list[Any] = []
        self.constants = mx.array([config.beta1, config.beta2, config.eps], dtype=mx.float32)

    def begin(self, learning_rate: float) -> None:
        """A new step; its scalars are computed in double precision."""
        self.steps += 1
        config = self.config
        scalars = [learning_rate, 1 - learning_rate * config.weight_decay]
        if config.optimizer == "adamw":
            scalars[0] /= 1 - config.beta1**self.steps
            scalars.append(math.sqrt(1 - config.beta2**self.steps))
        self.scalars = [mx.array(value, dtype=mx.float32) for value in scalars]

    def update(self, name: str, value: Any, gradient: Any) -> Any:
        """The new value of a matrix; its gradient may go."""
        if self.config.optimizer == "sgd":
            (value,) = sgd(value, gradient, *self.scalars)
            return value
        if name not in self.moments:
            self.moments[name] = [mx.zeros_like(value) for _ in MOMENTS]
        first, second = self.moments[name]
        rate, kept, root = self.scalars
        value, *self.moments[name] = adamw(value, gradient, first, second, rate, kept, root, self.constants)
        return value

    def state(self) -> dict[str, Any]:
        """Moments and the step's number, as arrays of MLX."""
        found = {f"{key}/{name}": array for name, pair in self.moments.items() for key, array in zip(MOMENTS, pair)}
        return found | ({"optimizer_step": mx.array([self.steps], dtype=mx.int64)} if self.steps else {})

    def load_state(self, state: dict[str, np.ndarray], names: list[str]) -> None:
        """Take back what `state` gave.

        Raises:
            CheckpointError: a moment is missing.
        """
        self.moments, self.steps = {}, 0
        if "optimizer_step" not in state:
            return
        self.steps = int(state["optimizer_step"][0])
        if self.config.optimizer == "sgd":
            return
        for name in names:
            if any(f"{key}/{name}" not in state for key in MOMENTS):
                raise CheckpointError(f"the checkpoint lacks the moments of {name}", hint="resume from an older one")
            self.moments[name] = [mx.array(state[f"{key}/{name}"]) for key in MOMENTS]
