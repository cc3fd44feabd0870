"""The session of MeSP in torch: a step, an evaluation, the adapter, and a state that resumes bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.adapter import Adapter
from ondevice.errors import ConfigError, DataError
from ondevice.methods.mesp.pairs import check_adapter, check_whole, pairs_of
from ondevice.methods.mesp.torch.loss import labelled
from ondevice.methods.mesp.torch.passes import Passes
from ondevice.methods.mesp.torch.streamed import Streamed
from ondevice.methods.mesp.torch.updates import Updates
from ondevice.methods.mesp.torch.weights import Resident
from ondevice.methods.session import StepResult
from ondevice.models import ModelFiles
from ondevice.offload.device import memory_errors

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel

HINT = (
    "method.micro_batch_size: 1, method.mlp_chunk_tokens: 1024, method.activations: host, method.weights: streamed, "
    "shorter rows; the run's last checkpoint is unharmed"
)


class MespSession:
    """Exact gradients of every pair, one block at a time; see `Session`."""

    batch_size = eval_batch_size = None
    lengths_tokens = None
    generator_backend = "none"

    def __init__(self, model: LoadedModel | ModelFiles, config: MespConfig, seed: int, device: str | None) -> None:
        self.model, self.config = model, config
        family = model.family if isinstance(model, ModelFiles) else type(model.family)
        pairs = pairs_of(model.dims, family, config)
        with memory_errors("the model", HINT):
            if isinstance(model, ModelFiles):
                self.device = torch.device(device or "cpu")
                self.weights: Any = Streamed(model, self.device, config.loss_tiles, config.bits)
            else:
                self.device = torch.device(device) if device else model.family.head_weight.device
                self.weights = Resident(model, self.device, config.bits)
            self.updates = Updates(pairs, config, seed, self.device)
            self.passes = Passes(self.weights, self.updates, config)
        self.backend = f"torch-{self.device.type}"
        self.torn = False

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One optimizer step on all rows, `method.micro_batch_size` of them at once; see `Session.step`."""
        check_whole(self.torn)
        ids_BT, labels_BT = self._tensors(ids, labels)
        rows = self.config.micro_batch_size or len(ids_BT)
        count = labelled(labels_BT)
        self.updates.begin(learning_rate, accumulate=rows < len(ids_BT))
        self.torn = True
        with memory_errors(f"a step of {rows} rows of {ids_BT.shape[1]} tokens", HINT):
            total = torch.zeros((), device=self.device)
            for low in range(0, len(ids_BT), rows):
                part = slice(low, low + rows)
                total += self.passes.learn(ids_BT[part], labels_BT[part], 1.0 / max(1, count))
            self.updates.end()
            value = float(total) / max(1, count)
        self.torn = False
        return StepResult(value, (value,))

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        ids_BT, labels_BT = self._tensors(ids, labels)
        with memory_errors(f"an evaluation of {len(ids)} rows of {ids.shape[1]} tokens", HINT):
            nll = self.passes.nll(ids_BT, labels_BT)
        return nll.cpu().numpy(), (labels[:, 1:] >= 0).sum(1).astype(np.int64)

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """A first-order step cannot be rebuilt from scalars."""
        raise ConfigError("a first-order run has no projected gradients to replay", hint="resume from its checkpoint")

    def state(self) -> dict[str, np.ndarray]:
        """Pairs, moments and the number of steps; the same names on every backend."""
        check_whole(self.torn)
        return self.updates.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        self.updates.load(state)
        self.torn = False

    def adapter(self) -> Adapter:
        """The trained adapter in PEFT's layout."""
        config = self.config
        arrays = self.updates.arrays()
        return Adapter(arrays, config.rank, config.alpha, tuple(sorted(config.targets)), self.model.source.source)

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`; it must have the same rank, alpha and linear layers."""
        self.updates.take(check_adapter(adapter, tuple(self.updates.pairs.values()), self.config))

    def close(self) -> None:
        """End the reading of files."""
        self.weights.close()

    def _tensors(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        largest = int(ids.max(initial=0))
        if largest >= self.model.dims.vocab:
            raise DataError(
                f"token {largest} is not in the model's vocabulary",
                expected=f"ids below {self.model.dims.vocab}",
                received=largest,
                hint="the tokenizer is another model's: encode the rows with this model's own",
            )
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        return ids_BT, labels_BT


def open_session(
    model: LoadedModel | ModelFiles, config: MespConfig, seed: int, device: str | None = None
) -> MespSession:
    """The registry's door: a loaded model, or `ModelFiles` for weights that are streamed.

    Raises:
        ConfigError: a loaded model where `method.weights` is streamed.
    """
    if config.weights == "streamed" and not isinstance(model, ModelFiles):
        raise ConfigError(
            "streamed weights are read from files",
            expected="ondevice.models.open_model(...)",
            received="a model that is in memory",
            hint="method.weights: resident",
        )
    return MespSession(model, config, seed, device)
