"""Work of a lsp step, from dimensions alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import StepCost
from ondevice.methods.lsp.sizes import extra
from ondevice.methods.step_model import recomputed_flops

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.lsp.config import LspConfig


def step_cost(
    dims: ModelDims, config: LspConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    more = extra(dims, config, batch_size, length_tokens).flops
    return StepCost(
        recomputed_flops(dims, batch_size, length_tokens) + more, 3 * weight_bytes, config.compute
    )
