"""The session of MeSP in torch: a step and its optimizer, an evaluation, the adapter, and a state
that resumes bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.core.errors import ConfigError, DataError
from ondevice.core.session import IGNORE, PackingSession, StepResult, Weigh
from ondevice.data.pictures import FIRST_ID
from ondevice.methods.mesp.check import IN_TORCH, check_base
from ondevice.methods.mesp.lora import (
    check_adapter,
    check_not_partially_updated,
    lora_parameters,
)
from ondevice.methods.mesp.torch.checkpointed import CheckpointedModel, checkpointed_parameters
from ondevice.methods.mesp.torch.graphed import graphs_for
from ondevice.methods.mesp.torch.model import Model
from ondevice.methods.mesp.torch.optimizer import Optimizer
from ondevice.methods.mesp.torch.streamed import Streamed
from ondevice.methods.mesp.torch.weights import Resident
from ondevice.methods.model_loss import nll_in_parts
from ondevice.methods.precision import round_base
from ondevice.models import ModelFiles
from ondevice.nn.adapters import adapted
from ondevice.nn.cross_entropy import Scale, WeighedRows
from ondevice.nn.rows_apart import BranchesApart
from ondevice.offload.device import memory_errors

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.models import LoadedModel

HINT = (
    "method.micro_batch_size: 1, method.mlp_chunk_tokens: 1024, method.activations: host, "
    "method.weight_placement: streamed, shorter rows; the run's last checkpoint is unharmed"
)


class MespSession(PackingSession):
    """Exact gradients of every A and B, one block at a time; see `Session`."""

    batch_size = eval_batch_size = None
    lengths_tokens = None
    generator_backend = "none"

    def __init__(
        self, model: LoadedModel | ModelFiles, config: MespConfig, seed: int, device: str | None
    ) -> None:
        self.loaded = model
        self.config = config
        self.model: Model | CheckpointedModel
        with memory_errors("the model", self._hint()):
            if not isinstance(model, ModelFiles) and model.dims.whole:
                self._open_unknown(model, seed, device)
            else:
                self._open_known(model, seed, device)
        self.backend = f"torch-{self.device.type}"
        self.partially_updated = False

    def _open_known(self, model: LoadedModel | ModelFiles, seed: int, device: str | None) -> None:
        config = self.config
        family = model.family if isinstance(model, ModelFiles) else type(model.family)
        parameters = lora_parameters(
            model.dims, family, config, IN_TORCH, "mesp with streamed weights"
        )
        if isinstance(model, ModelFiles):
            self.device = torch.device(device or "cpu")
            self.weights: Any = Streamed(model, self.device, config.bits)
        else:
            self.device = torch.device(device or model.family.head_weight.device)
            if config.base:
                round_base(model, config.base)
            self.weights = Resident(model, self.device, config.bits)
        self.optimizer = Optimizer(parameters, config, seed, self.device)
        graphs = None
        if config.cuda_graphs and self.device.type == "cuda":
            graphs = graphs_for(self.weights, config)
        self.model = Model(self.weights, self.optimizer, config, graphs)

    def _open_unknown(self, model: LoadedModel, seed: int, device: str | None) -> None:
        module: Any = model.model
        self.device = torch.device(device or model.family.head_weight.device)
        module.to(self.device)
        parameters = checkpointed_parameters(model, self.config)
        self.optimizer = Optimizer(parameters, self.config, seed, self.device)
        self.model = CheckpointedModel(model, self.optimizer, self.config)
        self.weights = self.model

    def step_placed(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run one optimizer step on all rows, `method.micro_batch_size` of them at once; see
        `PackingSession`."""
        rows = self.config.micro_batch_size or len(ids)
        count = max(1, int((labels[:, 1:] != IGNORE).sum()))
        scales = [1.0 / count] * -(-len(ids) // rows)
        value = self._step((ids, labels, position_ids), scales, learning_rate) / count
        return StepResult(value, (value,))

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step on weighted rows; see `Weighing`.

        The rows' likelihoods are known between the head and the backward pass, where the weights
        multiply the head's gradient. A step in several parts computes them first.
        """
        weighed = WeighedRows(weigh)
        rows = self.config.micro_batch_size or len(ids)
        scales: list[Scale] = [weighed]
        if rows < len(ids):
            found = torch.from_numpy(nll_in_parts(self.evaluate, ids, labels, rows))
            scales = [lambda nll_B, part=part: part for part in weighed(found).split(rows)]
        self._step((ids, labels, None), scales, learning_rate)
        return StepResult(weighed.loss, (weighed.loss,))

    @contextmanager
    def writing(self) -> Iterator[LoadedModel]:
        """Give the model with the adapter in its layers for a block; see `Writing`.

        Raises:
            ConfigError: the weights are in files, or in 4 bits.
        """
        if isinstance(self.loaded, ModelFiles) or self.config.bits:
            raise ConfigError(
                "mesp writes answers only with resident weights of the model's own precision",
                expected="method.weight_placement: resident, method.bits left out",
                received=f"{self.config.weight_placement}, bits {self.config.bits}",
            )
        if self.loaded.dims.whole:  # the adapter is in its layers
            yield self.loaded
            return
        with adapted(self.loaded, self.adapter()):
            yield self.loaded

    def _step(
        self,
        arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None],
        scales: Sequence[Scale],
        learning_rate: float,
    ) -> float:
        """Update with the gradients of all rows, each part's with its own scale; return the summed
        loss.

        Args:
            arrays: ids, labels and position_ids, or None, int64 [B, T].
        """
        check_not_partially_updated(self.partially_updated)
        ids, labels, position_ids = arrays
        if position_ids is None:
            ids, labels = self.model.padded(ids, labels)
        rows = self.config.micro_batch_size or len(ids)
        clips = self.config.max_grad_norm is not None
        with memory_errors(_told("a step", rows, ids), self._hint()), self.model.beside():
            ids_BT, labels_BT = self._tensors(ids, labels)
            self.optimizer.begin(learning_rate, accumulate=clips or rows < len(ids))
            self.partially_updated = True
            total = torch.zeros((), device=self.device)
            chunks: list[Any] = [ids_BT.split(rows), labels_BT.split(rows), scales]
            if position_ids is not None:
                chunks.append(torch.from_numpy(position_ids).to(self.device).split(rows))
            for chunk in zip(*chunks, strict=True):
                total += self.model.forward_backward(*chunk)
            self.optimizer.end()
            value = float(total)
        self.partially_updated = False
        return value

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        with memory_errors(_told("an evaluation", len(ids), ids), HINT), self.model.beside():
            ids_BT, labels_BT = self._tensors(ids, labels)
            nll = self.model.row_nll(ids_BT, labels_BT).cpu().numpy()
        return nll, (labels[:, 1:] >= 0).sum(1).astype(np.int64)

    def takes_branches(self, length_tokens: int) -> bool:
        """Return whether the blocks are known; see `Branching.takes_branches`."""
        return isinstance(self.model, Model)

    def evaluate_branches(
        self,
        ids: np.ndarray,
        position_ids: np.ndarray,
        branches: np.ndarray,
        sources: np.ndarray,
        labels: np.ndarray,
    ) -> np.ndarray:
        """Compute the labels' losses; see `Branching.evaluate_branches`."""
        assert isinstance(self.model, Model)  # noqa: S101 - `takes_branches`
        with memory_errors(_told("an evaluation", len(ids), ids), HINT), self.model.beside():
            ids_BT, position_ids_BT = self._tensors(ids, position_ids)
            apart = BranchesApart.of(branches, self.weights.dtype, self.device)
            found = (torch.from_numpy(part).to(self.device) for part in (sources, labels))
            nll = self.model.branches_nll(ids_BT, position_ids_BT, apart, *found)
        return nll.cpu().numpy()

    def state(self) -> dict[str, np.ndarray]:
        """Return A, B, moments and the number of steps; the same names on every backend."""
        check_not_partially_updated(self.partially_updated)
        return self.optimizer.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        self.optimizer.load(state)
        self.partially_updated = False

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        config = self.config
        arrays = self.optimizer.arrays()
        return Adapter(
            arrays,
            config.rank,
            config.alpha,
            targets_of(arrays),
            self.loaded.source.source,
            config.base or "",
        )

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`; it must have the same rank, alpha and linear layers."""
        parameters = tuple(self.optimizer.parameters.values())
        self.optimizer.assign(check_adapter(adapter, parameters, self.config, self.loaded.dims))

    def release_model(self) -> None:
        """Give the model its own layers back, if blocks that are not known have others."""
        self.weights.close()

    def close(self) -> None:
        """End the reading of files."""
        self.weights.close()

    def _hint(self) -> str:
        """Return what frees memory in a step; first of all what was kept because there was room."""
        keeps = self.config.recompute not in ("all", "auto")
        return "method.recompute: all, " * keeps + HINT

    def _tensors(self, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
        largest = int(ids.max(initial=0, where=ids < FIRST_ID))
        if largest >= self.loaded.dims.vocab:
            raise DataError(
                f"token {largest} is not in the model's vocabulary",
                expected=f"ids below {self.loaded.dims.vocab}",
                received=largest,
                hint="the tokenizer is another model's: encode the rows with this model's own",
            )
        ids_BT, labels_BT = (torch.from_numpy(array).to(self.device) for array in (ids, labels))
        return ids_BT, labels_BT


def _told(what: str, rows: int, ids: np.ndarray) -> str:
    return f"{what} of {rows} rows of {ids.shape[1]} tokens"


def open_session(
    model: LoadedModel | ModelFiles, config: MespConfig, seed: int, device: str | None = None
) -> MespSession:
    """See `MethodSpec.open_session`; `model` is `ModelFiles` for weights that are streamed.

    Raises:
        ConfigError: a loaded model if `method.weight_placement` is streamed.
    """
    if config.base:
        check_base(config)
    if config.weight_placement == "streamed" and not isinstance(model, ModelFiles):
        raise ConfigError(
            "streamed weights are read from files",
            expected="ondevice.models.open_model(...)",
            received="a model that is in memory",
            hint="method.weight_placement: resident",
        )
    return MespSession(model, config, seed, device)
