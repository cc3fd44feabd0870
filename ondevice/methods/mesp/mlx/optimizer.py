"""SGD and AdamW on one matrix at a time: the moments, and the scalars of each step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ondevice.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.mlx.machine import Functions

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """The moments of all matrices and the number of the step; the arithmetic is the stages `sgd` and `adamw`."""

    def __init__(self, config: MespConfig, functions: Functions) -> None:
        self.config, self.functions, self.steps = config, functions, 0
        self.moments: dict[str, tuple[Any, Any]] = {}
        self.scalars: dict[str, Any] = {}
        self.constants = mx.array([config.beta1, config.beta2, config.eps], dtype=mx.float32)

    def begin(self, learning_rate: float) -> None:
        """A new step; its scalars are computed in double precision."""
        self.steps += 1
        config = self.config
        scalars = {"rate": learning_rate, "kept": 1 - learning_rate * config.weight_decay}
        if config.optimizer == "adamw":
            scalars["rate"] /= 1 - config.beta1**self.steps
            scalars["root"] = math.sqrt(1 - config.beta2**self.steps)
        self.scalars = {name: mx.array(value, dtype=mx.float32) for name, value in scalars.items()}

    def update(self, name: str, value: Any, gradient: Any) -> Any:
        """The new value of a matrix; its gradient may go."""
        given = {"value": value, "gradient": gradient, **self.scalars}
        if self.config.optimizer == "sgd":
            return self.functions.call("sgd", given)["value"]
        first, second = self.moments.get(name) or (mx.zeros_like(value), mx.zeros_like(value))
        given |= {"first": first, "second": second, "constants": self.constants}
        found = self.functions.call("adamw", given)
        self.moments[name] = (found["first"], found["second"])
        return found["value"]

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
            first, second = (mx.array(state[f"{key}/{name}"]) for key in MOMENTS)
            self.moments[name] = (first, second)
