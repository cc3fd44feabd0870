"""P-RGE in eager PyTorch, on the CPU or with fused kernels on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.core.errors import CheckpointError
from ondevice.core.session import Session, StepResult
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.step import PrgeProgram, flat_adapter
from ondevice.runtime_ops import torch_ops

if TYPE_CHECKING:
    from ondevice.models import LoadedModel


class PrgeSession(Session):
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
        self._adapter = flat_adapter(layout, self.device)

    def _tensors(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for array in arrays]

    @torch.inference_mode()
    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """Run one ZO-SGD step; see `Session.step`."""
        rate = np.array([learning_rate], dtype=np.float32)
        ids_BT, labels_BT, number, rate_1 = self._tensors(ids, labels, np.array([step]), rate)
        losses, gradients, self._adapter = self.program.train_step(
            ids_BT, labels_BT, self._adapter, self.seed, number, rate_1
        )
        values = losses.tolist()
        return StepResult(sum(values) / len(values), tuple(values), tuple(gradients.tolist()))

    @torch.inference_mode()
    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        ids_ET, labels_ET = self._tensors(ids, labels)
        nll, tokens = self.program.evaluate(ids_ET, labels_ET, self._adapter)
        return nll.cpu().numpy(), tokens.cpu().numpy().astype(np.int64)

    @torch.inference_mode()
    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """Apply the update alone; see `Session.apply_update`."""
        rate = np.array([learning_rate], dtype=np.float32)
        gradients = np.array(projected_gradients, dtype=np.float32)
        gradients_Q, number, rate_1 = self._tensors(gradients, np.array([step]), rate)
        self._adapter = self.program.apply_update(self._adapter, gradients_Q, self.seed, number, rate_1)

    def flat(self) -> np.ndarray:
        """Return the adapter vector, float32 [layout.size]."""
        return self._adapter.cpu().numpy()

    def state(self) -> dict[str, np.ndarray]:
        """Return the adapter and the seed."""
        return {"adapter": self.flat().copy(), "seed": self.seed.cpu().numpy()}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave; see `Session.load_state`."""
        flat = state.get("adapter")
        fits = flat is not None and flat.shape == tuple(self._adapter.shape) and flat.dtype == np.float32
        if flat is None or not fits or "seed" not in state:
            raise CheckpointError(
                "the checkpoint is not of this run",
                expected=f"adapter float32 {list(self._adapter.shape)}",
                received=None if flat is None else f"{flat.dtype} {list(flat.shape)}",
            )
        (self._adapter,) = self._tensors(flat.copy())
        (self.seed,) = self._tensors(state["seed"].copy())

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        tensors = self.program.layout.to_tensors(self.flat(), self.names)
        config = self.config
        return Adapter(tensors, config.rank, config.alpha, targets_of(tensors), self.loaded.source.source)

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from an adapter of this layout: the same linears, rank, alpha and frozen A."""
        flat = self.program.layout.from_adapter(adapter, self.names, self.config.alpha)
        (self._adapter,) = self._tensors(flat)


def open_session(loaded: LoadedModel, config: Any, seed: int, device: str | None = None) -> PrgeSession:
    """See `MethodSpec.open_session`; the model is computed where it is."""
    return PrgeSession(loaded, config, seed)
