"""What the sessions of methods that offload share: an engine that steps, and a whole model as the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ondevice.errors import CheckpointError, ConfigError
from ondevice.methods.session import StepResult
from ondevice.offload.device import memory_errors

if TYPE_CHECKING:
    import numpy as np

    from ondevice.artifact.adapter import Adapter
    from ondevice.models import LoadedModel


class EngineSession:
    """AdamW over all parameters of a model by an engine that keeps optimizer states on the host; see `Session`."""

    batch_size = eval_batch_size = None
    lengths_tokens = None
    generator_backend = "none"
    step_hint: ClassVar[str]
    """What to try where the accelerator's memory does not suffice for a step."""

    def __init__(self, loaded: LoadedModel, config: Any, engine: Any) -> None:
        self.loaded, self.config, self.engine = loaded, config, engine
        self.backend = f"torch-{engine.where.type}"
        self.steps_done = 0

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One AdamW step; its last updates run on while the next step begins."""
        with memory_errors(f"a step of {ids.shape[0]} rows of {ids.shape[1]} tokens", self.step_hint):
            loss = self.engine.step(ids, labels, self.steps_done, learning_rate)
        self.steps_done += 1
        return StepResult(loss, (loss,), overlap=self.report())

    def report(self) -> dict[str, Any] | None:
        """What ran beside what in the step before the last; None before the second."""
        overlap = self.engine.overlap
        return None if overlap is None else overlap.to_dict()

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        return self.engine.evaluate(ids, labels)

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """A first-order step cannot be rebuilt from scalars."""
        raise ConfigError("a first-order run has no projected gradients to replay", hint="resume from its checkpoint")

    def adapter(self) -> Adapter | None:
        """None: the model itself is what was trained."""
        return None

    def load_adapter(self, adapter: Adapter) -> None:
        """Full fine-tuning takes no adapter."""
        raise ConfigError(f"method {self.config.name} trains the whole model and takes no adapter")

    def close(self) -> None:
        """End the engine's threads; host memory is unlocked."""
        self.engine.close()


def steps_of(value: np.ndarray | None) -> int:
    """Steps that a checkpoint's `optimizer_step` tells.

    Raises:
        CheckpointError: the checkpoint lacks it.
    """
    if value is None:
        raise CheckpointError("the checkpoint lacks optimizer_step", hint="resume from an older checkpoint")
    return int(value[0])


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The same memory; bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
