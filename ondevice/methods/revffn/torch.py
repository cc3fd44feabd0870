"""The session of RevFFN: updates inside the walk back, the two stages (section 3.3), and the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.errors import CheckpointError, ConfigError
from ondevice.methods.offloading import as_numpy
from ondevice.methods.revffn.export import check_family, save_reversible
from ondevice.methods.revffn.passes import Gradients, Passes
from ondevice.methods.revffn.updates import Updates, clip_scale, squared_norm
from ondevice.methods.revffn.walk import Reversible
from ondevice.methods.session import StepResult
from ondevice.methods.whole_model import ModelSession
from ondevice.offload.device import memory_errors

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.methods.revffn.config import RevffnConfig
    from ondevice.models import LoadedModel

ROUTER = ".mlp.gate."
"""What the name of a router's weight holds (section 3.3: "MoE gating networks remain frozen")."""
STEP_HINT = (
    "method.micro_batch_size: 1, a larger method.loss_tiles, method.optimizer: adafactor; `ondevice plan` lists what "
    "each part needs"
)
BITS = "fraction_bits"
"""The scale of int32 streams in a checkpoint: a resumed run keeps what its first start chose."""


class RevffnSession:
    """Training of all parameters by a walk back through reversible blocks; see `Session`."""

    batch_size: int | None = None
    eval_batch_size: int | None = None
    lengths_tokens: tuple[int, ...] | None = None
    generator_backend = "none"

    def __init__(self, loaded: LoadedModel, config: RevffnConfig, seed: int) -> None:
        check_family(loaded.dims.family)
        self.loaded, self.family, self.config = loaded, loaded.family, config
        self.device = loaded.family.head_weight.device
        self.backend = f"torch-{self.device.type}"
        self.network = Reversible(loaded.family, config, seed=seed)
        self.passes = Passes(self.network, config.recompute == "stored", config.micro_batch_size, config.loss_tiles)
        self.adapters = self.network.adapters
        self.parameters: dict[str, Tensor] = dict(self.adapters)
        if not config.stage1_only:
            named = loaded.model.named_parameters()
            self.parameters |= {name: value for name, value in named if config.train_router or ROUTER not in name}
        self.updates = Updates(config, self.parameters, seed)
        self.active: dict[str, Any] | None = None

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One optimizer step over all rows; see `Session.step`."""
        rate, batch = self._begin(step, learning_rate), self._batch(ids, labels)
        with memory_errors(f"a step of {ids.shape[0]} rows of {ids.shape[1]} tokens", STEP_HINT):
            loss = float(self._train(batch, step, rate))
        return StepResult(loss, (loss,))

    def gradients(self, ids: np.ndarray, labels: np.ndarray, step: int = 0) -> tuple[float, Gradients]:
        """Loss and gradients of step `step`, with nothing updated."""
        self._begin(step, 0.0)
        found: Gradients = {}
        return float(self.passes.run(*self._batch(ids, labels), found.update)), found

    def _train(self, batch: tuple[Tensor, Tensor], step: int, rate: float) -> Tensor:
        """One walk with updates inside; a norm of the whole gradient takes another walk before, or all gradients."""
        c, run = self.config, self.passes.run
        whole = c.max_grad_norm is not None and c.clip == "global"
        if c.fused_update and not whole:
            return run(*batch, lambda found: self._update(found, step, rate))
        units: list[Gradients] = []
        squares: list[Tensor] = []

        def keep(found: Gradients) -> None:
            squares.append(squared_norm(found.values()))
            if not c.fused_update:
                units.append(found)

        loss = run(*batch, keep)
        scale = clip_scale(torch.stack(squares).sum(), c.max_grad_norm or 0.0) if whole else None
        if c.fused_update:
            return run(*batch, lambda found: self._update(found, step, rate, scale))
        for unit in units:
            self._update(unit, step, rate, scale)
        return loss

    def _update(self, found: Gradients, step: int, rate: float, scale: Tensor | None = None) -> None:
        """Update a unit's parameters and free its gradients; without a `scale`, they are clipped by themselves."""
        limit, later = self.config.max_grad_norm, self.config.stage1 or 0
        if scale is None and limit is not None:
            scale = clip_scale(squared_norm(found.values()), limit)
        while found:
            name, gradient = found.popitem()
            self.updates.apply(name, gradient, step + 1 - (0 if name in self.adapters else later), rate, scale)

    def _begin(self, step: int, learning_rate: float) -> float:
        """Let the parameters of the step's stage require gradients; gives its learning rate."""
        stage1 = self.config.stage1
        first = stage1 is None or step < stage1
        active = self.adapters if first else self.parameters
        if active is not self.active:
            self.active = active
            for name, parameter in [*self.loaded.model.named_parameters(), *self.adapters.items()]:
                parameter.requires_grad_(name in active)
        return learning_rate * (self.config.stage1_learning_rate / self.config.learning_rate if first else 1.0)

    def _batch(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        return ids_BT, labels_BT

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts of the reversible network; see `Session.evaluate`."""
        nll, count = self.passes.row_nll(*self._batch(ids, labels))
        return nll.float().cpu().numpy(), count.cpu().numpy().astype(np.int64)

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """A first-order step cannot be rebuilt from scalars."""
        raise ConfigError("a first-order run has no projected gradients to replay", hint="resume from its checkpoint")

    def state(self) -> dict[str, np.ndarray]:
        """What is trained, the optimizer's state and the streams' scale, as they are; bfloat16 as uint16."""
        arrays = self.parameters | self.updates.arrays()
        found = {name: as_numpy(value.detach().cpu().clone()) for name, value in arrays.items()}
        return found if self.network.fraction_bits is None else found | {BITS: np.array([self.network.fraction_bits])}

    @torch.no_grad()
    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        arrays = {name: torch.from_numpy(value) for name, value in state.items()}
        for name, parameter in self.parameters.items():
            value = arrays.get(name)
            if value is not None and value.dtype == torch.uint16:
                value = value.view(torch.bfloat16)
            if value is None or value.shape != parameter.shape or value.dtype != parameter.dtype:
                raise CheckpointError(
                    f"the checkpoint is not of this model: {name}",
                    expected=f"{parameter.dtype} {list(parameter.shape)}",
                    received=None if value is None else f"{value.dtype} {list(value.shape)}",
                )
            parameter.copy_(value)
        self.updates.load(arrays)
        if BITS in state:
            self.network.fraction_bits = int(state[BITS][0])

    def save_model(self, folder: Path) -> None:
        """The trained network as a Hugging Face folder with its own modelling file; see `export`."""
        save_reversible(folder, self.loaded, self.network)

    @property
    def ordinary_session(self) -> ModelSession | None:
        """The same weights in the ordinary architecture; None where adapters and half-width streams forbid it."""
        return None if self.adapters else ModelSession(self.loaded, self.config.loss_tiles)

    def adapter(self) -> Adapter | None:
        """None: the model itself is what was trained."""
        return None

    def load_adapter(self, adapter: Adapter) -> None:
        """Full fine-tuning takes no adapter."""
        raise ConfigError(f"method {self.config.name} trains the whole model and takes no adapter")

    def close(self) -> None:
        """Nothing to release beyond the model."""


def open_session(loaded: LoadedModel, config: Any, seed: int) -> RevffnSession:
    """The registry's door to this method; `seed` is that of the adapters' first values and of rounding."""
    return RevffnSession(loaded, config, seed)
