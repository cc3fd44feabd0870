"""Base of first-order sessions: backpropagation, AdamW, and a state that resumes bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.core.session import OPTIMIZER_STEP, PackingSession, StepResult
from ondevice.methods import model_loss
from ondevice.methods.adamw import open_adamw
from ondevice.models.save import save_loaded

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.models import LoadedModel


class AdamWSession(PackingSession):
    """AdamW over `parameters`; the model's own layers run, with the tiled cross-entropy."""

    def __init__(
        self, loaded: LoadedModel, parameters: dict[str, torch.nn.Parameter], config: Any
    ) -> None:
        self.loaded = loaded
        self.family = loaded.family
        self.config = config
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
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        places_BT = None if position_ids is None else torch.from_numpy(position_ids).to(self.device)
        rows = self.config.micro_batch_size or len(ids_BT)
        limit = self.config.max_grad_norm
        # Of the whole batch, so that a token counts the same in whichever part of it.
        count = (labels_BT[:, 1:] >= 0).sum().float()
        value = torch.zeros((), device=self.device)
        for part in range(0, len(ids_BT), rows):
            some = slice(part, part + rows)
            settings = self.config.loss_tiles, self.config.answers
            places = None if places_BT is None else places_BT[some]
            nll, _ = model_loss.row_nll(
                self.family, ids_BT[some], labels_BT[some], *settings, places
            )
            loss = nll.sum() / count
            loss.backward()
            value += loss.detach()
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
        return StepResult(float(value), (float(value),))

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        return model_loss.evaluate(
            self.family, ids, labels, self.config.loss_tiles, self.config.answers
        )

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
