"""P-RGE's session of fixed shapes: each shape's step is captured once as a CUDA graph and
replayed.

The launches of a step are then free, which is most of a small batch's time on a board. All shapes
share one pool of memory, because a step is over before the next begins. The loss has a fixed shape
too: it computes all positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.core.session import StepResult
from ondevice.methods.prge.cuda import GraphedStep
from ondevice.methods.prge.torch import PrgeSession
from ondevice.nn.graph_loss import answer_loss, graph_token_nll, weight_tiles

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ondevice.artifact.adapter import Adapter
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.models import LoadedModel


class GraphedPrgeSession(PrgeSession):
    """As `PrgeSession`; the adapter stays at one place in memory, where the graphs read and write
    it.

    On a CPU the same steps run without a graph, which proves what surrounds it.
    """

    def __init__(self, loaded: LoadedModel, config: PrgeConfig, seed: int) -> None:
        super().__init__(loaded, config, seed)
        head = loaded.family.head_weight
        self.program.token_loss = (
            answer_loss(head, config.answers)
            if config.answers
            else graph_token_nll(weight_tiles(head, config.loss_tiles))
        )
        self.graphs: dict[tuple[int, ...], GraphedStep] = {}
        self.pool: Any = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._place = self._adapter

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one ZO-SGD step; the first of a shape captures it."""
        with torch.no_grad():
            ids_BT, labels_BT = self._tensors(ids, labels)
            if ids.shape not in self.graphs:
                self.graphs[ids.shape] = GraphedStep(
                    self.program, ids_BT, labels_BT, self._place, int(self.seed.item()), self.pool
                )
            losses, gradients = self.graphs[ids.shape](ids_BT, labels_BT, step, learning_rate)
            values = losses.tolist()
            return StepResult(sum(values) / len(values), tuple(values), tuple(gradients.tolist()))

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Take a new subspace where one is due; see `Preparing.before_step`."""
        path = super().before_step(step, batch_at, folder)
        if path is not None:
            self._begin_anew()
        return path

    def before_replay(self, step: int, folder: Path) -> None:
        """Take the subspace that the run took before this step; see `Preparing.before_replay`."""
        due = self.subspace is not None and self.subspace.due(step)
        super().before_replay(step, folder)
        if due:
            self._begin_anew()

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply only the update; see `Replaying.apply_update`."""
        super().apply_update(projected_gradients, step, learning_rate)
        self._keep()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave."""
        super().load_state(state)
        self._begin_anew()

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from an adapter of this layout."""
        super().load_adapter(adapter)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Capture again what a graph has of a subspace: where its tensors lay, and how much earlier
        ones have kept."""
        self._keep()
        if self.subspace is not None:
            self.graphs.clear()

    @torch.no_grad()
    def _keep(self) -> None:
        """Bring the adapter and the seed where the graphs look for them."""
        self._place.copy_(self._adapter)
        self._adapter = self._place
        for graph in self.graphs.values():
            graph.seed.copy_(self.seed)
