"""The pass of all perturbed copies as CUDA graphs, one for each shape of a batch: the CPU launches one
graph, instead of some thousand kernels.

Noise, loss and update stay outside: they are few kernels, and the size of the loss is the number of
labelled tokens. The copies have a fixed place, which every step fills.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.offload.graphs import CudaRecord, Record, recorder
from ondevice.offload.rehearsal import reason_against, rehearse
from ondevice.offload.shapes import ShapeGraphs, empty_cache, most_tokens

if TYPE_CHECKING:
    from ondevice.methods.prge.step import PrgeProgram
    from ondevice.models import LoadedModel

log = logging.getLogger(__name__)


def graphs_for(loaded: LoadedModel, program: PrgeProgram) -> CopiesGraphs | None:
    """Return where the graphs of a model on a GPU are kept; None, which is logged, if its steps
    cannot be graphs."""
    reason = reason_against(loaded)
    if len(program.passes()) > 1:
        reason = "copies run one after the other"
    if reason:
        log.info("steps run without CUDA graphs: %s", reason)
        return None
    tokens = most_tokens(loaded.dims.block_parameters) // program.config.copies
    return CopiesGraphs(recorder(program.device), program, tokens)


@dataclass
class CopiesPass:
    """The graph of a shape, and the memory that it shares with its caller."""

    ids_BT: Tensor
    hidden_RTD: Tensor
    replay: Callable[[], None]


class CopiesGraphs(ShapeGraphs[CopiesPass]):
    """Graphs of `PrgeProgram.copies_hidden`.

    Args:
        tokens: of a batch that gets graphs, at most; each copy has as many.
    """

    def __init__(
        self, record: Record | CudaRecord | None, program: PrgeProgram, tokens: int
    ) -> None:
        super().__init__(record, tokens)
        self.program = program
        self.copies_GP: Tensor | None = None
        self.places: list[tuple[int, torch.Size]] = []
        moving = set(map(id, self._of_subspace()))
        model = program.model
        self.fixed = [x for x in (*model.parameters(), *model.buffers()) if id(x) not in moving]

    def hidden(self, ids_BT: Tensor, copies_GP: Tensor) -> Tensor:
        """Return the hidden states of every copy, in memory that the next call uses.

        Args:
            ids_BT: int64 [batch, tokens].
            copies_GP: of the flat adapter, [copies, elements].
        """
        if self.copies_GP is None:
            self.copies_GP = torch.empty_like(copies_GP)
        places = [(x.data_ptr(), x.shape) for x in (*self.fixed, *self._of_subspace())]
        if places != self.places and self.made:  # a new subspace: graphs read what was there
            self.release()
        self.places = places
        copies = self.copies_GP.copy_(copies_GP)
        found = self.of_shape(ids_BT.shape, lambda record: self._make(record, ids_BT, copies))
        if found is None:
            return self.program.copies_hidden(ids_BT, copies)
        found.ids_BT.copy_(ids_BT)
        found.replay()
        return found.hidden_RTD

    def _of_subspace(self) -> list[Tensor]:
        """Return what a pass reads that a new subspace may put elsewhere."""
        tensors: list[Tensor | None] = []
        for linear in self.program.linears.values():
            tensors += [linear.lora_a, linear.c_RO, *(linear.past or ())]
        return [x for x in tensors if x is not None]

    def _make(self, record: Record, ids_BT: Tensor, copies_GP: Tensor) -> CopiesPass:
        ids_BT = ids_BT.clone()
        like = rehearse(lambda: self.program.copies_hidden(ids_BT, copies_GP))
        hidden_RTD = self.carrier(like.shape[0] * like.shape[1], like).view(like.shape)
        del like
        if ids_BT.is_cuda:
            empty_cache()

        def run() -> None:
            hidden_RTD.copy_(self.program.copies_hidden(ids_BT, copies_GP))

        return CopiesPass(ids_BT, hidden_RTD, record(run))
