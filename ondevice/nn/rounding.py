"""Rounding that keeps small changes on average, for weights that are updated in bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def stochastic_round(out: Tensor, weight: Tensor, seed: int) -> Tensor:
    """Write `weight`, float32, into `out`: to bfloat16 up or down by chance, so that changes below
    a unit of the last place survive on average; other types as they round. The chances are a
    function of `seed`."""
    if out.dtype != torch.bfloat16:
        return out.copy_(weight)
    rng = torch.Generator(weight.device).manual_seed(seed)
    noise = torch.randint(
        0, 1 << 16, weight.shape, dtype=torch.int32, device=weight.device, generator=rng
    )
    bits = (weight.contiguous().view(torch.int32) + noise) & -(1 << 16)
    return out.copy_(bits.view(torch.float32))
