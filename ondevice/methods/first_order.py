"""What first-order methods share: backpropagation, torch's AdamW, and a state that resumes bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.errors import CheckpointError, ConfigError
from ondevice.methods import whole_model
from ondevice.methods.session import StepResult

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.models import LoadedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class FirstOrderSession:
    """AdamW over `parameters`; the model's own layers run, with the tiled cross-entropy."""

    batch_size = eval_batch_size = None
    lengths_tokens = None
    generator_backend = "none"

    def __init__(self, loaded: LoadedModel, parameters: dict[str, torch.nn.Parameter], config: Any) -> None:
        self.loaded, self.family, self.config, self.parameters = loaded, loaded.family, config, parameters
        self.device = loaded.family.head_weight.device
        self.backend = f"torch-{self.device.type}"
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """Forward, backward, AdamW; see `Session.step`."""
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        nll, count = whole_model.row_nll(self.family, ids_BT, labels_BT, self.config.loss_tiles)
        loss = nll.sum() / count.sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        return StepResult(value, (value,))

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        return whole_model.evaluate(self.family, ids, labels, self.config.loss_tiles)

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """A first-order step cannot be rebuilt from scalars."""
        raise ConfigError("a first-order run has no projected gradients to replay", hint="resume from its checkpoint")

    def state(self) -> dict[str, np.ndarray]:
        """Trained parameters and AdamW's moments, float32, and the optimizer's step."""
        result: dict[str, np.ndarray] = {}
        for name, parameter in self.parameters.items():
            result[name] = parameter.detach().float().cpu().numpy().copy()
            moments = self.optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                if moment in moments:
                    result[f"{moment}/{name}"] = moments[moment].float().cpu().numpy().copy()
            if "step" in moments:
                result["optimizer_step"] = np.array([int(moments["step"])], dtype=np.int64)
        return result

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        whole_model.load_parameters(self.parameters, state)
        if "optimizer_step" not in state:
            return
        for name, parameter in self.parameters.items():
            entry = self.optimizer.state[parameter]
            entry["step"] = torch.tensor(float(state["optimizer_step"][0]), device=self.device)
            for moment in MOMENTS:
                value = state.get(f"{moment}/{name}")
                if value is None:
                    raise CheckpointError(
                        f"the checkpoint lacks {moment} of {name}", hint="resume from an older checkpoint"
                    )
                entry[moment] = torch.from_numpy(value.copy()).to(parameter.device, parameter.dtype)

    def adapter(self) -> Adapter | None:
        """None: the model itself is what was trained."""
        return None

    def load_adapter(self, adapter: Adapter) -> None:
        """Full fine-tuning takes no adapter."""
        raise ConfigError(f"method {self.config.name} trains the whole model and takes no adapter")

    def close(self) -> None:
        """Nothing to release beyond the model."""
