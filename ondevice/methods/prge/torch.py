"""P-RGE in eager PyTorch, on the CPU or with fused kernels on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.core.errors import CheckpointError, ConfigError, TrainingError
from ondevice.core.session import PackingSession, StepResult
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.step import PrgeProgram, flat_adapter
from ondevice.methods.prge.subspace_refresh import SessionSubspace
from ondevice.runtime_ops import torch_ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ondevice.models import LoadedModel


class PrgeSession(PackingSession):
    """Holds the adapter and steps it; any batch size and length.

    Args:
        loaded: the model; its target linears are replaced in place.
        config: the method's settings.
        seed: keys the noise and draws the frozen A.
    """

    batch_size = eval_batch_size = None
    lengths_tokens = None

    def __init__(self, loaded: LoadedModel, config: PrgeConfig, seed: int) -> None:
        self.loaded, self.config = loaded, config
        if config.factors is not None:
            raise ConfigError(
                "method.factors is for exported programs",
                received=str(config.factors),
                hint="a run in PyTorch takes its own subspace: --set method.subspace=gradient",
            )
        self.device = loaded.family.head_weight.device
        self.backend = f"torch-{self.device.type}"
        torch_ops.register()
        normal = config.noise == "gaussian"
        noise = torch.ops.ondevice.normal if normal else torch.ops.ondevice.rademacher
        layout = AdapterLayout.build(loaded.dims, config, seed)
        targets = [(entry.layer, entry.target) for entry in layout.entries]
        self.names = {key: loaded.family.linear_name(*key) for key in targets}
        loaded.family.check_adapted(list(self.names.values()))
        self.generator_backend, program = torch_ops.generator_backend(self.device), PrgeProgram
        if loaded.dims.whole:
            from ondevice.methods.prge.whole import WholeModelProgram

            program = WholeModelProgram
        elif self.generator_backend == "triton":
            from ondevice.methods.prge.cuda import CudaPrgeProgram

            program = CudaPrgeProgram
        self.program = program(loaded.family, layout, config, noise)
        self.seed = torch.tensor([seed], device=self.device)
        self._adapter = flat_adapter(layout, self.device, self.program.state_size)
        self.subspace = (
            SessionSubspace(self.program, config) if config.subspace == "gradient" else None
        )

    def _tensors(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for array in arrays]

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Take a new subspace from an exact gradient where one is due; see `Preparing.before_step`."""
        if self.subspace is None or not self.subspace.due(step):
            return None
        self._adapter = self.subspace.fold(self._adapter)
        return self.subspace.measure(step, batch_at, folder)

    def before_replay(self, step: int, folder: Path) -> None:
        """Take the subspace that the run took before this step; see `Preparing.before_replay`."""
        if self.subspace is not None and self.subspace.due(step):
            self._adapter = self.subspace.fold(self._adapter)
            self.subspace.read(step, folder)

    @torch.inference_mode()
    def step_placed(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run one ZO-SGD step; see `PackingSession`."""
        if self.subspace is not None and not self.subspace.factors:
            raise TrainingError(
                "there is no subspace yet",
                expected="`before_step` before the first step",
                received="step",
            )
        rate = np.array([learning_rate], dtype=np.float32)
        ids_BT, labels_BT, number, rate_1 = self._tensors(ids, labels, np.array([step]), rate)
        places = () if position_ids is None else (position_ids,)
        losses, gradients, self._adapter = self.program.train_step(
            ids_BT, labels_BT, self._adapter, self.seed, number, rate_1, *self._tensors(*places)
        )
        values = losses.tolist()
        return StepResult(sum(values) / len(values), tuple(values), tuple(gradients.tolist()))

    @torch.inference_mode()
    def score_step(self, score: Callable[[], float], step: int, learning_rate: float) -> StepResult:
        """Run one step on a score of each copy, one after the other; see `Scoring.score_step`."""
        own, (number,) = self._adapter, self._tensors(np.array([step]))
        size = self.program.layout.size
        losses = []
        try:
            for copy in self.program.perturbed(own, self.seed, number)(0, size):
                self._adapter = torch.cat([copy.to(own.dtype), own[size:]])
                losses.append(1.0 - score())
        finally:
            self._adapter = own
        values = torch.tensor(losses, dtype=torch.float32, device=self.device)
        gradients = tuple(self.program.projected_gradients(values).tolist())
        self.apply_update(gradients, step, learning_rate)
        return StepResult(sum(losses) / len(losses), tuple(losses), gradients)

    def whole_model(self) -> LoadedModel:
        """Return the model with the adapter as it is now in its layers."""
        for entry, linear in self.program.linears.items():
            if not entry.diagonal or linear.c_RO is not None:
                own = self._adapter[None, entry.offset : entry.offset + entry.count]
                linear.slot.copies = linear.matrices(own.reshape(1, entry.rank, entry.width))
        return self.loaded

    @torch.inference_mode()
    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        ids_ET, labels_ET = self._tensors(ids, labels)
        nll, tokens = self.program.evaluate(ids_ET, labels_ET, self._adapter)
        return nll.cpu().numpy(), tokens.cpu().numpy().astype(np.int64)

    @torch.inference_mode()
    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply only the update; see `Replaying.apply_update`."""
        rate = np.array([learning_rate], dtype=np.float32)
        gradients = np.array(projected_gradients, dtype=np.float32)
        gradients_Q, number, rate_1 = self._tensors(gradients, np.array([step]), rate)
        self._adapter = self.program.apply_update(
            self._adapter, gradients_Q, self.seed, number, rate_1
        )

    def flat(self) -> np.ndarray:
        """Return the adapter vector, float32 [layout.size]."""
        return self._adapter.cpu().numpy()

    def state(self) -> dict[str, np.ndarray]:
        """Return the adapter and the seed."""
        state = {"adapter": self.flat().copy(), "seed": self.seed.cpu().numpy()}
        return state if self.subspace is None else state | self.subspace.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave; see `Session.load_state`."""
        flat = state.get("adapter")
        fits = (
            flat is not None
            and flat.shape == tuple(self._adapter.shape)
            and flat.dtype == np.float32
        )
        if flat is None or not fits or "seed" not in state:
            raise CheckpointError(
                "the checkpoint is not of this run",
                expected=f"adapter float32 {list(self._adapter.shape)}",
                received=None if flat is None else f"{flat.dtype} {list(flat.shape)}",
            )
        if self.subspace is not None:
            self.subspace.load_state(state)
        (self._adapter,) = self._tensors(flat.copy())
        (self.seed,) = self._tensors(state["seed"].copy())

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        config = self.config
        if self.subspace is not None:
            return self.subspace.adapter(self._adapter, self.names, self.loaded.source.source)
        tensors = self.program.layout.to_tensors(self.flat(), self.names)
        return Adapter(
            tensors, config.rank, config.alpha, targets_of(tensors), self.loaded.source.source
        )

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from an adapter of this layout: the same linears, rank, alpha and frozen A. If a
        gradient gives the subspace, any adapter of these linears will do: it stays next to what is
        trained."""
        if self.subspace is not None:
            self.subspace.start_from(adapter, self.names)
            return
        flat = self.program.layout.from_adapter(adapter, self.names, self.config.alpha)
        (self._adapter,) = self._tensors(
            np.pad(flat, (0, self.program.state_size - flat.size))
        )  # moments of 0


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> PrgeSession:
    """See `MethodSpec.open_session`; the model is computed where it is."""
    return PrgeSession(loaded, config, seed)
