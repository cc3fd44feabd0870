"""The session of LSP-Offload: its engine, its state for checkpoints, the trained weights, and what looks found."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.methods.offloading import EngineSession, as_numpy, steps_of
from ondevice.models.save import save_weights
from ondevice.offload.device import memory_errors
from ondevice.offload.host import DTYPES
from ondevice.offload.lsp import saved
from ondevice.offload.lsp.engine import LspEngine

if TYPE_CHECKING:
    import torch

    from ondevice.methods.lsp.config import LspConfig
    from ondevice.methods.session import StepResult
    from ondevice.models import LoadedModel

OPEN_HINT = "method.weights: nf4 or host, method.window: 2; `ondevice plan` lists what each part needs"
STEP_HINT = (
    "method.micro_batch_size: 1, method.activations: host, method.loss_chunk_tokens: 512; "
    "`ondevice plan` lists what each part needs"
)


class LspSession(EngineSession):
    """AdamW over all parameters, of matrices in learned subspaces; see `Session`."""

    engine: LspEngine
    step_hint = STEP_HINT

    def __init__(self, loaded: LoadedModel, config: LspConfig, device: str, seed: int) -> None:
        with memory_errors("the weights, the projectors and the output head", OPEN_HINT):
            super().__init__(loaded, config, LspEngine(loaded.family, config, device, seed))
        self.found: dict[str, Any] = {}

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One AdamW step; its last answers come while the next step begins."""
        looking = self.steps_done % self.config.check_every == 0
        result = super().step(ids, labels, step, learning_rate)
        self.found = self._looks() if looking else {}
        return result

    def report(self) -> dict[str, Any] | None:
        """What ran beside what in the step before the last, and what that found where it looked at the bias:
        `looks` by parameter, each [before, after], and the means of both. After is before where projectors stay."""
        overlap = super().report()
        return (
            None if overlap is None else {**overlap, "transition_layer": self.engine.updates.transition, **self.found}
        )

    def state(self) -> dict[str, np.ndarray]:
        """Changes, projectors, moments, and the weights that changes have gone into: copies; bfloat16 as uint16."""
        self.engine.flush()
        found = {name: as_numpy(tensor) for name, tensor in saved.arrays(self.engine).items()}
        return {**found, "optimizer_step": np.array([self.steps_done], dtype=np.int64)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        self.engine.flush()
        done = steps_of(state.get("optimizer_step"))
        saved.load(self.engine, state)
        self.steps_done, self.found = done, {}

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, on the host in the compute dtype: bases with their changes."""
        self.engine.flush()
        return self.engine.weights(DTYPES[self.config.compute])

    def save_beside(self, folder: Path) -> None:
        """The weights as transformers loads them, into the checkpoint's folder."""
        save_weights(folder / "model", self.weights(), self.loaded)

    def _looks(self) -> dict[str, Any]:
        looks = {
            name: (look.before, look.before if look.after is None else look.after)
            for name, look in self.engine.looks.items()
        }
        if not looks:
            return {}
        before, after = (fmean(pair[side] for pair in looks.values()) for side in (0, 1))
        return {"bias_before": before, "bias_after": after, "looks": looks}


def open_session(loaded: LoadedModel, config: Any, seed: int, device: str = "cpu") -> LspSession:
    """The registry's door to this method; `loaded` is on the CPU. Projectors are drawn from `seed`."""
    return LspSession(loaded, config, device, seed)
