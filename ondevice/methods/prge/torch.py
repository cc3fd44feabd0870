"""P-RGE in eager PyTorch, on the CPU or with fused kernels on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.core.errors import CheckpointError, TrainingError
from ondevice.core.session import PackingSession, StepResult
from ondevice.methods.model_loss import BranchedEvaluation
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.copies import CopiesGraphs, graphs_for
from ondevice.methods.prge.cuda import CudaPrgeProgram
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.step import CopiesOf, PrgeProgram
from ondevice.methods.prge.subspace import SessionSubspace
from ondevice.offload.shapes import padded
from ondevice.runtime_ops import torch_ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ondevice.models import LoadedModel


class PrgeSession(BranchedEvaluation, PackingSession):
    """Holds the adapter and steps it; any batch size and length.

    Args:
        loaded: the model; its target linears are replaced in place.
        config: the method's settings.
        seed: keys the noise and draws the frozen A.
    """

    batch_size = eval_batch_size = None
    lengths_tokens = None
    as_graphs = True
    """Whether steps on a GPU run as graphs by the shape of a batch."""

    def __init__(self, loaded: LoadedModel, config: PrgeConfig, seed: int) -> None:
        self.loaded = loaded
        self.family = loaded.family
        self.config = config
        config.check_training()
        self.device = loaded.family.head_weight.device
        self.backend = f"torch-{self.device.type}"
        noise = torch_ops.noise(config.noise)
        layout = AdapterLayout.build(loaded.dims, config, seed)
        targets = [(entry.layer, entry.target) for entry in layout.entries]
        self.names = {key: loaded.family.linear_name(*key) for key in targets}
        loaded.family.check_adapted(list(self.names.values()))
        self.generator_backend = torch_ops.generator_backend(self.device)
        program = PrgeProgram
        if loaded.dims.whole or loaded.dims.traits.hands_on:
            program = WholeModelProgram
        elif self.generator_backend == "triton":
            program = CudaPrgeProgram
        self.program = program(loaded.family, layout, config, noise)
        self.seed = torch.tensor([seed], device=self.device)
        self._adapter = torch.zeros(self.program.state_size, device=self.device)  # B = 0
        self.subspace: SessionSubspace | None = None
        if config.subspace == "gradient":
            self.subspace = SessionSubspace(self.program, config)
        self.copies_graphs: CopiesGraphs | None = None
        if self.device.type == "cuda" and self.as_graphs and config.cuda_graphs:
            self.run_as(graphs_for(loaded, self.program))

    def run_as(self, graphs: CopiesGraphs | None) -> None:
        """Run the pass of all copies as these graphs; None runs it as it is."""
        self.copies_graphs = graphs
        self.program.run_copies = None if graphs is None else graphs.hidden

    def _tensors(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(array)).to(self.device) for array in arrays]

    def _scalars(self, step: int, learning_rate: float) -> tuple[torch.Tensor, ...]:
        """Return seed, step and learning rate as the program takes them."""
        rate = np.array([learning_rate], dtype=np.float32)
        return (self.seed, *self._tensors(np.array([step]), rate))

    def _replace(self, adapter: torch.Tensor, new_subspace: bool = True) -> None:
        """Go on with this adapter; with `new_subspace`, those of the layers may have changed."""
        self._adapter = adapter

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Take a new subspace from an exact gradient if one is due; see `Preparing.before_step`."""
        if self.subspace is None or not self.subspace.due(step):
            return None
        self._replace(self.subspace.fold(self._adapter))
        return self.subspace.measure(step, batch_at, folder)

    def before_replay(self, step: int, folder: Path) -> None:
        """Take the subspace that the run took before this step; see `Preparing.before_replay`."""
        if self.subspace is not None and self.subspace.due(step):
            self._replace(self.subspace.fold(self._adapter))
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
        graphs = self.copies_graphs
        if graphs is None:
            return self._stepped(ids, labels, position_ids, step, learning_rate)
        if position_ids is None:
            ids, labels = padded(ids, labels, None, self.loaded.dims.max_positions)
        else:
            graphs.tell("rows of one sequence are kept apart")
        return graphs.with_room(
            lambda: self._stepped(ids, labels, position_ids, step, learning_rate)
        )

    def _stepped(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        position_ids: np.ndarray | None,
        step: int,
        learning_rate: float,
    ) -> StepResult:
        """Run one step over arrays as they are."""
        scalars = self._scalars(step, learning_rate)
        ids_BT, labels_BT = self._tensors(ids, labels)
        positions = None
        if position_ids is not None:
            (positions,) = self._tensors(position_ids)
        losses, gradients, self._adapter = self.program.train_step(
            ids_BT, labels_BT, self._adapter, *scalars, position_ids_BT=positions
        )
        return step_result(losses.tolist(), gradients.tolist())

    @torch.inference_mode()
    def score_step(self, score: Callable[[], float], step: int, learning_rate: float) -> StepResult:
        """Run one step on a score of each copy, one after the other; see `Scoring.score_step`."""
        own = self._adapter
        size = self.program.layout.size
        losses = []
        scalars = self._scalars(step, learning_rate)
        try:
            for copy in self.program.perturbed(own, *scalars[:2])(0, size):
                self._adapter = torch.cat([copy.to(own.dtype), own[size:]])
                losses.append(1.0 - score())
        finally:
            self._adapter = own
        values = torch.tensor(losses, dtype=torch.float32, device=self.device)
        gradients = self.program.projected_gradients(values).tolist()
        self.apply_update(tuple(gradients), step, learning_rate)
        return step_result(losses, gradients)

    def whole_model(self) -> LoadedModel:
        """Return the model with the adapter as it is now in its layers."""
        for entry, linear in self.program.linears.items():
            if not entry.diagonal or linear.c_RO is not None:
                own = self._adapter[None, entry.offset : entry.offset + entry.count]
                linear.slot.copies = linear.matrices(entry.shaped(own))
        if self.copies_graphs is not None:
            self.copies_graphs.release()
        return self.loaded

    @torch.inference_mode()
    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""

        def compute() -> tuple[Tensor, Tensor]:
            ids_ET, labels_ET = self._tensors(ids, labels)
            return self.program.evaluate(ids_ET, labels_ET, self._adapter)

        graphs = self.copies_graphs
        nll, tokens = compute() if graphs is None else graphs.with_room(compute)
        return nll.cpu().numpy(), tokens.cpu().numpy().astype(np.int64)

    def branched_hidden(
        self, ids: torch.Tensor, position_ids: torch.Tensor, branches: torch.Tensor
    ) -> torch.Tensor:
        """Compute it under the adapter as it is now; see `BranchedEvaluation`."""
        return self.program.hidden(ids, self._adapter, position_ids, branches)

    def labels_nll(self, hidden_ND: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
        """Compute the program's loss; see `BranchedEvaluation`."""
        return self.program.token_loss(hidden_ND, labels_N)

    @torch.inference_mode()
    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply only the update; see `Replaying.apply_update`."""
        (gradients_Q,) = self._tensors(np.array(projected_gradients, dtype=np.float32))
        scalars = self._scalars(step, learning_rate)
        adapter = self.program.apply_update(self._adapter, gradients_Q, *scalars)
        self._replace(adapter, new_subspace=False)

    def flat(self) -> np.ndarray:
        """Return the adapter vector, float32 [layout.size]."""
        return self._adapter.cpu().numpy()

    def state(self) -> dict[str, np.ndarray]:
        """Return the adapter and the seed."""
        state = {"adapter": self.flat().copy(), "seed": self.seed.cpu().numpy()}
        if self.subspace is not None:
            state |= self.subspace.state()
        return state

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave; see `Session.load_state`."""
        flat = state.get("adapter")
        shape = tuple(self._adapter.shape)
        if flat is None or flat.shape != shape or flat.dtype != np.float32 or "seed" not in state:
            raise CheckpointError(
                "the checkpoint is not of this run",
                expected=f"adapter float32 {list(shape)}",
                received=flat if flat is None else f"{flat.dtype} {list(flat.shape)}",
            )
        if self.subspace is not None:
            self.subspace.load_state(state)
        adapter, self.seed = self._tensors(flat.copy(), state["seed"].copy())
        self._replace(adapter)

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        config = self.config
        source = self.loaded.source.source
        if self.subspace is not None:
            return self.subspace.adapter(self._adapter, self.names, source)
        tensors = self.program.layout.to_tensors(self.flat(), self.names)
        return Adapter(tensors, config.rank, config.alpha, targets_of(tensors), source)

    def release_model(self) -> None:
        """Give the model its own layers back."""
        self.program.release()

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from an adapter of this layout: the same linears, rank, alpha and frozen A. If a
        gradient gives the subspace, any adapter of these linears will do: it stays next to what is
        trained."""
        if self.subspace is not None:
            self.subspace.start_from(adapter, self.names)
            self._replace(self._adapter)
            return
        flat = self.program.layout.from_adapter(adapter, self.names, self.config.alpha)
        moments = self.program.state_size - flat.size
        (padded,) = self._tensors(np.pad(flat, (0, moments)))
        self._replace(padded)


def step_result(losses: list[float], gradients: list[float]) -> StepResult:
    """Return the result of a step with these losses of its copies."""
    return StepResult(sum(losses) / len(losses), tuple(losses), tuple(gradients))


def open_session(
    loaded: LoadedModel, config: Any, seed: int, device: str | None = None
) -> PrgeSession:
    """See `MethodSpec.open_session`; the model is computed where it is."""
    return PrgeSession(loaded, config, seed)


class WholeModelProgram(PrgeProgram):
    """P-RGE's step on a model that runs only as a whole: all copies of all B exist during a pass;
    layers below `top_layers` run once for each copy."""

    def _run_prefix(self, ids_BT: Tensor, *placed: Tensor | None) -> Tensor:
        return ids_BT

    def _run_suffix(self, ids_BT: Tensor, copies_of: CopiesOf, *placed: Tensor | None) -> Tensor:
        position_ids_RT = placed[0] if placed else None
        # `repeat` has made [copies, batch, tokens] of [batch, tokens].
        for entry in self.layout.entries:
            self._give(entry, copies_of(entry.offset, entry.count))
        try:
            return self.family.hidden(ids_BT.flatten(0, -2), position_ids=position_ids_RT)
        finally:
            for linear in self.linears.values():
                linear.slot.copies = None
