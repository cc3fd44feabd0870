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

from ondevice.methods.prge.cuda import GraphedStep
from ondevice.methods.prge.torch import PrgeSession, step_result
from ondevice.nn.graph_loss import answer_loss, graph_token_nll, weight_tiles

if TYPE_CHECKING:
    from ondevice.core.session import StepResult
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.models import LoadedModel


class GraphedPrgeSession(PrgeSession):
    """As `PrgeSession`; the adapter stays at one place in memory, where the graphs read and write
    it.

    On a CPU the same steps run without a graph, which proves what surrounds it.
    """

    as_graphs = False  # the whole step is one

    def __init__(self, loaded: LoadedModel, config: PrgeConfig, seed: int) -> None:
        self.graphs: dict[tuple[int, ...], GraphedStep] = {}
        super().__init__(loaded, config, seed)
        head = loaded.family.head_weight
        if config.answers:
            self.program.token_loss = answer_loss(head, config.answers)
        else:
            self.program.token_loss = graph_token_nll(weight_tiles(head, config.loss_tiles))
        self._adapter_of_graphs = self._adapter
        self.pool: Any = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one ZO-SGD step; the first of a shape captures it."""
        with torch.no_grad():
            ids_BT, labels_BT = self._tensors(ids, labels)
            if ids.shape not in self.graphs:
                self.graphs[ids.shape] = GraphedStep(
                    self.program,
                    ids_BT,
                    labels_BT,
                    self._adapter_of_graphs,
                    int(self.seed.item()),
                    self.pool,
                )
            losses, gradients = self.graphs[ids.shape](ids_BT, labels_BT, step, learning_rate)
            return step_result(losses.tolist(), gradients.tolist())

    @torch.no_grad()
    def _replace(self, adapter: torch.Tensor, new_subspace: bool = True) -> None:
        """Copy adapter and seed to where the graphs look for them. A graph of an earlier subspace
        is captured again: it has the addresses of its tensors, and the rank of those before it."""
        self._adapter_of_graphs.copy_(adapter)
        self._adapter = self._adapter_of_graphs
        for graph in self.graphs.values():
            graph.seed.copy_(self.seed)
        if new_subspace and self.subspace is not None:
            self.graphs.clear()
