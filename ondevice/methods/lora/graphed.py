"""A model's forward and backward pass as CUDA graphs, one pair for each shape of a batch: the CPU
launches two graphs and the loss, instead of some thousand kernels of peft's and transformers' layers.

The loss stays outside, as its size is the number of labelled tokens, and so does the optimizer. What
the forward graph keeps for its backward graph lies in the memory that all graphs share
(`offload.shapes`), since no other graph runs between the two. The backward graph adds to gradients
that have a fixed place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ondevice.offload.graphs import CudaRecord, Record, recorder
from ondevice.offload.rehearsal import reason_against, rehearse
from ondevice.offload.shapes import TOKENS, ShapeGraphs, empty_cache, most_tokens

if TYPE_CHECKING:
    from ondevice.models import Family, LoadedModel

log = logging.getLogger(__name__)


def graphs_for(
    loaded: LoadedModel, parameters: dict[str, torch.nn.Parameter]
) -> HiddenGraphs | None:
    """Return where the graphs of a model on a GPU are kept; None, which is logged, if its steps
    cannot be graphs."""
    reason = reason_against(loaded)
    if reason:
        log.info("steps run without CUDA graphs: %s", reason)
        return None
    tokens = most_tokens(loaded.dims.block_parameters)
    record = recorder(loaded.family.head_weight.device)
    return HiddenGraphs(record, loaded.family, parameters, tokens)


@dataclass
class HiddenPasses:
    """The two graphs of a shape, and the memory that they share with their caller."""

    ids_BT: Tensor
    hidden_BTD: Tensor
    """The last hidden states, then their gradient."""
    replay: Callable[[], None]
    replay_back: Callable[[], None]

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the last hidden states [B, T, D], in memory that `backward` uses."""
        self.ids_BT.copy_(ids_BT)
        self.replay()
        return self.hidden_BTD

    def backward(self, gradient_BTD: Tensor) -> None:
        """Add to the parameters' gradients."""
        self.hidden_BTD.copy_(gradient_BTD)
        self.replay_back()


class HiddenGraphs(ShapeGraphs[HiddenPasses]):
    """Graphs of a family's `hidden`.

    Args:
        parameters: trained ones, by name.
    """

    def __init__(
        self,
        record: Record | CudaRecord | None,
        family: Family,
        parameters: dict[str, torch.nn.Parameter],
        tokens: int = TOKENS,
    ) -> None:
        super().__init__(record, tokens)
        self.family = family
        self.gradients = [(p, torch.zeros_like(p)) for p in parameters.values()]
        self.read = [*family.model.parameters(), *family.model.buffers()]
        self.places: list[int] = []
        self.start = torch.zeros((), device=family.head_weight.device, requires_grad=True)

    def begin(self) -> None:
        """Give every parameter a gradient of zeros, in the place that graphs add to."""
        ops: Any = torch
        ops._foreach_zero_([gradient for _, gradient in self.gradients])
        for parameter, gradient in self.gradients:
            parameter.grad = gradient

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Return the last hidden states [B, T, D], to be differentiated once."""
        places = [x.data_ptr() for x in self.read]
        if places != self.places and self.made:  # graphs read what was there
            self.release()
        self.places = places
        passes = self.of_shape(ids_BT.shape, lambda record: self._make(record, ids_BT))
        if passes is None:
            return self.family.hidden(ids_BT)
        return _Replayed.apply(self.start, passes, ids_BT)

    def _make(self, record: Record, ids_BT: Tensor) -> HiddenPasses:
        ids_BT = ids_BT.clone()
        like = rehearse(lambda: self.family.hidden(ids_BT))
        carrier_BTD = self.carrier(ids_BT.numel(), like).view(like.shape)
        del like
        if ids_BT.is_cuda:
            empty_cache()
        left: list[Tensor] = []

        def forward() -> None:
            with torch.enable_grad():
                left[:] = [self.family.hidden(ids_BT)]
            carrier_BTD.copy_(left[0].detach())

        def backward() -> None:
            left.pop().backward(carrier_BTD)

        return HiddenPasses(ids_BT, carrier_BTD, record(forward), record(backward))


class _Replayed(torch.autograd.Function):
    """Hidden states of a graph, whose backward graph gives every gradient."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, passes: HiddenPasses, ids_BT: Tensor) -> Tensor:
        ctx.passes = passes
        return passes.forward(ids_BT).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[None, None, None]:
        ctx.passes.backward(gradient_BTD)
        return None, None, None
